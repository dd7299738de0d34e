"""Prompts on one engine, generation on another: tokens as by one engine alone."""

from __future__ import annotations

import json
import os
import pickle
import socket
import struct
import threading
import time
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener

import numpy as np
import pytest
import tiny
import torch

from tutti.serve import Completion, Disaggregated, Engine, Output, Remote, Request, Sampling, generate_for
from tutti.serve.apart import disaggregate, wire
from tutti.serve.engine.engine import Carried
from tutti.serve.engine.request import TokenLogprobs
from tutti.serve.source import Source

LENGTHS = (5, 40, 21)


def engine(plan: str = "single", devices: int = 1, **options) -> Engine:
    return Engine(tiny.model(), tokenizer=tiny.tokenizer(), plan=plan, cluster=f"cpu:{devices}",
                  **{"blocks": 32, "budget": 32, "most": 4, **options})  # fmt: skip


def requests() -> list[Request]:
    plain = [Request(x, Sampling(max_tokens=12, temperature=0, ignore_end=True)) for x in tiny.prompts(*LENGTHS)]
    several = Request([1, 2, 3], Sampling(max_tokens=6, n=3, seed=1, ignore_end=True, logprobs=0))
    bound = Request("a", Sampling(max_tokens=20, regex="[ab]{4,9}x", seed=2))
    beams = Request([4, 5], Sampling(max_tokens=5, beams=3))
    once = Request([7, 8], Sampling(max_tokens=1, temperature=0))
    return [*plain, several, bound, beams, once]


def tokens(outputs) -> list:
    return [[(x.tokens, x.text, x.finish, len(x.logprobs)) for x in output.completions] for output in outputs]


@pytest.fixture(scope="module")
def alone() -> list:
    """What one engine answers."""
    return tokens(engine().generate(requests()))


@pytest.mark.parametrize("prompts, generation", [
    ({}, {}), ({"plan": "tp2", "devices": 2}, {"plan": "pp2", "devices": 2}), ({}, {"blocks": 8, "longest": 100}),
])  # fmt: skip
def test_in_one_process(prompts, generation, alone):
    disaggregated = Disaggregated(engine(**prompts), engine(**generation))
    assert tokens(disaggregated.generate(requests())) == alone
    assert disaggregated.bytes and disaggregated.generation.steps > 5  # pyright: ignore
    assert disaggregated.prompts.pool.used == disaggregated.generation.pool.used == 0  # pyright: ignore


def test_requests_on_their_way_can_be_cancelled():
    disaggregated = Disaggregated(engine(), engine(blocks=4, longest=60))
    first, second = (Request(x, Sampling(max_tokens=15, ignore_end=True)) for x in tiny.prompts(40, 40))
    outputs = [disaggregated.add(first), disaggregated.add(second)]
    while not disaggregated.generation.arriving:  # pyright: ignore
        disaggregated.step()
    disaggregated.cancel(second.id)
    while disaggregated.busy:
        disaggregated.step()
    assert [x.completions[0].finish for x in outputs] == ["length", "cancelled"]


def _generate(port: int) -> None:
    generate_for(engine("tp4", 4), ("127.0.0.1", port), b"secret")


def test_between_processes(pool):
    """The generating engine is a job of four processes; this process computes the prompts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for pipe in pool.pipes:
        pipe.send((_generate, (port,)))
    end = time.monotonic() + 120
    while True:
        try:
            remote = Remote(("127.0.0.1", port), b"secret")
            break
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.2)
    disaggregated = Disaggregated(engine(), remote)
    generated = tokens(disaggregated.generate(requests()))
    disaggregated.step()
    remote.close()
    assert [pipe.recv() for pipe in pool.pipes] == [(True, None)] * 4
    assert generated == tokens(engine().generate(requests()))


# -- messages ---------------------------------------------------------------------------------------------------------


class Trap:
    """Touches a file when it is unpickled."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def carried() -> Carried:
    sampling = Sampling(max_tokens=9, temperature=0, stop=["x"], stop_tokens=[], bad=[], logprob_tokens=[],
                        logit_bias={3: 1.5}, schema={"type": "object"})  # fmt: skip
    output = Output("a", [1, 2], [Completion([5], "e", logprobs=[TokenLogprobs(5, -0.5, [(5, -0.5)], 1)])], arrival=1.0)
    source = Source({"x": torch.ones(2, 3)}, 3, 3, np.arange(3), torch.zeros(3, 4, dtype=torch.bfloat16))
    caches = [{"k": torch.arange(6.0).view(3, 1, 2).half(), "v": torch.zeros(3, 1, 0)}]
    return Carried(Request([1, 2], sampling, id="a"), output, source, 7, [(0, [1, 2, 5], 2, -0.5)], 0.25, caches)


