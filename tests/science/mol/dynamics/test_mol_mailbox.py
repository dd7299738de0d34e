"""Messages through shared memory: what each process gets, and what happens where there is no room or nobody answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tutti.science.mol.dynamics import mailbox
from tutti.science.mol.dynamics.exchange import Exchange, Route
from tutti.science.mol.dynamics.mailbox import Mailboxes

pytestmark = pytest.mark.starts


def start() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def routed(shares: bool) -> list[torch.Tensor]:
    """What a process gets in some rounds of messages of unequal sizes, forward and back."""
    exchange = Exchange(None)
    exchange.shares = shares
    rank, size, results = exchange.rank, exchange.size, []
    for grow in (1, 5):  # the second route needs more room
        rows = [torch.arange((rank + 2 * to) % 3 * grow) for to in range(size)]
        counts = [(source + 2 * rank) % 3 * grow for source in range(size)]
        route = Route(exchange, rows, counts, 2)
        assert (exchange.boxes is not None) == shares
        for step in range(7):
            table = torch.arange(30, dtype=torch.float64).view(10, 3) + 100 * rank + step
            head = torch.tensor([rank, step], dtype=torch.float64)
            heads, rows = route.forward(head, table)
            sums = torch.zeros(10, 3, dtype=torch.float64)
            back = route.backward(head, 2 * rows, sums)
            results += [heads, rows, sums, back, exchange.gather(table[:2])]
    return results


def test_shared_memory_carries_what_sockets_carry(pool):
    pool.run(start)
    before = set(Path("/dev/shm").glob("tutti-*"))
    for ours, theirs in zip(pool.run(routed, True), pool.run(routed, False), strict=True):
        assert len(ours) == len(theirs) == 70
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert set(Path("/dev/shm").glob("tutti-*")) == before  # nothing is left behind


def refused() -> str:
    exchange = Exchange(None)
    try:
        Mailboxes(exchange, 10**15 if exchange.rank == 1 else 100)
        return ""
    except OSError as error:
        return str(error)


def test_where_one_process_has_no_room_none_shares_memory(pool):
    pool.run(start)
    before = set(Path("/dev/shm").glob("tutti-*"))
    messages = pool.run(refused)
    assert all(messages) and messages[0] == "another process cannot share memory"
    assert set(Path("/dev/shm").glob("tutti-*")) == before


def waiting() -> str:
    exchange = Exchange(None)
    boxes = Mailboxes(exchange, 8)
    if exchange.rank:
        return ""
    mailbox.PATIENCE = 0.2
    try:
        boxes.swap(torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64), [1] * 4, [0] * 4)
        return "answered"
    except RuntimeError as error:
        return str(error)


def test_a_process_that_does_not_answer_is_named(pool):
    pool.run(start)
    assert pool.run(waiting)[0] == "process 1, which shares the simulation, has ended or hangs"
