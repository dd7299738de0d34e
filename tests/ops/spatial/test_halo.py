"""Border rows, against slices of the whole."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from tutti.ops.spatial.halo import halo, halo_rows, unhalo

PARTS = 4


class Part:
    """One of several threads, each with a part of the whole."""

    def __init__(self, index: int, sent: list, barrier: Barrier):
        self.index, self.sent, self.barrier = index, sent, barrier

    def ppermute(self, x, factor, by, edge=0.0):
        self.sent[self.index] = x
        self.barrier.wait()
        sender = self.index - by
        received = (
            torch.full_like(x, edge) if edge is not None and not 0 <= sender < PARTS else self.sent[sender % PARTS]
        )
        self.barrier.wait()
        return received


def run(function, parts):
    """function(here, x) of all parts at once."""
    sent, barrier = [None] * PARTS, Barrier(PARTS)
    with ThreadPoolExecutor(PARTS) as pool:
        return list(pool.map(lambda i: function(Part(i, sent, barrier), parts[i]), range(PARTS)))


BORDERS = [(0, 0), (1, 1), (2, 0), (0, 3), (5, 7), (-1, 2), (2, -1), (-1, -1)]


@pytest.mark.parametrize(("before", "after"), BORDERS)
@pytest.mark.parametrize("edge", [0.0, -1.0, None])
def test_halo_is_a_window_of_the_whole(before, after, edge):
    whole = torch.arange(24.0).view(2, 12)
    windows = run(lambda here, x: halo(here, x, "h", 1, before, after, edge), whole.chunk(PARTS, 1))
    border = torch.full((2, 12), edge) if edge is not None else whole
    padded = torch.cat([border, whole, border], 1)
    for i, part in enumerate(windows):
        assert torch.equal(part, padded[:, 12 + 3 * i - before : 12 + 3 * (i + 1) + after])


@pytest.mark.parametrize(("before", "after"), BORDERS)
@pytest.mark.parametrize("wrap", [False, True])
def test_unhalo_is_the_adjoint(before, after, wrap):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 12, generator=generator, dtype=torch.float64)
    edge = None if wrap else 0.0
    windows = run(lambda here, x: halo(here, x, "h", 1, before, after, edge), x.chunk(PARTS, 1))
    cotangents = [torch.randn(w.shape, generator=generator, dtype=torch.float64) for w in windows]
    back = run(lambda here, y: unhalo(here, y, "h", 1, before, after, wrap), cotangents)
    left = sum((w * y).sum() for w, y in zip(windows, cotangents, strict=True))
    torch.testing.assert_close(left, (x * torch.cat(back, 1)).sum())


def test_a_part_sends_as_many_rows_as_it_receives():
    assert halo_rows(2, 3) == 5 and halo_rows(-1, 1) == 1