def test_a_message_holds_what_is_carried():
    sent = carried()
    kind, came = wire.unpack(wire.pack("take_over", sent), ["take_over"])
    assert kind == "take_over" and came.request == sent.request and came.output == sent.output
    assert (came.seed, came.sequences, came.elapsed) == (sent.seed, sent.sequences, sent.elapsed)
    assert came.source.digest == sent.source.digest and came.source.places.tolist() == [0, 1, 2]
    for name, x in sent.caches[0].items():
        assert came.caches[0][name].dtype == x.dtype and torch.equal(came.caches[0][name], x)
    assert torch.equal(came.source.features, sent.source.features)


def framed(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def changed(**fields) -> bytes:
    """A message whose value has other fields."""
    whole = wire.pack("take_over", carried())
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    header["value"] |= fields
    return framed(header, whole[8 + size :])


MESSAGES = {
    "a pickle": pickle.dumps(Trap("x")),
    "a pickle within": framed(pickle.dumps(Trap("x"))),
    "nothing": b"",
    "a huge length": (1 << 63).to_bytes(8, "little") + b"{}",
    "not JSON": framed(b"{"),
    "not text": framed(b"\xff\xfe"),
    "nested": framed(b"[" * 200_000),
    "another kind": framed({"kind": "outputs", "value": [], "tensors": []}),
    "a kind that is a list": framed({"kind": ["take_over"], "value": [], "tensors": []}),
    "no tensors": framed({"kind": "cancel", "value": ["a", "b"]}),
    "a huge tensor": framed({"kind": "cancel", "value": ["a", "b"], "tensors": [["int8", [1 << 60]]]}),
    "a negative tensor": framed({"kind": "cancel", "value": ["a", "b"], "tensors": [["int8", [-1]]]}),
    "an unknown dtype": framed({"kind": "cancel", "value": ["a", "b"], "tensors": [["object", [1]]]}, b"1"),
    "a dtype that is a list": framed({"kind": "cancel", "value": ["a", "b"], "tensors": [[[], [1]]]}, b"1"),
    "a huge empty tensor": framed({"kind": "cancel", "value": ["a", "b"], "tensors": [["int8", [0, 1 << 70]]]}),
    "a tensor of many dims": framed({"kind": "cancel", "value": ["a", "b"], "tensors": [["int8", [1] * 9]]}, b"1"),
    "bytes after tensors": framed({"kind": "cancel", "value": ["a", "b"], "tensors": []}, b"1"),
    "a number for a text": framed({"kind": "cancel", "value": ["a", 1], "tensors": []}),
    "three for two": framed({"kind": "cancel", "value": ["a", "b", "c"], "tensors": []}),
    "unknown fields": framed({"kind": "take_over", "value": {"__class__": "x"}, "tensors": []}),
    "a tensor that is not there": changed(caches=[[["k", 99]]]),
    "a text for a number": changed(seed="7"),
    "a truth for a number": changed(seed=True),
    "a fraction for a token": changed(sequences=[[0, [1, 2.5], 1, 0.0]]),
    "a number for a list": changed(sequences=5),
    "a null": changed(output=None),
    "a number too large for a float": changed(elapsed=10**400),
    "a bad sampling": changed(request={"prompt": [1], "sampling": {}}),
}


@pytest.mark.parametrize("message", MESSAGES)
def test_what_is_no_message_is_refused(message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError):
        wire.unpack(MESSAGES[message], ["take_over", "cancel"])
    assert not list(tmp_path.iterdir())


class Listening:
    """`generate_for` in a thread."""

    def __init__(self, engine: Engine):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = "127.0.0.1", free.getsockname()[1]
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, args=(engine,), daemon=True)
        self.thread.start()

    def _run(self, engine: Engine) -> None:
        try:
            generate_for(engine, self.address, b"secret")
        except Exception as error:
            self.error = error

    def connect(self, make=Client, key: dict | None = None):
        end = time.monotonic() + 60
        while True:
            try:
                return make(self.address, **({"authkey": b"secret"} if key is None else key))
            except ConnectionRefusedError:
                assert time.monotonic() < end
                time.sleep(0.02)


@pytest.fixture(scope="module")
def generating() -> Engine:
    return engine()


@pytest.mark.parametrize("message", [pickle.dumps(Trap("x")), framed(b"{"), "long"], ids=["pickle", "JSON", "long"])
def test_a_bad_message_ends_its_channel_only(message, generating, tmp_path, monkeypatch):
    """Its requests are cancelled, and the engine goes on for the next peer."""
    monkeypatch.chdir(tmp_path)
    listening = Listening(generating)
    connection = listening.connect()
    if message == "long":
        os.write(connection.fileno(), struct.pack("!iQ", -1, 1 << 60))
    else:
        connection.send_bytes(message)
    listening.thread.join(60)
    assert isinstance(listening.error, ConnectionError) and "127.0.0.1:" in str(listening.error), listening.error
    assert "the channel is closed" in str(listening.error) and not list(tmp_path.iterdir())
    assert not generating.busy and generating.pool.used == 0


