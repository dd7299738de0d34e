"""The diagnosis of recorded steps: where time went, compared with the prediction, and what is slow."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from tutti.observe.calls import TITLES, WAIT
from tutti.observe.findings import SlowLink, SlowRank, slow_links, slow_ranks
from tutti.observe.phases import read_phases
from tutti.observe.recording import Recording, read
from tutti.observe.shares import Share, shares

BEYOND = 2  # times the prediction
WORTH = 0.05  # fraction of a step; less is not reported
MONITOR = "monitor"  # subfolder of a run for recordings
UNUSUAL = 5  # times the median step
STEP = "step"  # the phase of the step itself
DATA = "data"  # the phase of waiting for the batch


@dataclass(frozen=True)
class Diagnosis:
    """What a recording shows. shares: `Share` of every rank. ranks, links: the slow ones, worst first. phases: mean
    seconds of the phases of the training loop, by rank. kinds: (title, predicted or None, measured seconds a step) of
    the first rank."""

    recording: Recording
    shares: list[Share]
    ranks: list[SlowRank]
    links: list[SlowLink]
    phases: dict[int, dict[str, float]]
    kinds: list[tuple[str, float | None, float]]

    @property
    def seconds(self) -> float:
        """Seconds of a step, averaged over ranks."""
        return fmean(share.seconds for share in self.shares)

    def caused(self, rank: int) -> float:
        """Seconds per step that another rank waits for this one, on average."""
        return sum(share.waiting.get(rank, 0.0) for share in self.shares) / max(1, len(self.shares) - 1)

    @property
    def exposed(self) -> tuple[int, float, float] | None:
        """The rank that waits longest for batches: (rank, seconds per step, fraction of its time), or None."""
        waits = {rank: phases[DATA] for rank, phases in self.phases.items() if DATA in phases}
        if not waits:
            return None
        worst = max(waits, key=waits.__getitem__)
        return worst, waits[worst], waits[worst] / sum(self.phases[worst].values())

    def words(self) -> list[str]:
        """One sentence for each slow rank, link, collective or phase."""
        sentences = []
        for slow in self.ranks:
            wait = self.caused(slow.rank)
            cost = f"; the others wait for it {1e3 * wait:.3g} ms a step, {wait / self.seconds:.0%}"
            sentences.append(f"{slow}{cost if wait > WORTH * self.seconds else ''}")
        return [*sentences, *self._links(), *self._kinds(), *self._phases()]

    def _links(self) -> list[str]:
        """Sentences about slow links. If all links of a rank are slow, one about the rank."""
        every = {(source, rank.rank) for rank in self.recording.ranks
                 for source in rank.steps[self.recording.steps[0]].links}  # fmt: skip
        slow, sentences = {(link.source, link.target): link for link in self.links}, []
        for rank in range(len(self.shares)):
            own = [pair for pair in every if rank in pair]
            if len(own) > 2 and all(pair in slow for pair in own):
                speed = median(slow.pop(pair).speed for pair in own)
                sentences.append(f"all links of rank {rank} at {speed:.2f} of the others' bandwidth")
        pairs: dict[tuple[int, int], list[SlowLink]] = defaultdict(list)
        for (source, target), link in slow.items():
            pairs[min(source, target), max(source, target)].append(link)
        return [*sentences, *(str(min(links, key=lambda link: link.speed)) for links in pairs.values())]

    def _kinds(self) -> list[str]:
        """Sentences about collectives that take much longer than predicted."""
        return [
            f"{title} takes {took / expects:.1f} times what was predicted: {1e3 * took:.3g} ms a step, "
            f"{took / self.seconds:.0%}"
            for title, expects, took in self.kinds
            if title not in TITLES.values() and expects and took > BEYOND * expects and took > WORTH * self.seconds
        ]

    def _phases(self) -> list[str]:
        """Sentences about long phases other than the step."""
        sentences = []
        names = dict.fromkeys(name for phases in self.phases.values() for name in phases if name != STEP)
        for name in names:
            parts = {
                rank: phases[name] / sum(phases.values()) for rank, phases in self.phases.items() if name in phases
            }
            worst = max(parts, key=parts.__getitem__)
            if parts[worst] > WORTH:
                sentences.append(f"{name} takes {parts[worst]:.0%} of rank {worst}'s time, beside its steps")
        return sentences


def diagnose(folder: Path) -> Diagnosis:
    """Diagnose the recording that `Step.record` or `tutti train` wrote. Raises ValueError if it has too few steps."""
    recording = read(folder)
    times = shares(recording)
    return Diagnosis(
        recording,
        times,
        slow_ranks(recording),
        slow_links(recording),
        _typical(folder, len(times)),
        _kinds(recording, times[0]),
    )


def _typical(folder: Path, ranks: int) -> dict[int, dict[str, float]]:
    """Mean seconds of each phase of a training loop, by rank. Steps much longer than the median are left out, such as
    the first ones, which compile."""
    phases_of = {}
    for rank, lines in read_phases(folder).items():
        phases = [line["phases"] for line in lines if STEP in line["phases"]]
        usual = median(line[STEP] for line in phases) if phases else 0.0
        phases = [line for line in phases if line[STEP] < UNUSUAL * usual]
        names = dict.fromkeys(name for line in phases for name in line)
        if phases and rank < ranks:
            phases_of[rank] = {name: fmean(line.get(name, 0.0) for line in phases) for name in names}
    return phases_of


def _kinds(recording: Recording, share: Share) -> list[tuple[str, float | None, float]]:
    """The work of the first rank by kind: (title, predicted, measured seconds)."""
    expected: dict[tuple[str, str], float] = defaultdict(float)
    rank, steps = recording.ranks[0], recording.steps
    programs = recording.predicted.get("programs", {})
    for name, calls in rank.programs.items():
        seconds, at = programs.get(name, []), 0
        runs = fmean(sum(b.program == name and b.number == 0 for b in rank.steps[step].blocks) for step in steps)
        if len(seconds) != rank.nodes[name]:
            continue
        for call in calls:
            expected[call.kind, call.axis] += runs * sum(seconds[at : at + call.nodes])
            at += call.nodes
    for begun in (calls[call.ends] for calls in rank.programs.values() for call in calls if call.kind == WAIT):
        expected.pop((begun.kind, begun.axis), None)  # only the exposed part of hidden collectives is measured
    measured = {**{(kind, ""): took for kind, took in share.computing.items()}, **share.moving}
    return [
        (TITLES.get(kind, f"{kind} over {axis}" if axis else kind), expected.get((kind, axis)), took)
        for (kind, axis), took in measured.items()
    ]
