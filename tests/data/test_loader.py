import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tutti.data.loader import Loader, batch_at, held_out_batches, permute

ROW = np.arange(1003, dtype=np.uint16)


@given(st.integers(1, 500), st.integers(0, 2**60 - 1))
def test_permute_is_a_permutation(n, key):
    assert sorted(permute(np.arange(n), n, np.uint64(key)).tolist()) == list(range(n))


@given(st.integers(1, 10**12), st.integers(0, 2**60 - 1))
def test_permute_stays_inside_however_large(n, key):
    places = np.array([0, n // 2, n - 1])
    out = permute(places, n, np.uint64(key))
    assert ((out >= 0) & (out < n)).all()


def test_permute_shuffles():
    out = permute(np.arange(10_000), 10_000, np.uint64(7))
    assert abs(np.corrcoef(np.arange(10_000), out)[0, 1]) < 0.05
    other = permute(np.arange(10_000), 10_000, np.uint64(7 + (1 << 30)))
    assert abs(np.corrcoef(out, other)[0, 1]) < 0.05


def test_a_batch_is_windows_of_the_row_with_equal_labels():
    batch = Loader(ROW, batch=4, seq=10)(3)
    ids = batch["input_ids"]
    assert ids.shape == (4, 10) and ids.dtype == torch.int64
    assert torch.equal(ids, batch["labels"]) and ids.data_ptr() != batch["labels"].data_ptr()
    assert torch.equal(ids - ids[:, :1], torch.arange(10).expand(4, 10))


def test_each_epoch_visits_every_window_once_from_its_own_offset():
    loader = Loader(ROW, batch=9, seq=10, seed=1)
    assert loader.windows == 99
    first = [loader(s)["input_ids"][:, 0] for s in range(33)]
    starts = [torch.cat(first[11 * e : 11 * e + 11]) for e in range(3)]
    offsets = [int(s.min()) for s in starts]
    for epoch, offset in zip(starts, offsets, strict=True):
        assert epoch.sort().values.tolist() == list(range(offset, offset + 990, 10))
    assert len(set(offsets)) > 1
    assert not torch.equal(starts[0] - offsets[0], starts[1] - offsets[1])


def test_a_batch_may_lie_across_two_epochs():
    loader, whole = Loader(ROW, batch=50, seq=10), Loader(ROW, batch=99, seq=10)
    two = torch.cat([loader(0)["input_ids"], loader(1)["input_ids"]])
    assert torch.equal(two[:99], whole(0)["input_ids"])
    assert torch.equal(two[99:], whole(1)["input_ids"][:1])


def test_a_batch_is_a_function_of_seed_and_step():
    assert torch.equal(Loader(ROW, 4, 10, 5)(8)["input_ids"], Loader(ROW, 4, 10, 5)(8)["input_ids"])
    assert not torch.equal(Loader(ROW, 4, 10, 5)(8)["input_ids"], Loader(ROW, 4, 10, 6)(8)["input_ids"])


def test_too_short_a_corpus_is_an_error():
    with pytest.raises(ValueError, match="1003 tokens; windows of 600 need at least 1200"):
        Loader(ROW, 1, 600)


def test_held_out_windows_are_spread_over_the_text_and_distinct():
    batches = held_out_batches(ROW, batch=5, seq=10, count=3)
    starts = np.concatenate(batches)
    assert [len(b) for b in batches] == [5, 5, 5]
    assert starts[0] == 0 and starts[-1] == 990 and len(set(starts)) == 15
    assert held_out_batches(ROW, 5, 10, 1000)[-1][-1] == 990  # asking for more than there is: all
    assert len(held_out_batches(ROW, 5, 10, None)) == 20
    assert batch_at(ROW, batches[0], 10)["input_ids"][0].tolist() == list(range(10))


def test_too_little_held_out_text_is_an_error():
    with pytest.raises(ValueError, match=r"100 windows of 10 tokens, fewer than a batch of 200; hold out more"):
        held_out_batches(ROW, 200, 10, 1)