def begun(prompts: Engine, those: list[Request]) -> list[Carried]:
    """Requests that an engine has computed the prompts of."""
    for request in those:
        prompts.add(request)
    handed_on: list[Carried] = []
    while prompts.busy:
        for output in prompts.step():
            handed_on += [x] if (x := prompts.hand_on(output.id)) else []
    return handed_on


def test_peers_without_the_key_are_passed_over(generating, alone, caplog):
    """A silent one delays no other, and caches of another model are an error of their request, not of the channel."""
    other, sent = begun(engine(block=8, blocks=64), requests()[:1]), begun(engine(), requests()[: len(LENGTHS)])
    listening = Listening(generating)
    with caplog.at_level("WARNING", "tutti.serve"):
        with pytest.raises((AuthenticationError, EOFError, OSError)):
            listening.connect(key={"authkey": b"wrong"})
        silent, loud = (listening.connect(socket.create_connection, {}) for _ in range(2))
        loud.sendall(b"\x7f" * 4096)
        remote = listening.connect(Remote, {"key": b"secret"})
    with silent, loud:
        outputs = [remote.take_over(x) for x in (*other, *sent)]
        while remote.busy:
            remote.step()
        remote.close()
    assert "another model, or size of blocks" in outputs[0].error
    assert [x[0][0] for x in tokens(outputs[1:])] == [x[0][0] for x in alone[: len(LENGTHS)]]
    listening.thread.join(60)
    assert listening.error is None and generating.pool.used == 0
    refused = sum("is refused" in x.getMessage() for x in caplog.records)
    assert refused in (2, 3), "the silent one is refused once it hangs up, which may be later"
    assert all("127.0.0.1:" in x.getMessage() for x in caplog.records)


def test_a_peer_that_sends_byte_by_byte_is_passed_over(monkeypatch):
    """It has the time of one greeting for all bytes together."""
    monkeypatch.setattr(disaggregate, "GREETING", 0.3)
    ours, theirs = socket.socketpair()
    passed = []
    thread = threading.Thread(target=disaggregate._greet, args=(ours, "peer", b"secret", passed), daemon=True)
    thread.start()
    with theirs:
        theirs.sendall(struct.pack("!i", 200))
        with pytest.raises(BrokenPipeError):
            for _ in range(60):
                thread.join(0.05)
                theirs.sendall(b"x")
    assert not passed


def test_a_bad_answer_is_an_error_of_the_remote():
    with Listener(("127.0.0.1", 0), authkey=b"secret") as listener:
        answering = threading.Thread(target=lambda: listener.accept().send_bytes(pickle.dumps(Trap("x"))), daemon=True)
        answering.start()
        remote = Remote(listener.address, b"secret")
        remote.outputs["a"] = carried().output
        with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:\d+ has sent"):
            remote.step()


@pytest.mark.parametrize("fields, says", [
    ({"sequences": [(0, [1, 2, 5], 3, 0.0)]}, "not those of its output"),
    ({"sequences": [(0, [1, 2, 999], 2, 0.0)]}, "not those of its output"),
    ({"sequences": [(1, [1, 2, 5], 2, 0.0)]}, "sequences of 1 completions"),
    ({"sequences": []}, "0 sequences"),
    ({"caches": [{}]}, "is it another model"),
    ({"request": Request([1, 2], id="b")}, "the output is of another"),
    ({"request": Request([1, 2], id="a", adapter="x")}, "no adapter 'x'"),
    ({"request": Request([1, 2], Sampling(logit_bias={999: 1.0}), id="a")}, "token 999"),
    ({"source": Source({"x": torch.ones(1)}, 1)}, "no encoder"),
])  # fmt: skip
def test_what_does_not_fit_the_engine_is_refused(fields, says, generating):
    with pytest.raises(ValueError, match=says):
        generating.take_over(replace(carried(), **{"source": None, **fields}))
    assert not generating.busy


def test_what_a_constraint_refuses_leaves_no_sequence_behind(generating):
    """The first of two sequences matches the constraint, the second does not."""
    (sent,) = begun(engine(), [Request("a", Sampling(max_tokens=6, n=2, regex="[ab]{9}", seed=3))])
    number, tokens, *more = sent.sequences[1]
    sent.sequences[1] = (number, [*tokens[:-1], ord("z")], *more)
    sent.output.completions[number].tokens[-1] = ord("z")
    with pytest.raises(ValueError, match="no token was allowed"):
        generating.take_over(sent)
    assert not generating.busy and not generating.arriving
    generating.step()
