"""Messages between the fragments of a run: nested dicts of tensors, within a process and between processes.

A message is one buffer of bytes, whose structure the receiver knows. Instead of a message a process may send the text
of an error, which `receive` raises: no process waits for one that has failed. `Lost` names a process that was killed.

A client sends a message to the server, process 0, and waits for the answer. In the server's process that is a call; a
client of another process is served by a thread, in the order in which its messages come.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from tutti.rl.placement.ranks import process, processes

Tree = dict[str, Any]
Handler = Callable[[Tree], Tree]
HEAD, TEXT = 64, 2048  # bytes: of a message's head, which says how long an error's text is, and of the longest text
ALIGNED = 64  # bytes: tensors begin at multiples
LOOK, PATIENCE = 0.2, 30.0  # seconds: between looks at a failure, and until others have heard of it


class Failed(RuntimeError):
    """A process has failed; the message says which, and has its error. source: who told of it."""

    def __init__(self, source: int, text: str):
        super().__init__(text)
        self.source = source


class Lost(RuntimeError):
    """Another process has exited without sending an error: it was killed, or its machine was."""

    def __init__(self, source: int, why: object):
        super().__init__(f"process {source} of this job has ended ({str(why).splitlines()[0]})")
        self.source = source


def send(message: Tree, to: int, tag: int = 0) -> None:
    """Send a message whose structure the receiver knows. Raises Lost."""
    buffer = torch.zeros(size_of(message), dtype=torch.uint8)
    for (start, end), x in _places(message):
        buffer[start:end] = _raw(x.contiguous())
    _send(buffer, to, tag)


def send_error(error: BaseException, like: Tree, to: int, tag: int = 0) -> None:
    """Send an error to a process that waits for a message. like: a message of the structure that it waits for."""
    own = f"process {process()} has failed: {type(error).__name__}: {error}"
    raw = (str(error) if isinstance(error, Failed | Lost) else own).encode()[:TEXT]
    buffer = torch.zeros(size_of(like), dtype=torch.uint8)
    buffer[:8] = torch.tensor([len(raw)]).view(torch.uint8)
    buffer[HEAD : HEAD + len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    _send(buffer, to, tag)


def receive(like: Tree, source: int, tag: int = 0) -> Tree:
    """Receive a message with the structure, shapes and dtypes of `like`. Raises Failed and Lost."""
    buffer = torch.empty(size_of(like), dtype=torch.uint8)
    try:
        dist.recv(buffer, source, tag=tag)
    except RuntimeError as error:
        raise Lost(source, error) from None
    if length := int(buffer[:8].view(torch.int64)):
        raise Failed(source, bytes(buffer[HEAD : HEAD + length].tolist()).decode(errors="replace"))
    tensors = [buffer[start:end].clone().view(x.dtype).view(x.shape) for (start, end), x in _places(like)]
    return pytree.tree_unflatten(tensors, pytree.tree_structure(like))


def size_of(message: Tree) -> int:
    """Bytes of a message's buffer."""
    return HEAD + max(TEXT, sum(_padded(x) for x in pytree.tree_leaves(message)))


def send_to_all(message: Tree) -> None:
    """Send a message from process 0 to all others."""
    for rank in range(1, processes()):
        send(message, rank)


def gather(messages: list[Tree]) -> list[Tree]:
    """Gather the messages of all processes, equally many of each, at process 0, in order; returns [] elsewhere."""
    if processes() == 1:
        return messages
    mine = together(messages)
    if process():
        send(mine, 0)
        return []
    return [*messages, *(x for source in range(1, processes()) for x in receive(mine, source).values())]


def together(messages: list[Tree]) -> Tree:
    """Combine messages into one."""
    return {str(i): message for i, message in enumerate(messages)}


def _send(buffer: Tensor, to: int, tag: int) -> None:
    try:
        dist.send(buffer, to, tag=tag)
    except RuntimeError as error:
        raise Lost(to, error) from None


def _places(message: Tree) -> list[tuple[tuple[int, int], Tensor]]:
    """Begin and end of each tensor in the buffer, with the tensor."""
    places, start = [], HEAD
    for x in pytree.tree_leaves(message):
        places.append(((start, start + x.numel() * x.element_size()), x))
        start += _padded(x)
    return places


def _padded(x: Tensor) -> int:
    return -(-x.numel() * x.element_size() // ALIGNED) * ALIGNED


def _raw(x: Tensor) -> Tensor:
    """The bytes of a contiguous tensor."""
    return x.view(-1).view(torch.uint8)


class Failure:
    """The first error of the fragments of a process. The others stop with it."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def set(self, error: BaseException) -> None:
        self.error = self.error or error

    def check(self) -> None:
        if self.error:
            raise self.error


class Waiting:
    """A queue of at most `bound` messages. `put` and `get` raise the run's failure instead of waiting forever."""

    def __init__(self, bound: int, failure: Failure):
        self.queue: queue.Queue[Tree] = queue.Queue(bound)
        self.failure = failure

    def put(self, message: Tree) -> None:
        while True:
            self.failure.check()
            with suppress(queue.Full):
                return self.queue.put(message, timeout=LOOK)

    def get(self) -> Tree:
        while True:
            self.failure.check()
            with suppress(queue.Empty):
                return self.queue.get(timeout=LOOK)


class Threads:
    """A function in a thread for each item. An error becomes the run's failure, and `tell(item, error)` is called."""

    def __init__(self, work: Callable[[Any], None], items: list, failure: Failure, tell: Any = None):
        self.failure, self.tell = failure, tell
        self.running = [threading.Thread(target=self._run, args=(work, item), daemon=True) for item in items]
        for thread in self.running:
            thread.start()

    def _run(self, work: Callable[[Any], None], item: Any) -> None:
        try:
            work(item)
        except BaseException as error:
            own = self.failure.error is None and not isinstance(error, Failed | Lost)
            self.failure.set(error)
            if own and self.tell:
                with suppress(Lost):
                    self.tell(item, error)

    def join(self) -> None:
        """Wait for all; after a failure at most PATIENCE seconds. Raises it."""
        for thread in self.running:
            while thread.is_alive() and not self.failure.error:
                thread.join(LOOK)
            thread.join(PATIENCE)
        self.failure.check()


class Server:
    """Answers the clients of other processes, each in a thread.

    handler: called with a message; by one thread at a time if it takes a lock. like, answer: messages of the structures
    of questions and answers. clients: the process of each tag. rounds: messages that each client sends. A failure of
    this process is the answer to all clients, and that of a client the failure of this process.
    """

    def __init__(self, handler: Handler, like: Tree, answer: Tree, clients: dict[int, int], rounds: int,
                 failure: Failure):  # fmt: skip
        def serve(client: tuple[int, int]) -> None:
            tag, source = client
            for _ in range(rounds):
                question = receive(like, source, tag)
                try:
                    failure.check()
                    reply = handler(question)
                except BaseException as error:
                    failure.set(error)
                    return send_error(error, answer, source, tag)
                send(reply, source, tag)

        self.threads = Threads(serve, list(clients.items()), failure)

    def join(self) -> None:
        self.threads.join()
