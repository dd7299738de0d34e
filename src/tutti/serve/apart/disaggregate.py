"""Prompts and generation apart: one engine computes prompts, another generates from their KV caches.

    engine = Disaggregated(Engine(model, ...), Engine(model, ...))             # in one process
    engine = Disaggregated(Engine(model, ...), Remote(("10.0.0.2", 7000), key))  # the other calls `generate_for`

Both may have any plan. Blocks of the cache are sent whole, and split as the receiver's plan says. Messages are JSON and
the bytes of tensors (`wire`): reading one runs no code.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import Any, Protocol

from tutti.serve.apart import wire
from tutti.serve.engine.engine import Carried, Engine, served
from tutti.serve.engine.request import Output, Request, Sampling
from tutti.serve.values import Prompt

OUTPUTS = 64 << 20  # bytes of a message besides the cache
GREETING, LOOK = 10, 0.05  # seconds for a peer to prove that it has the key, and between looks whether one has
PEERS = 16  # that may do so at once
_log = logging.getLogger("tutti.serve")


class Generating(Protocol):
    """What generates from the caches of others: an engine, or `Remote`."""

    @property
    def busy(self) -> bool:
        """Whether a request is unfinished."""
        ...

    def take_over(self, carried: Carried) -> Output:
        """Go on with a request."""
        ...

    def step(self) -> list[Output]:
        """The outputs that have changed."""
        ...

    def cancel(self, id: str, reason: str = "cancelled") -> Output | None:
        """End a request."""
        ...


class Channel:
    """Messages over a connection. A thread reads what comes, so that a sender never waits for one that sends.

    peer: name of the other side. kinds: kinds of messages that it may send. most: bytes of a message from it, at most.
    """

    def __init__(self, connection: Connection, peer: str, kinds: Collection[str], most: int):
        self.connection, self.peer, self.kinds, self.most = connection, peer, {*kinds, "close"}, most
        self.came = queue.SimpleQueue[tuple[str, Any]]()
        self.thread = threading.Thread(target=self._read, name="tutti channel", daemon=True)
        self.thread.start()

    def send(self, kind: str, value: object = None) -> None:
        """Send a message."""
        self.connection.send_bytes(wire.pack(kind, value))

    def take(self, wait: bool) -> list[tuple[str, Any]]:
        """The kinds and values of what has come. wait: until there is something. "close": the other side has ended.

        Raises ConnectionError, which names the other side, if it has sent what is no message. The channel is closed
        then.
        """
        messages = [self.came.get()] if wait else []
        while not self.came.empty():
            messages.append(self.came.get())
        for kind, value in messages:
            if kind == "error":
                self.connection.close()
                raise ConnectionError(f"{self.peer} has sent {value}; the channel is closed")
        return messages

    def _read(self) -> None:
        kind = ""
        while kind not in ("close", "error"):
            try:
                kind, value = wire.unpack(self.connection.recv_bytes(self.most), self.kinds)
            except EOFError:
                kind, value = "close", None
            except OSError as error:
                kind, value = "close", None
                if "bad message length" in str(error):
                    kind, value = "error", f"a message of more than {self.most} bytes"
            except ValueError as error:
                kind, value = "error", str(error)
            self.came.put((kind, value))

    def close(self) -> None:
        """Tell the other side, which then closes the connection."""
        with suppress(OSError):
            self.send("close")
        self.thread.join(10)
        self.connection.close()


class Remote:
    """An engine in another process, which calls `generate_for`. address, key: address and key of its listener."""

    def __init__(self, address: tuple[str, int], key: bytes):
        self.channel = Channel(Client(address, authkey=key), _name(address), ["outputs"], OUTPUTS)
        self.outputs: dict[str, Output] = {}

    @property
    def busy(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self.outputs)

    def take_over(self, carried: Carried) -> Output:
        """Send a request with its cache. What an encoder reads is in the carried source."""
        request = replace(carried.request, prompt=carried.output.prompt, inputs={})
        self.channel.send("take_over", replace(carried, request=request))
        self.outputs[carried.output.id] = carried.output
        return carried.output

    def step(self) -> list[Output]:
        """Wait for the next outputs. Raises ConnectionError if the other process has ended, or sent something else."""
        if not self.outputs:
            return []
        changed = {}
        for kind, outputs in self.channel.take(wait=True):
            if kind == "close":
                raise ConnectionError(f"the process that generates, {self.channel.peer}, has ended")
            for sent in outputs:
                if (output := self.outputs.get(sent.id)) is None:
                    continue
                behind = output.arrival - sent.arrival  # of the clocks
                vars(output).update(vars(sent), arrival=output.arrival, times=[x + behind for x in sent.times])
                changed[sent.id] = output
        for id, output in changed.items():
            if output.finished:
                del self.outputs[id]
        return list(changed.values())

    def cancel(self, id: str, reason: str = "cancelled") -> Output | None:
        """End a request; its last output comes with the next step."""
        if id in self.outputs:
            self.channel.send("cancel", (id, reason))
        return None

    def close(self) -> None:
        """End `generate_for`."""
        self.channel.close()


def generate_for(engine: Engine, address: tuple[str, int], key: bytes) -> None:
    """Generate for the `Remote` that connects, until it closes. In a job of several processes, rank 0 listens.

    Who connects without the key is logged, and the next one is waited for. A message holds at most what the engine's
    cache does. Raises ConnectionError, which names the peer, for what is no message; its requests are cancelled, and
    the engine can go on.
    """
    if not engine.runner.leads:
        engine.runner.follow()
        return
    try:
        connection, peer = _accept(address, key)
        with connection:
            _generate_for(
                engine, Channel(connection, peer, ["take_over", "cancel"], OUTPUTS + engine.runner.cache_bytes)
            )
    finally:
        engine.runner.release(None)


def _accept(address: tuple[str, int], key: bytes) -> tuple[Connection, str]:
    """The first connection of a peer that has the key. Peers that are silent delay no other."""
    passed: list[tuple[Connection, str]] = []
    greeting: list[threading.Thread] = []
    with socket.create_server(address) as server:
        server.settimeout(LOOK)
        while not passed:
            with suppress(TimeoutError):
                one, where = server.accept()
                greeting = [x for x in greeting if x.is_alive()]
                if len(greeting) >= PEERS:
                    one.close()
                    continue
                greeting.append(threading.Thread(target=_greet, args=(one, _name(where), key, passed), daemon=True))
                greeting[-1].start()
    return passed[0]


def _greet(one: socket.socket, peer: str, key: bytes, passed: list[tuple[Connection, str]]) -> None:
    """Let both sides prove that they have the key. The first connection that passes is appended."""
    one.setblocking(True)
    connection: Any = Connection(os.dup(one.fileno()))
    late = threading.Timer(GREETING, _end, (one,))  # a timeout of each read would let a peer send byte by byte
    late.daemon = True
    late.start()
    try:
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        late.cancel()
        if passed:
            raise EOFError("another peer was first")
        passed.append((connection, peer))
    except (AuthenticationError, EOFError, OSError, ValueError, AssertionError) as error:
        _log.warning("%s is refused: it does not prove that it has the key (%s)", peer, error)
        connection.close()
    late.cancel()
    one.close()


def _end(one: socket.socket) -> None:
    """Close both directions of a socket, which ends all that waits for it."""
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


def _name(address: object) -> str:
    return ":".join(map(str, address[:2])) if isinstance(address, tuple) else str(address)


def _generate_for(engine: Engine, channel: Channel) -> None:
    own: set[str] = set()  # requests of the channel
    try:
        while True:
            changed: list[Output] = []
            for kind, value in channel.take(wait=not engine.busy):
                if kind == "close":
                    return
                if kind == "cancel":
                    output = engine.cancel(*value)
                    changed += [output] if output else []
                    continue
                try:
                    engine.take_over(value)
                    own.add(value.request.id)
                except ValueError as error:
                    value.output.error = str(error)
                    changed.append(value.output)
            changed += engine.step() if engine.busy else []
            if changed:
                channel.send("outputs", list({x.id: x for x in changed}.values()))
    finally:
        for id in own:
            engine.cancel(id)


class Disaggregated:
    """Two engines as one, with the methods of an engine. A request moves after its first token."""

    def __init__(self, prompts: Engine, generation: Generating):
        self.prompts, self.generation = prompts, generation
        self.bytes = 0  # of the caches that were sent
        self.constraints = prompts.constraints
        if isinstance(generation, Engine):
            generation.constraints = self.constraints

    def add(self, request: Request) -> Output:
        """As `Engine.add`."""
        return self.prompts.add(request)

    def step(self) -> list[Output]:
        """A step of each engine that has requests."""
        changed = self.prompts.step() if self.prompts.busy else []
        for output in changed:
            if output.id in self.prompts.jobs and (carried := self.prompts.hand_on(output.id)):
                self.bytes += carried.bytes
                self.generation.take_over(carried)
        return [*changed, *(self.generation.step() if self.generation.busy else ())]

    def cancel(self, id: str, reason: str = "cancelled") -> Output | None:
        """As `Engine.cancel`."""
        return self.prompts.cancel(id, reason) or self.generation.cancel(id, reason)

    @property
    def busy(self) -> bool:
        """Whether a request is unfinished."""
        return self.prompts.busy or self.generation.busy

    def generate(self, requests: Iterable[Request | Prompt], sampling: Sampling | None = None) -> list[Output]:
        """As `Engine.generate`."""
        return served(self, requests, sampling)
