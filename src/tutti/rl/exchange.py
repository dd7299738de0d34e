"""Messages between the fragments of a run: nested dicts of tensors, within a process and between processes.

A client sends a message to the server, process 0, and waits for the answer. In the server's process that is a call; a
client of another process is served by a thread, in the order in which its messages come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from tutti.rl.ranks import process, processes

Tree = dict[str, Any]
Handler = Callable[[Tree], Tree]


def send(message: Tree, to: int, tag: int = 0) -> None:
    """Send a message whose structure the receiver knows."""
    for x in pytree.tree_leaves(message):
        dist.send(_raw(x.contiguous()), to, tag=tag)


def receive(like: Tree, source: int, tag: int = 0) -> Tree:
    """A message of the structure, shapes and dtypes of another."""
    leaves, tree = pytree.tree_flatten(like)
    found = []
    for x in leaves:
        got = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.recv(_raw(got), source, tag=tag)
        found.append(got)
    return pytree.tree_unflatten(found, tree)


def broadcast(message: Tree, source: int = 0) -> Tree:
    """The message of one process in all processes. message: there it, elsewhere one of its structure."""
    if processes() == 1:
        return message
    leaves, tree = pytree.tree_flatten(message)
    found = [x.clone(memory_format=torch.contiguous_format) for x in leaves]
    for x in found:
        dist.broadcast(_raw(x), source)
    return pytree.tree_unflatten(found, tree)


def gather(messages: list[Tree]) -> list[Tree] | None:
    """The messages of all processes, in their order, at process 0; None elsewhere. Each has equally many."""
    if processes() == 1:
        return messages
    flat = [pytree.tree_flatten(message) for message in messages]
    columns: list[list[Tensor]] = []
    for leaves, _ in flat:
        for x in leaves:
            mine = _raw(x.contiguous())
            parts = [torch.empty_like(mine) for _ in range(processes())] if process() == 0 else None
            dist.gather(mine, parts, 0)
            if parts is not None:
                columns.append([part.view(x.dtype).view(x.shape) for part in parts])
    if process():
        return None
    found, count = [], len(flat[0][0])
    for p in range(processes()):
        for i, (_, tree) in enumerate(flat):
            found.append(pytree.tree_unflatten([c[p] for c in columns[i * count : (i + 1) * count]], tree))
    return found


def _raw(x: Tensor) -> Tensor:
    """The bytes of a contiguous tensor."""
    return x.view(-1).view(torch.uint8)


class Server:
    """Answers the clients of other processes, each in a thread.

    handler: called with a message, by one thread at a time if it takes a lock. like: a message. rounds: messages that
    each client sends.
    """

    def __init__(self, handler: Handler, like: Tree, clients: dict[int, int], rounds: int):
        self.handler, self.errors = handler, []
        self.threads = [threading.Thread(target=self._serve, args=(source, tag, like, rounds), daemon=True)
                        for tag, source in clients.items()]  # fmt: skip
        for thread in self.threads:
            thread.start()

    def _serve(self, source: int, tag: int, like: Tree, rounds: int) -> None:
        try:
            for _ in range(rounds):
                send(self.handler(receive(like, source, tag)), source, tag)
        except Exception as error:
            self.errors.append(error)

    def join(self) -> None:
        for thread in self.threads:
            thread.join()
        if self.errors:
            raise self.errors[0]
