"""Packed rows give the loss and gradients of separate sequences, in plain torch and on virtual devices."""

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

import tutti
from tutti.data.packs import Packs, pack_lengths, packed_batch

LENGTHS = st.lists(st.integers(1, 20), max_size=60)
SIZES = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@given(LENGTHS, st.sampled_from(("best", "first")), st.integers(1, 30))
def test_every_sequence_is_in_one_row_that_has_room(lengths, fit, window):
    rows = pack_lengths(lengths, 20, window, fit)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 20 and row == sorted(row) for row in rows)


@given(LENGTHS, st.sampled_from(("best", "first")))
def test_at_most_one_row_is_not_half_full(lengths, fit):
    fills = [sum(lengths[i] for i in row) for row in pack_lengths(lengths, 20, fit=fit)]
    assert sum(2 * fill <= 20 for fill in fills) <= 1


@given(LENGTHS, st.integers(1, 10))
def test_windows_are_packed_by_themselves(lengths, window):
    whole = pack_lengths(lengths, 20, window)
    assert pack_lengths(lengths[:window], 20, window) == [row for row in whole if row[0] < window]


def test_best_fit_takes_the_fullest_row():
    lengths = [6, 5, 4, 3]  # of 9
    assert pack_lengths(lengths, 9) == [[0, 3], [1, 2]]
    assert pack_lengths([5, 7, 2], 9, fit="first") == pack_lengths([5, 7, 2], 9) == [[0], [1, 2]]


def test_what_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="sequence 1 has 9 tokens; rows of 8 take 1 to 8"):
        pack_lengths([3, 9], 8)


def test_positions_labels_and_mask_by_hand():
    batch = packed_batch([{"sequences": [[5, 6, 7], [8, 9]]}], 6, pad_id=1)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100, 9, -100]]
    assert batch["attention_mask"][0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0], [0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1],
    ]  # fmt: skip


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, intermediate_size=48))


def gpt2():
    sizes = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}
    rates = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **rates, loss_type="ForCausalLM"))


def bert():
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **rates, intermediate_size=48))


def sequences():
    draw = np.random.default_rng(0)
    return [{"input_ids": draw.integers(1, 50, n).tolist()} for n in (6, 9, 4, 12, 7, 3, 5, 11)]


def separate_loss(model, packs, causal):
    """The mean over all labels of all sequences, each passed through the model alone."""
    total = count = 0
    for pack in packs:
        for ids in map(torch.tensor, pack["sequences"]):
            logits = model(input_ids=ids[None]).logits[0]
            predictions, wanted = (logits[:-1], ids[1:]) if causal else (logits, ids)
            total += torch.nn.functional.cross_entropy(predictions, wanted, reduction="sum")
            count += len(wanted)
    return total / count


@pytest.mark.parametrize(
    "make, causal, attention",
    ((llama, True, "mask"), (llama, True, "positions"), (gpt2, True, "mask"), (gpt2, True, "positions"),
     (bert, False, "mask")),
)  # fmt: skip
def test_loss_and_gradients_are_those_of_separate_sequences(make, causal, attention):
    torch.manual_seed(0)
    model = make()
    packs = Packs(sequences(), 16)
    assert len(packs) == 4 and packs.filled > 0.8
    batch = packed_batch([packs[i] for i in range(4)], 16, causal=causal, attention=attention)
    expected = separate_loss(model, packs, causal)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], rtol=1e-5, atol=1e-6, msg=name)

    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = tutti.parallelize(model, optimizer, batch, cluster="cpu:2", plan="dp2", level="O0")
    torch.testing.assert_close(step(batch), expected.detach(), rtol=1e-5, atol=1e-6)
    after = step.state_dict()
    for name, gradient in gradients.items():
        torch.testing.assert_close(before[name] - after[name], gradient, rtol=1e-5, atol=1e-6, msg=name)


def test_positions_are_not_for_models_that_look_both_ways():
    with pytest.raises(ValueError, match="in causal models only; use attention='mask'"):
        packed_batch([{"sequences": [[1]]}], 4, causal=False, attention="positions")


def test_a_pack_that_is_too_long_is_an_error():
    with pytest.raises(ValueError, match="a pack has 5 tokens, more than a row of 4"):
        packed_batch([{"sequences": [[1, 2], [3, 4, 5]]}], 4)
