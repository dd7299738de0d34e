"""Collectives on lists of tensors, against their definition."""

from __future__ import annotations

import pytest
import torch

from tutti.exec.kernels.codegen import Request
from tutti.exec.runtimes.virtual import exchange

MESH = {"a": 2, "b": 3}
GROUPS = {"a": [[0, 3], [1, 4], [2, 5]], "b": [[0, 1, 2], [3, 4, 5]]}


def parts(*shape: int) -> list[torch.Tensor]:
    return [torch.randn(*shape, generator=torch.Generator().manual_seed(rank)) for rank in range(6)]


@pytest.mark.parametrize("axis", "ab")
def test_all_reduce(axis):
    tensors = parts(4, 2)
    for op, combine in (("sum", sum), ("max", lambda ts: torch.stack(ts).amax(0))):
        reduced = exchange([Request("all_reduce", axis, op, x) for x in tensors], MESH)
        for group in GROUPS[axis]:
            expected = combine([tensors[r] for r in group])
            assert all(torch.allclose(reduced[r], expected) for r in group)


@pytest.mark.parametrize("axis", "ab")
def test_all_gather(axis):
    tensors = parts(4, 2)
    gathered = exchange([Request("all_gather", axis, "", x) for x in tensors], MESH)
    for group in GROUPS[axis]:
        assert all(torch.equal(gathered[r], torch.stack([tensors[m] for m in group])) for r in group)


@pytest.mark.parametrize("axis", "ab")
def test_reduce_scatter_and_all_to_all(axis):
    tensors = parts(MESH[axis], 5)
    reduced = exchange([Request("reduce_scatter", axis, "sum", x) for x in tensors], MESH)
    swapped = exchange([Request("all_to_all", axis, "", x) for x in tensors], MESH)
    for group in GROUPS[axis]:
        for place, rank in enumerate(group):
            assert torch.allclose(reduced[rank], sum(tensors[m][place] for m in group))
            assert torch.equal(swapped[rank], torch.stack([tensors[m][place] for m in group]))


def test_results_are_tensors_of_their_own():
    reduced = exchange([Request("all_reduce", "b", "sum", torch.ones(2)) for _ in range(6)], MESH)
    reduced[0].zero_()
    assert reduced[1].tolist() == [3.0, 3.0]


def test_ranks_that_ask_for_different_things():
    requests = [Request("all_reduce", "b", "sum", torch.ones(1)) for _ in range(5)]
    with pytest.raises(AssertionError, match="ranks disagree"):
        exchange([*requests, Request("all_gather", "b", "", torch.ones(1))], MESH)


@pytest.mark.parametrize("axes", ["a", "b", "a b"])
@pytest.mark.parametrize(("how", "edge"), [("1 0.0", 0.0), ("-1 -inf", -torch.inf), ("2 wrap", None)])
def test_shift_hands_on_along_the_axes(axes, how, edge):
    tensors = [torch.tensor([float(rank)]) for rank in range(6)]
    shifted = exchange([Request("ppermute", axes, how, x) for x in tensors], MESH)
    line = {"a": [[0, 3], [1, 4], [2, 5]], "b": [[0, 1, 2], [3, 4, 5]], "a b": [[0, 1, 2, 3, 4, 5]]}[axes]
    by = int(how.split()[0])
    for ranks in line:
        for i, rank in enumerate(ranks):
            inside = 0 <= i - by < len(ranks)
            expected = ranks[(i - by) % len(ranks)] if inside or edge is None else edge
            assert shifted[rank].item() == expected


@pytest.mark.parametrize("axes, groups", [("b", GROUPS["b"]), ("b a", [[0, 3, 1, 4, 2, 5]])])
def test_exchange_sends_as_many_rows_as_said(axes, groups):
    tensors, size = parts(9, 2), 12
    rows = torch.randint(0, 2, (6, 6), generator=torch.Generator().manual_seed(1))  # from, to
    asked = {}
    for group in groups:
        for rank in group:
            asked[rank] = Request(
                "exchange", axes, "", tensors[rank], rows=(rows[rank, group], rows[group, rank], size)
            )
    received = exchange([asked[rank] for rank in range(6)], MESH)
    for group in groups:
        for rank in group:
            sent = [tensors[m][: rows[m, group].sum()].split(rows[m, group].tolist()) for m in group]
            expected = torch.cat([parts[group.index(rank)] for parts in sent])
            assert torch.equal(received[rank][: len(expected)], expected)
            assert received[rank].shape == (size, 2) and not received[rank][len(expected) :].any()


def test_an_exchange_that_does_not_fit_is_an_error():
    three, none, x = torch.tensor([0, 0, 3]), torch.tensor([0, 0, 0]), torch.ones(4, 2)
    arrive = torch.tensor([3, 3, 3])
    pairs = [(three, none), (three, none), (three, arrive)] * 2
    with pytest.raises(RuntimeError, match="an exchange of 9 rows does not fit into a buffer of 8"):
        exchange([Request("exchange", "b", "", x, rows=(*pair, 8)) for pair in pairs], MESH)
    with pytest.raises(RuntimeError, match=r"expects \[0, 0, 0\] rows, the others send \[3, 3, 3\]"):
        exchange([Request("exchange", "b", "", x, rows=(three, none, 9))] * 6, MESH)
