"""Constraints: what is refused before it is compiled, what a child process refuses, and who waits for whom."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import tiny

from tutti.serve import Engine, Request, Sampling
from tutti.serve.constraints import compiling, constrain, expansion, trial
from tutti.serve.constraints.compiling import Busy, Compiler, Lane, Trials
from tutti.serve.constraints.constrain import Constraints, key_of
from tutti.serve.server.service import Full, Service

TEXT = {"type": "string", "pattern": "a+"}
SLOW = "(a{1000}){1000}"  # seconds to its first mask


def bomb(levels: int, keyword: str = "allOf") -> dict[str, Any]:
    """A schema that expands to 2^levels schemas."""
    steps = {f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(levels)}
    return {"$defs": {**steps, f"d{levels}": TEXT}, "$ref": "#/$defs/d0"}


def constraints() -> Constraints:
    return Constraints(tiny.tokenizer(), 257, [256])


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    one = Trials(constraints())
    yield one
    one.stop()


def try_(trials: Trials, kind: str, text: Any, seconds: float = 5) -> dict[str, Any]:
    return trials.measure(kind, text if isinstance(text, str) else json.dumps(text), seconds, lambda: True)


@pytest.mark.parametrize(
    "schema, says",
    [
        (bomb(25), "expand to more than 4096"),
        ({"$defs": bomb(13)["$defs"], "type": "string", "$ref": "#/$defs/d0"}, "expand to more than 4096"),
        ({"properties": {"a": {"allOf": [{"$ref": "#/$defs/d0"}]}}, "$defs": bomb(20)["$defs"]}, "expand to more"),
        (json.loads('{"items":' * 70 + "{}" + "}" * 70), "nested more than 64"),
        ({"enum": ["x" * constrain.LARGEST]}, "at most 131072 can be compiled"),
    ],
)
def test_schemas_that_are_refused_before_they_are_tried(schema, says):
    with pytest.raises(ValueError, match=says):
        constrain.text_of("schema", schema)


def test_references_that_are_compiled_once_do_not_count():
    for schema in (bomb(25, "anyOf"), bomb(9), {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#"}]}}}):
        expansion.check(schema)
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}}
    expansion.check(tree)


@pytest.mark.parametrize("reference", ["#/$defs/a~1b", "#/$defs/a%2Fb", "#/%24defs/a~1b"])
def test_references_are_followed_as_pointers(reference):
    definitions = bomb(25)["$defs"]
    schema = {"allOf": [{"$ref": reference}], "$defs": {"a/b": {"allOf": [{"$ref": "#/$defs/d0"}]}, **definitions}}
    if reference != "#/$defs/a%2Fb":  # an encoded slash separates steps
        with pytest.raises(ValueError, match="expand"):
            expansion.check(schema)


@pytest.mark.parametrize(
    "kind, text",
    [("schema", {"type": "object"}), ("regex", "a+"), ("grammar", 'start: "a" | "b"'), ("grammar", 'root ::= "a"')],
)
def test_a_trial_measures_what_is_affordable(trials, kind, text):
    taken = try_(trials, kind, text)
    assert 0 <= taken["bytes"] < 16 << 20 and 0 <= taken["step"] < compiling.STEP


def test_a_trial_measures_a_token(trials):
    assert try_(trials, "regex", "a{200000}")["step"] > 20 * try_(trials, "regex", "[ab]{20}")["step"] > 0


@pytest.mark.parametrize("kind, text", [("regex", "("), ("schema", {"type": 3}), ("grammar", "start: nothing"),
                                        ("grammar", "::= ::="), ("schema", "["), ("regex", "a{2,1}")])  # fmt: skip
def test_a_trial_says_what_is_malformed(trials, kind, text):
    assert f"this {kind} cannot be used" in try_(trials, kind, text)["error"]


def test_a_trial_ends_what_takes_too_long_or_too_much(trials, monkeypatch):
    ends = [try_(trials, "regex", SLOW, seconds=0.2)["ended"]]
    while ends[-1] == "stopped" and len(ends) < 10:  # other programs took the processor
        ends.append(try_(trials, "regex", SLOW, seconds=0.2)["ended"])
    assert ends[-1] == "time"
    monkeypatch.setattr(compiling, "MEMORY", 16 << 20)
    assert try_(trials, "schema", bomb(18), seconds=20) == {"ended": "memory"}
    assert "bytes" in try_(trials, "regex", "a+")  # the process goes on


def test_a_trial_is_dropped_when_nobody_waits(trials):
    looks = iter([True, False])
    with pytest.raises(compiling.Abandoned):
        trials.measure("regex", SLOW, 60, lambda: next(looks))
    assert "bytes" in try_(trials, "regex", "b+")


def test_a_process_that_is_killed_is_started_again(trials):
    trials.start().kill()
    trials.process.wait()
    assert "bytes" in try_(trials, "regex", "c+")


def test_a_trial_runs_beside_many_open_files(trials):
    """Its pipe has a number that select cannot watch."""
    trials.stop()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, limits[1]), limits[1]))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        assert "bytes" in try_(trials, "regex", "d+")
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_the_parent_compiles_as_the_child_does():
    vocabulary = constraints().vocabulary
    assert trial.compiled(vocabulary, "schema", "{}").is_error() is False
    with pytest.raises(ValueError, match="this regex cannot be used"):
        trial.compiled(vocabulary, "regex", "[")


def test_kept_constraints_are_bounded_by_their_bytes(monkeypatch):
    monkeypatch.setattr(constrain, "CACHE_BYTES", 1 << 20)
    factory = constraints()
    constraint = factory.make("regex", "a0", 600 << 10)
    for i in range(1, 8):
        factory.make("regex", f"a{i}", 300 << 10)
    assert len(factory.cache) == 3 and factory.bytes == 900 << 10
    assert factory.make("regex", "a0") is constraint and factory.compilations == 8  # one that is in use is found
    del constraint
    factory.make("regex", "a0")
    assert factory.compilations == 9


def test_a_refusal_is_remembered():
    factory = constraints()
    factory.refuse(key_of("regex", "x"), "too large")
    with pytest.raises(ValueError, match="too large"):
        factory.make("regex", "x")


def test_a_constraint_is_copied_when_it_changes():
    base = constraints().make("regex", "ab")
    first, second = base.fork(), base.fork()
    assert first.matcher is base.matcher
    a = tiny.tokenizer()("a")["input_ids"][0]
    first.take(a)
    assert first.matcher is not base.matcher and second.allowed()[a] and not first.allowed()[a]
    third = first.fork()
    assert third.matcher is not first.matcher


class Slow:
    """In place of `Trials`: waits where it is told to."""

    def __init__(self, *answers: dict[str, Any]):
        self.go, self.answers, self.seen = threading.Event(), list(answers), []

    def measure(self, kind, text, seconds, wanted):
        self.seen.append(text)
        while not self.go.wait(0.01):
            if not wanted():
                raise compiling.Abandoned
        return self.answers.pop(0) if self.answers else {"bytes": 0, "step": 0.0}

    def stop(self) -> None:
        pass


def wait_for(compiler: Compiler, kind: str, what: Any, wanted: Any = lambda: True) -> tuple[threading.Event, list[Any]]:
    event, outcomes = threading.Event(), []
    compiler.submit(kind, what, wanted, lambda *x: (outcomes.append(x), event.set()))
    return event, outcomes


def test_what_is_slow_waits_in_a_lane_of_its_own():
    compiler = Compiler(constraints(), 8)
    compiler.quick.trials, compiler.patient.trials = Slow({"ended": "time"}), Slow({"ended": "time"})
    compiler.quick.trials.go.set()
    try:
        slow, outcomes = wait_for(compiler, "regex", "slow")
        quick, _ = wait_for(compiler, "regex", "quick")
        assert quick.wait(30) and not slow.is_set()
        compiler.patient.trials.go.set()
        assert slow.wait(30) and "takes more than 10 s" in str(outcomes[0][1])
        with pytest.raises(ValueError, match="takes more than 10 s"):  # without another trial
            compiler.submit("regex", "slow", lambda: True, lambda *_: None)
        assert compiler.quick.trials.seen == ["slow", "quick"]
    finally:
        compiler.stop()


def test_a_lane_is_bounded_and_forgets_who_left():
    lane, there = Lane(constraints(), 1, 2), {"a", "b", "c", "d"}
    lane.trials = Slow()
    compiler = Compiler(lane.constraints, 2)
    compiler.quick = lane
    try:
        first, _ = wait_for(compiler, "regex", "a", lambda: "a" in there)
        while not lane.trials.seen:
            threading.Event().wait(0.01)
        for x in "bc":
            wait_for(compiler, "regex", x, lambda x=x: x in there)
        with pytest.raises(Busy):
            wait_for(compiler, "regex", "d")
        there -= {"a", "b"}
        last, _ = wait_for(compiler, "regex", "d")
        while "c" not in lane.trials.seen:
            threading.Event().wait(0.01)
        lane.trials.go.set()
        assert last.wait(30) and lane.trials.seen == ["a", "c", "d"] and not first.is_set()
    finally:
        compiler.stop()


def test_large_constraints_are_refused_by_their_bytes():
    compiler = Compiler(constraints(), 8)
    compiler.quick.trials = Slow({"bytes": compiling.RETAINED + 1}, {"ended": "memory"}, {"ended": "crash"},
                                 {"bytes": 0, "step": 0.1})  # fmt: skip
    compiler.quick.trials.go.set()
    try:
        for what, says in (
            ("a", "takes 32 MiB; at most 32"),
            ("b", "more than 512 MiB"),
            ("c", "cannot be compiled"),
            ("d", "0.100 s for each token"),
        ):
            event, outcomes = wait_for(compiler, "regex", what)
            assert event.wait(30) and says in str(outcomes[0][1])
    finally:
        compiler.stop()


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny.model(), tokenizer=tiny.tokenizer(), plan="single", blocks=16, budget=16, most=2)


def test_a_service_refuses_a_bomb_and_serves_the_others(engine):
    async def main() -> str:
        async with Service(engine) as service:
            with pytest.raises(ValueError, match="expand to more than 4096"):
                await service.complete(Request([1], Sampling(schema=bomb(25), max_tokens=4)))
            assert not service.listeners
            return (await service.complete(Request([1, 2], Sampling(regex="[ab]{3}", max_tokens=8)))).text

    assert set(asyncio.run(main())) <= {"a", "b"}


def test_calls_count_for_the_limit_and_are_dropped_when_their_caller_leaves(engine):
    go, ran = threading.Event(), []

    async def main() -> None:
        async with Service(engine, limit=2) as service:
            first = asyncio.create_task(service.call(lambda _: go.wait(60)))
            second = asyncio.create_task(service.call(lambda _: ran.append(2)))
            await asyncio.sleep(0)
            with pytest.raises(Full):
                await service.call(lambda _: ran.append(3))
            with pytest.raises(Full):
                service.submit([Request([1], Sampling(max_tokens=1))])
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
            go.set()
            assert await first
            await service.call(lambda _: ran.append(4))

    asyncio.run(main())
    assert ran == [4]
