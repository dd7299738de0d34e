"""What every benchmark shares: options, progress, turns, and one JSON object as the result.

    python benchmarks/NAME.py [--quick]

Progress goes to stderr. The last line on stdout is one JSON object with the device, the date, the versions,
the medians and the ratios; the same object is saved as ``benchmarks/results/NAME.json`` (``NAME-quick.json``
with ``--quick``, which is done within a minute and measures a smaller case; ``gpu-NAME.json`` from ``gpu/NAME.py``).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch

from tutti.whole_files import write_text

RESULTS = Path(__file__).parent / "results"
_START = time.perf_counter()


class Contender(Protocol):
    """Something to measure in turns: ours or a peer."""

    name: str

    def turn(self, steps: int) -> list[float]:
        """Do that many steps now; seconds of each."""
        ...

    def close(self) -> None: ...


class Turns:
    """What a contender in a process of its own talks to."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def wait(self) -> int:
        """How many steps to do now; 0 when it is over."""
        return self._pipe.recv()

    def done(self, seconds: list[float], **facts: float) -> None:
        """Report the seconds of each step, and whatever else is to be known of the contender."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self._pipe.send((seconds, {**facts, "peak_rss_bytes": peak}))


class Process:
    """A contender in a process of its own, so that none inherits the settings or the memory of another.

    ``work(turns, *args)`` prepares itself, then answers each `turns.wait()` with a `turns.done(...)`. It starts with
    its first turn.
    """

    def __init__(self, name: str, work: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.name, self.facts = name, {}
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, work, args), daemon=True)

    def turn(self, steps: int) -> list[float]:
        if self._process.pid is None:
            self._process.start()
        self._pipe.send(steps)
        try:
            seconds, self.facts = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self.name} has ended; its error is above") from None
        return seconds

    def close(self) -> None:
        self._pipe.send(0)
        self._process.join(60)


class Peer:
    """A contender whose packages need a virtual environment of their own. It is made once, in PEERS.

    A script in this folder answers each line of JSON on stdin with one of numbers. Without requirements it runs in this
    environment.
    """

    def __init__(self, name: str, requirements: Sequence[str], script: str, *args: str) -> None:
        self.name, self.facts = name, {}
        python = environment_of(name.split()[0], requirements) if requirements else sys.executable
        self._process = subprocess.Popen([python, Path(__file__).with_name(script), *args], stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, text=True)  # fmt: skip

    def ask(self, what: Any) -> list[float]:
        assert self._process.stdin and self._process.stdout
        with suppress(BrokenPipeError):
            print(json.dumps(what), file=self._process.stdin, flush=True)
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"{self.name} has ended; its error is above")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(60)


class Beside(Peer):
    """A contender whose packages lie in a folder of their own, beside those of this environment, whose torch they use.

    environment: variables for their installation. They are installed once, without their dependencies.
    """

    def __init__(
        self, name: str, packages: Sequence[str], environment: dict[str, str], script: str, *args: str
    ) -> None:
        self.name, self.facts = name, {}
        folder = PEERS / "beside" / name.split()[0]
        if not folder.exists():
            say(f"installing {', '.join(packages)} in {folder}")
            command = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "-q",
                "--no-deps",
                "--target",
                f"{folder}.new",
                *packages,
            ]
            subprocess.run(command, check=True, stdout=sys.stderr, env={**os.environ, **environment})
            Path(f"{folder}.new").rename(folder)
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen([sys.executable, Path(__file__).with_name(script), *args],
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                         env={**os.environ, "PYTHONPATH": path})  # fmt: skip


PEERS = Path.home() / ".cache" / "tutti" / "peers"


def environment_of(name: str, requirements: Sequence[str], python: str | Path = sys.executable) -> Path:
    """The Python of a virtual environment with these packages, made once with this Python."""
    folder = PEERS / name
    ready, listed = folder / "ready", "\n".join([str(python), *requirements])
    if not ready.exists() or ready.read_text() != listed:
        say(f"installing {', '.join(requirements)} in {folder}")
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([folder / "bin" / "pip", "install", "-q", *requirements], check=True, stdout=sys.stderr)
        ready.write_text(listed)
    return folder / "bin" / "python"


def _serve(pipe: Connection, work: Callable[..., None], args: tuple) -> None:
    os.dup2(2, 1)  # stdout is for the result
    work(Turns(pipe), *args)


def main(run: Callable[..., dict[str, Any]], script: str, packages: Sequence[str] = (),
         cases: Sequence[str] = ()) -> None:  # fmt: skip
    """Run a benchmark: ``run(quick)`` gives its figures; ``packages`` are the peers whose versions count.

    cases: names that ``--only`` may choose one of; then ``run(quick, only)``, and nothing is saved of one case alone.
    """
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--quick", action="store_true", help="a smaller case, done within a minute")
    if cases:
        parser.add_argument("--only", choices=cases, help="one case; its result is printed and not saved")
    options = parser.parse_args()
    quick, only = options.quick, getattr(options, "only", None)
    name = ("gpu-" if Path(script).parent.name == "gpu" else "") + Path(script).stem
    result = {"benchmark": name, "quick": quick, **environment(packages), **run(quick, *[only] * bool(cases))}
    if only is None:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{name}{'-quick' if quick else ''}.json"
        path.write_text(json.dumps(result, indent=2) + "\n")
        (Rows.FOLDER / path.name).unlink(missing_ok=True)
        say(f"saved {path.relative_to(RESULTS.parent.parent)}")
    print(json.dumps(result), flush=True)


def say(text: str) -> None:
    """A line of progress."""
    print(f"[{time.perf_counter() - _START:7.1f} s] {text}", file=sys.stderr, flush=True)


def environment(packages: Sequence[str] = ()) -> dict[str, Any]:
    """Device, date and versions."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {package: metadata.version(package) for package in ("tutti", *packages)}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": _device(),
        "threads": torch.get_num_threads(),
        "versions": versions,
    }


