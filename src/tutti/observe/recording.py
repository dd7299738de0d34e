"""Read recorded steps, with the times of all ranks on one clock."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from tutti.observe.calls import WAIT, RecordedCall
from tutti.observe.predicted import SIMULATED

PROGRAM = '{"program"'  # how the line of a Program begins
SECOND = 1e-9  # seconds per tick of the recorded clocks
MOST, FEWEST = 2000, 6  # steps to read, over all ranks, and at least per rank


class Collective(NamedTuple):
    """A collective of a step. group: its ranks. place: its index among the group's collectives, equal on all ranks."""

    kind: str
    axis: str
    group: tuple[int, ...]
    place: int


class RecordedRun(NamedTuple):
    """A recorded run of a call, in seconds. collective: the one it runs, starts or awaits. begins: whether it only
    starts one."""

    program: str
    number: int
    call: RecordedCall
    begin: float
    end: float
    collective: Collective | None = None
    begins: bool = False


@dataclass
class RecordedStep:
    """A step of one rank. begin, end: in seconds. blocks: in order. waits: (what, source device of a pipeline, begin,
    end). links: seconds of a message, by source rank."""

    number: int
    begin: float
    end: float
    blocks: list[RecordedRun]
    waits: list[tuple[str, int, float, float]]
    links: dict[int, float]

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass
class Rank:
    """One rank. groups: the ranks it communicates with, by axis. message: bytes of a link measurement. programs: calls
    by Program. nodes: calls of each Program before compilation."""

    rank: int
    ranks: int
    host: str
    groups: dict[str, list[int]]
    message: int = 0
    programs: dict[str, list[RecordedCall]] = field(default_factory=dict)
    nodes: dict[str, int] = field(default_factory=dict)
    steps: dict[int, RecordedStep] = field(default_factory=dict)

    @property
    def calls(self) -> list[tuple[str, int]]:
        """(Program, index) of each call."""
        return [(name, i) for name, calls in self.programs.items() for i in range(len(calls))]

    @property
    def kind(self) -> tuple:
        """A key that is equal for ranks that compute the same."""
        return tuple((name, tuple(call.label for call in calls)) for name, calls in self.programs.items())


@dataclass
class Recording:
    """The recording of all ranks, in order. predicted: the data of `observe.predicted`, if recorded."""

    ranks: list[Rank]
    predicted: dict[str, Any]

    @cached_property
    def steps(self) -> list[int]:
        """Steps that all ranks recorded, except the first one, which compiles."""
        common = set.intersection(*(set(rank.steps) for rank in self.ranks))
        return sorted(common)[1:]

    def of(self, step: int) -> Iterator[tuple[Rank, RecordedStep]]:
        for rank in self.ranks:
            yield rank, rank.steps[step]


def read(folder: Path) -> Recording:
    """Read a recording. Raises ValueError if there is none, or fewer than two steps."""
    files = sorted(folder.glob("rank-*.jsonl"))
    if not files:
        raise ValueError(f"{folder} has no recorded steps: no file rank-0.jsonl (`tutti train` records every "
                         "--monitor.every-th step, default 20, and needs two of them)")  # fmt: skip
    ranks = sorted((_rank(file) for file in files), key=lambda rank: rank.rank)
    ranks = [rank for rank in ranks if rank.ranks == ranks[0].ranks and rank.rank < ranks[0].ranks]
    if missing := set(range(ranks[0].ranks)) - {rank.rank for rank in ranks}:
        raise ValueError(f"{folder} has no recording of rank {min(missing)}: copy the files of all machines there")
    simulated = folder / SIMULATED
    recording = Recording(ranks, json.loads(simulated.read_text()) if simulated.exists() else {})
    if not recording.steps:
        raise ValueError(f"{folder} has too few steps that all ranks recorded: at least two are needed")
    _align(recording)
    return recording


def _rank(file: Path) -> Rank:
    lines = file.read_text().splitlines()
    about = json.loads(lines[0])
    rank = Rank(about["rank"], about["ranks"], about["host"], about["groups"], about["message"])
    programs = [line for line in lines[1:] if line.startswith(PROGRAM)]
    newest = [line for line in lines[1:] if not line.startswith(PROGRAM)][-max(FEWEST, MOST // rank.ranks) :]
    for text in [*programs, *newest]:
        try:
            line = json.loads(text)
        except ValueError:  # the process died while writing
            break
        if "program" in line:
            rank.programs[line["program"]] = [RecordedCall(**call) for call in line["calls"]]
            rank.nodes[line["program"]] = line["nodes"]
        else:
            rank.steps[line["step"]] = _step(rank, line)
    return rank


def _step(rank: Rank, line: dict[str, Any]) -> RecordedStep:
    runs = []  # of Programs: (begin, name, times)
    for name, marks in line["runs"]:
        times = SECOND * np.array(marks, dtype=np.float64).reshape(-1, len(rank.programs[name]) + 1)
        runs += [(run[0], name, run) for run in times]
    begun = {name: {call.ends for call in calls} for name, calls in rank.programs.items()}
    blocks, places = [], defaultdict(int)
    for _, name, times in sorted(runs, key=lambda run: run[0]):
        own: dict[int, Collective] = {}
        for i, call in enumerate(rank.programs[name]):
            if call.axis:
                group = tuple(rank.groups.get(call.axis, (rank.rank,)))
                own[i] = Collective(call.kind, call.axis, group, places[call.axis])
                places[call.axis] += 1
            collective = own.get(call.ends if call.kind == WAIT else i)
            blocks.append(RecordedRun(name, i, call, times[i], times[i + 1], collective, i in begun[name]))
    waits = [(what, source, SECOND * begin, SECOND * end) for what, source, begin, end in line.get("waits", ())]
    links = {int(source): seconds for source, seconds in (line.get("links") or {}).items()}
    return RecordedStep(line["step"], SECOND * line["begin"], SECOND * line["end"], blocks, waits, links)


def _align(recording: Recording) -> None:
    """Align the clocks of machines: the ranks of a blocking collective learn of its end at the same time."""
    hosts = dict.fromkeys(rank.host for rank in recording.ranks)
    ahead: dict[tuple[str, str], list[float]] = defaultdict(list)
    for step in recording.steps if len(hosts) > 1 else ():
        ends: dict[Collective | None, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for rank, taken in recording.of(step):
            for block in taken.blocks:
                if block.call.axis and not block.begins:
                    ends[block.collective][rank.host].append(block.end)
        for at in ends.values():
            for a in at:
                for b in at:
                    ahead[a, b].append(median(at[a]) - median(at[b]))
    offsets = {next(iter(hosts)): 0.0}
    while new := [(a, b) for a, b in ahead if a not in offsets and b in offsets]:
        a, b = new[0]
        offsets[a] = offsets[b] + median(ahead[a, b])
    for rank in recording.ranks:
        for step in rank.steps.values():
            _shift(step, -offsets.get(rank.host, 0.0))


def _shift(step: RecordedStep, by: float) -> None:
    if by:
        step.begin, step.end = step.begin + by, step.end + by
        step.blocks = [block._replace(begin=block.begin + by, end=block.end + by) for block in step.blocks]
        step.waits = [(what, source, begin + by, end + by) for what, source, begin, end in step.waits]
