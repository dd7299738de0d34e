"""Messages between the processes that share a simulation, by a Gloo group or, on one machine, shared memory.

Every message carries a header of numbers to all processes, so that they decide together without messages of their own.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.science.mol.dynamics.mailbox import Mailboxes


class Exchange:
    """Tensors are float64 rows."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        if not dist.is_initialized():
            raise ValueError("torch.distributed is not initialized; start with torchrun or `tutti md --processes`")
        if dist.get_backend(group) != "gloo":
            raise ValueError(
                f"the group's backend is {dist.get_backend(group)}; give group=dist.new_group(backend='gloo')"
            )
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.boxes: Mailboxes | None = None
        self.shares = True  # whether to try shared memory

    def gather(self, values: Tensor) -> Tensor:
        """(size, n) of values (n), in the order of processes."""
        out = values.new_empty(self.size, *values.shape)
        count = values.numel()
        if self.boxes is not None and count * self.size <= self.boxes.capacity:
            self.boxes.swap(
                out.view(-1), values.reshape(-1).repeat(self.size), [count] * self.size, [count * self.rank] * self.size
            )
        else:
            dist.all_gather(list(out), values.contiguous(), group=self.group)
        return out

    def gather_objects(self, value: Any) -> list[Any]:
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, value, group=self.group)
        return out

    def add_up(self, values: Tensor) -> None:
        """Sum over the processes, in place."""
        dist.all_reduce(values, group=self.group)

    def make_room(self, capacity: int) -> None:
        """Let `swap` send so many numbers to all together: through shared memory, if all are on one machine."""
        if self.shares and (self.boxes is None or self.boxes.capacity < capacity):
            try:
                self.boxes = Mailboxes(self, capacity + capacity // 2)
            except OSError:
                self.boxes, self.shares = None, False

    def swap(self, into: Tensor, out: Tensor, received: list[int], sent: list[int], starts: list[int]) -> None:
        """Send so many numbers to each process, and receive so many. starts: where those for this process begin in what
        the others send."""
        if self.boxes is not None:
            self.boxes.swap(into, out, received, starts)
        else:
            dist.all_to_all_single(into, out, received, sent, group=self.group)

    def send(self, rows: list[Tensor]) -> list[Tensor]:
        """Rows (n, w) for each process; returns those from each process."""
        width = rows[0].shape[1]
        sent = torch.tensor([len(x) for x in rows])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        sizes = received.tolist()
        out = torch.empty(sum(sizes), width, dtype=torch.float64)
        dist.all_to_all_single(out, torch.cat(rows), sizes, sent.tolist(), group=self.group)
        return list(out.split(sizes))

    def share(self, values: Tensor) -> Tensor:
        """Those of the first process, in every process, in place."""
        dist.broadcast(values, group=self.group, group_src=0)
        return values


class Route:
    """Which rows of a table go to each process, step after step, and how many come from each.

    rows: for each process, int64. sizes: how many rows of three numbers come. header: its numbers.
    """

    def __init__(self, exchange: Exchange, rows: list[Tensor], sizes: list[int], header: int) -> None:
        self.exchange, self.header = exchange, header
        self.rows = torch.cat(rows)
        self.sent, self.received = ([header + 3 * n for n in ns] for ns in ([len(x) for x in rows], sizes))
        self.out, self.back = (torch.empty(sum(n), dtype=torch.float64) for n in (self.sent, self.received))
        sizes_of_all = exchange.gather(torch.tensor(self.sent, dtype=torch.float64)).to(torch.int64)  # from, to
        self.starts = sizes_of_all[:, : exchange.rank].sum(1).tolist()  # of what is for this process, forward and back
        self.back_starts = sizes_of_all[: exchange.rank].sum(0).tolist()
        exchange.make_room(max(int(sizes_of_all.sum(1).max()), int(sizes_of_all.sum(0).max())))
        self.out_heads, self.out_body = _places(self.sent, header)
        self.back_heads, self.back_body = _places(self.received, header)

    def forward(self, head: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Send a header (h) and rows of a table (n, 3); returns headers (size, h) and rows from the others."""
        self.out[self.out_heads] = head
        self.out[self.out_body] = table[self.rows].flatten()
        self.exchange.swap(self.back, self.out, self.received, self.sent, self.starts)
        return self.back[self.back_heads], self.back[self.back_body].view(-1, 3)

    def backward(self, head: Tensor, rows: Tensor, table: Tensor) -> Tensor:
        """Send a header, and rows that came forward back to where they belong, where they are added to a table."""
        self.back[self.back_heads] = head
        self.back[self.back_body] = rows.flatten()
        self.exchange.swap(self.out, self.back, self.sent, self.received, self.back_starts)
        table.index_add_(0, self.rows, self.out[self.out_body].view(-1, 3))
        return self.out[self.out_heads]


def _places(sizes: list[int], header: int) -> tuple[Tensor, Tensor]:
    """Where headers (processes, h) and all other numbers lie in a buffer of messages."""
    starts = torch.tensor([0, *accumulate(sizes)][:-1])
    heads = starts[:, None] + torch.arange(header)
    body = [torch.arange(header, n) + int(start) for n, start in zip(sizes, starts, strict=True)]
    return heads, torch.cat(body)
