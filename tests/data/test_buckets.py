import pytest
import torch

from tutti.data import bucket_lengths, pad_to_bucket
from tutti.data.buckets import bucket


def test_lengths_are_eighths_of_a_power_of_two():
    assert bucket_lengths(32) == [8, 16, 24, 32]
    assert bucket_lengths(150)[-4:] == [120, 128, 144, 150] and len(bucket_lengths(8192)) == 16 + 8 * 6


@pytest.mark.parametrize("length", range(1, 300, 7))
def test_at_most_an_eighth_is_padding(length):
    padded_length = pad_to_bucket({"input_ids": torch.ones(1, length, dtype=torch.long)})["input_ids"].shape[1]
    assert length <= padded_length <= max(length + 7, length * 9 / 8)
    assert padded_length == bucket(length) == min(n for n in bucket_lengths(512) if n >= length)


def test_each_entry_has_its_value():
    ones = torch.ones(2, 5, dtype=torch.long)
    batch = {
        "input_ids": ones, "attention_mask": ones, "token_type_ids": ones, "special_tokens_mask": ones,
        "labels": torch.ones(2, 3, dtype=torch.long), "decoder_input_ids": torch.ones(2, 3, dtype=torch.long),
        "decoder_attention_mask": torch.ones(2, 3, dtype=torch.long),
    }  # fmt: skip
    padded = pad_to_bucket(batch, (4, 8), pad_id=9)
    assert {name: x[0].tolist() for name, x in padded.items()} == {
        "input_ids": [1] * 5 + [9] * 3, "attention_mask": [1] * 5 + [0] * 3, "token_type_ids": [1] * 5 + [0] * 3,
        "special_tokens_mask": [1] * 8, "labels": [1, 1, 1, -100], "decoder_input_ids": [1, 1, 1, 9],
        "decoder_attention_mask": [1, 1, 1, 0],
    }  # fmt: skip


def test_a_mask_that_is_missing_is_made():
    padded = pad_to_bucket({"input_ids": torch.full((1, 3), 5)}, (4,), pad_id=0)
    assert padded["attention_mask"].tolist() == [[1, 1, 1, 0]]


def test_a_mask_of_four_dims_is_padded_in_two():
    ids, mask = torch.ones(2, 3, dtype=torch.long), torch.ones(2, 1, 3, 3, dtype=torch.bool)
    padded = pad_to_bucket({"input_ids": ids, "attention_mask": mask}, (4,))["attention_mask"]
    assert padded.dtype == torch.bool and padded[0, 0].int().tolist() == [[1, 1, 1, 0]] * 3 + [[0, 0, 0, 1]]
    padded = pad_to_bucket({"input_ids": ids, "attention_mask": mask.float() - 1}, (4,), side="left")["attention_mask"]
    low = torch.finfo(torch.float32).min
    assert padded[0, 0].tolist() == [[0, low, low, low]] + [[low, 0, 0, 0]] * 3


def test_packed_positions_get_no_mask():
    ids = torch.ones(1, 3, dtype=torch.long)
    padded = pad_to_bucket({"input_ids": ids, "position_ids": torch.tensor([[0, 1, 0]]), "use_cache": False}, (4,))
    assert padded["position_ids"].tolist() == [[0, 1, 0, 0]] and "attention_mask" not in padded


def test_labels_of_rows_and_other_entries_are_unchanged():
    batch = {"input_ids": torch.ones(2, 3, dtype=torch.long), "labels": torch.tensor([0, 1]),
             "pixel_values": torch.zeros(2, 3, 5, 5)}  # fmt: skip
    padded = pad_to_bucket(batch, (8,))
    several = torch.zeros(2, 3)
    assert pad_to_bucket({**batch, "labels": several}, (8,))["labels"] is several
    assert padded["labels"] is batch["labels"] and padded["pixel_values"] is batch["pixel_values"]


def test_the_left_side():
    padded = pad_to_bucket({"input_ids": torch.full((1, 2), 5)}, (4,), pad_id=7, side="left")
    assert padded["input_ids"].tolist() == [[7, 7, 5, 5]]


def test_too_long_a_sequence_is_an_error():
    with pytest.raises(ValueError, match="a sequence of 9 is longer than the last bucket, 8"):
        pad_to_bucket({"input_ids": torch.ones(1, 9, dtype=torch.long)}, (4, 8))