class Rows:
    """Rows of a long benchmark in a file, so that a run goes on where an earlier one stopped.

    They belong to the sources of `src` as they are committed, the device and the versions: with others, all rows are
    measured anew. The file goes when the whole result is saved.
    """

    FOLDER = Path.home() / ".cache" / "tutti" / "benchmarks"

    def __init__(self, name: str, packages: Sequence[str] = ()) -> None:
        self.path = self.FOLDER / f"{name}.json"
        sources = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD:src"]
        facts = environment(packages) | {"date": None, "sources": subprocess.check_output(sources, text=True).strip()}
        self._saved: dict[str, Any] = {"facts": facts, "rows": {}}
        with suppress(FileNotFoundError, json.JSONDecodeError):
            earlier = json.loads(self.path.read_text())
            if earlier["facts"] == facts:
                self._saved = earlier

    def row(self, key: str, measure: Callable[[], Any]) -> Any:
        """The row of a key; it is measured unless an earlier run has done so."""
        rows = self._saved["rows"]
        if key in rows:
            say(f"{key}: measured by an earlier run")
        else:
            rows[key] = measure()
            write_text(self.path, json.dumps(self._saved))
        return rows[key]


Times = dict[str, list[list[float]]]  # contender -> round -> seconds of each step


def take_turns(
    contenders: Sequence[Contender], rounds: int, steps: int, warmup: int = 2, together: bool = False
) -> Times:
    """One warm-up turn each, which is not counted, then rounds in which all take a turn.

    Each round begins with another contender, so that none always runs after the same one. together: all warm up at the
    same time, once before the warm-up turn: they compile beside each other.
    """
    if together:
        with ThreadPoolExecutor(len(contenders)) as pool:
            list(pool.map(lambda contender: contender.turn(warmup), contenders))
    for contender in contenders:
        seconds = contender.turn(warmup)
        say(f"{contender.name}: warm after {sum(seconds):.1f} s")
    times: Times = {contender.name: [] for contender in contenders}
    for i in range(rounds):
        first = i % len(contenders)
        for contender in [*contenders[first:], *contenders[:first]]:
            times[contender.name].append(contender.turn(steps))
        best = _fastest(times, list(times))
        say(f"round {i + 1} of {rounds}: fastest so far {best}, {_median(times[best]):.3f} s a step")
    return times


def summary(rounds: Sequence[Sequence[float]]) -> dict[str, float]:
    """Median, quartiles, smallest and number of the measured steps, in seconds."""
    seconds = [second for turn in rounds for second in turn]
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    return {
        "median": median,
        "lower_quartile": low,
        "upper_quartile": high,
        "smallest": min(seconds),
        "steps": len(seconds),
    }


def ratio(times: Times, ours: Sequence[str], peers: Sequence[str]) -> dict[str, Any]:
    """How many times faster the best of ours is than the best of the peers.

    Taken round by round, since a round sees the same machine, then the median; `by_medians` is the quotient of the
    overall medians. Where the two differ much, something else kept the machine busy.
    """
    best, rival = _fastest(times, ours), _fastest(times, peers)
    by_round = [
        statistics.median(theirs) / statistics.median(own)
        for own, theirs in zip(times[best], times[rival], strict=True)
    ]
    return {
        "ours": best,
        "peer": rival,
        "times_faster": statistics.median(by_round),
        "by_round": by_round,
        "by_medians": _median(times[rival]) / _median(times[best]),
    }


def _median(rounds: Sequence[Sequence[float]]) -> float:
    return statistics.median(second for turn in rounds for second in turn)


def _fastest(times: Times, names: Sequence[str]) -> str:
    return min(names, key=lambda name: _median(times[name]))


def _device() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    models, products = [platform.machine()], ""
    if Path("/proc/cpuinfo").exists():
        text = Path("/proc/cpuinfo").read_text()
        models = [x.partition(":")[2].strip() for x in text.splitlines() if x.startswith("model name")] or models
        flags = {"amx_bf16": ", AMX", "avx512_bf16": ", AVX-512 BF16"}  # they decide whether bfloat16 is fast
        products = next((name for flag, name in flags.items() if f" {flag}" in text), ", no bfloat16 instructions")
    return f"{models[0]}, {os.cpu_count()} cores{products}"
