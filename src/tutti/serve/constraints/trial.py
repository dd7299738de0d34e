"""A process that tries constraints, so that one that takes too much time or memory ends a child and not the server.

It is run as a script, imports nothing of Tutti, and reads lines of JSON on its standard input: first the tokenizer,
then one constraint after the other. Each is compiled in a fork with limits, and answered with a line of JSON. A line
"cancel" ends the fork that runs.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from tutti.serve.values import Json

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Limits of one constraint while tokens are chosen. A state of the lexer has 1 to 2 kB.
LIMITS = {"initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000, "step_max_items": 50_000,
          "max_lexer_states": 50_000, "max_grammar_size": 500_000, "verbose_errors": False}  # fmt: skip
ENDS: dict[int, str] = {signal.SIGPROF: "time", signal.SIGABRT: "memory", signal.SIGKILL: "stopped"}  # a fork
CANCEL = "cancel"


def grammar_of(kind: str, text: str) -> str:
    """The grammar of a constraint of a kind: "schema", "regex" or "grammar" (Lark, or GBNF, whose rules have `::=`)."""
    from llguidance import LLMatcher, grammar_from

    if kind == "schema":  # without free white space, in which small models get lost
        return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": False})
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    return grammar_from("gbnf", text) if "::=" in text else LLMatcher.grammar_from_lark(text)


def compiled(vocabulary: LLTokenizer, kind: str, text: str) -> LLMatcher:
    """The matcher of a constraint, after its first mask. Raises ValueError if it is malformed or beyond `LIMITS`."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        grammar = grammar_of(kind, text)
    except ValueError as error:
        raise ValueError(f"this {kind} cannot be used: {error}") from error
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        why = matcher.get_error().removesuffix("<non-verbose/>").strip()
        raise ValueError(f"this {kind} cannot be used: {why}")
    return matcher


def _status(name: str) -> int:
    """Bytes that a field of /proc/self/status tells; 0 where there is none."""
    try:
        with open("/proc/self/status") as file:
            return next((int(x.split()[1]) << 10 for x in file if x.startswith(name)), 0)
    except OSError:
        return 0


def _try(vocabulary: LLTokenizer, kind: str, text: str, seconds: float, memory: int) -> Json:
    """What a constraint takes. Called in a fork."""
    before = _status("RssAnon")
    if size := _status("VmSize"):
        resource.setrlimit(resource.RLIMIT_AS, (size + memory, size + memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, seconds)  # of processor time: SIGPROF ends the process
    try:
        matcher = compiled(vocabulary, kind, text)
    except ValueError as error:
        return {"error": str(error)}
    return {"bytes": max(0, _status("RssAnon") - before), "step": _step(matcher)}


def _step(matcher: LLMatcher) -> float:
    """Seconds of processor time that a token takes, of the fastest of the first three."""
    matcher, seconds = matcher.deep_copy(), []  # the clock of the process is coarse while its timer runs
    for _ in range(3):
        begun = time.thread_time()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if not mask or not matcher.consume_token((mask & -mask).bit_length() - 1) or matcher.is_stopped():
            break
        seconds.append(time.thread_time() - begun)
    return min(seconds, default=0.0)


class _Lines:
    """Lines of a file descriptor."""

    def __init__(self, source: int):
        self.source, self.rest = source, b""

    def read(self) -> str | None:
        """The next line; None at the end."""
        while b"\n" not in self.rest:
            piece = os.read(self.source, 1 << 20)
            if not piece:
                return None
            self.rest += piece
        line, _, self.rest = self.rest.partition(b"\n")
        return line.decode()


def _run(vocabulary: LLTokenizer, ask: Json, lines: _Lines) -> Json | None:
    """The answer to one constraint; None if nobody is there to read it."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receive)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a failed allocation in Rust prints before it aborts
        try:
            answer = _try(vocabulary, ask["kind"], ask["text"], ask["seconds"], ask["memory"])
        except MemoryError:
            answer = {"ended": "memory"}
        except BaseException as error:
            answer = {"error": f"this {ask['kind']} cannot be used: {error}"}
        os.write(send, json.dumps(answer).encode()[:60_000])
        os._exit(0)
    os.close(send)
    answer, gone = b"", False
    while True:
        ready, _, _ = select.select([receive, lines.source], [], [], ask["patience"])
        if receive in ready:
            piece = os.read(receive, 1 << 16)
            if not piece:
                break
            answer += piece
        else:  # cancelled, the server has ended, or the machine is too busy
            gone = bool(ready) and lines.read() is None
            os.kill(child, signal.SIGKILL)
            break
    os.close(receive)
    _, status = os.waitpid(child, 0)
    if gone:
        return None
    if answer and os.WIFEXITED(status):
        try:
            return json.loads(answer)
        except ValueError:
            return {"error": f"this {ask['kind']} cannot be used"}
    return {"ended": ENDS.get(os.WTERMSIG(status), "crash") if os.WIFSIGNALED(status) else "crash"}


def main() -> None:
    """Read constraints until the input ends."""
    from llguidance import LLTokenizer

    lines = _Lines(0)
    first = lines.read()
    if first is None:
        return
    settings = json.loads(first)
    vocabulary: Any = None  # a tokenizer of llguidance, unless there is a failure
    failure: Json = {}
    try:
        vocabulary = LLTokenizer(settings["tokenizer"], n_vocab=settings["size"], eos_token=settings["ends"] or None)
        compiled(vocabulary, "schema", '{"type": "string"}')  # what is loaded late is loaded before it is measured
    except ValueError as error:
        failure = {"error": f"constrained decoding cannot read this tokenizer: {error}"}
    del settings, first
    while (line := lines.read()) is not None:
        if line == CANCEL:  # it came after the answer
            continue
        answer = failure or _run(vocabulary, json.loads(line), lines)
        if answer is None:
            return
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
