"""Find slow ranks and links: those that take longer than others with the same work.

Interference by other programs only adds time, and not to every run of a call. A rank counts as slow only if it is slow
both in the fastest runs of each call and in the median; a link only if its fastest messages are slow.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from tutti.observe.calls import TITLES
from tutti.observe.recording import Rank, Recording

SLOWER = 1.25  # times as long as others; less is not reported
CONSISTENT = 0.75  # of a rank's time is in calls that take longer
MORE = 1.1  # times as long, for one call
OF_CALLS, OF_MESSAGES = (0.1, 0.5), (0.0, 0.25)  # quantiles of the seconds of a call's runs, and of messages
SLOW_LINK = 0.5  # of the others' bandwidth


@dataclass(frozen=True)
class SlowRank:
    """A slow rank. kind: kind of the slow calls. speed: speed as a fraction of the others' speed. seconds: seconds per
    step that it takes longer."""

    rank: int
    kind: str
    speed: float
    seconds: float

    def __str__(self) -> str:
        return f"rank {self.rank}'s {TITLES[self.kind]} run at {self.speed:.0%} of the others' speed"


@dataclass(frozen=True)
class SlowLink:
    """speed: as a fraction of the others' bandwidth. bandwidth: in bytes per second."""

    source: int
    target: int
    speed: float
    bandwidth: float

    def __str__(self) -> str:
        return (
            f"link {self.source}-{self.target} at {self.speed:.2f} of the others' bandwidth "
            f"({self.bandwidth / 1e6:,.0f} MB/s)"
        )


def slow_ranks(recording: Recording) -> list[SlowRank]:
    """Slow ranks, the most costly first."""
    alike: dict[tuple, list[Rank]] = defaultdict(list)
    for rank in recording.ranks:
        alike[rank.kind].append(rank)
    slow_kinds = []
    for ranks in alike.values():
        if len(ranks) > 1:
            each = np.stack([_seconds(rank, recording.steps) for rank in ranks])
            for i, rank in enumerate(ranks):
                others = np.median(np.delete(each, i, axis=0), axis=0)
                slow_kinds += [slow for kind in TITLES if (slow := _compare(rank, kind, each[i], others))]
    return sorted(slow_kinds, key=lambda slow: -slow.seconds)


def _seconds(rank: Rank, steps: list[int]) -> np.ndarray:
    """Seconds of a rank's calls in a step, (call, quantile)."""
    took: dict[tuple[str, int], list[float]] = defaultdict(list)
    for step in steps:
        for block in rank.steps[step].blocks:
            took[block.program, block.number].append(block.end - block.begin)
    return np.array([len(took[call]) / len(steps) * np.quantile(took[call] or [0.0], OF_CALLS) for call in rank.calls])


def _compare(rank: Rank, kind: str, own: np.ndarray, others: np.ndarray) -> SlowRank | None:
    """Compare a rank with others in one kind of call. Returns a finding if it is slower at each quantile."""
    chosen = np.array([rank.programs[program][number].kind == kind for program, number in rank.calls])
    own, others = own[chosen], others[chosen]
    longer = (own * (own > MORE * others)).sum(0) > CONSISTENT * own.sum(0)
    if not chosen.any() or not (longer & (own.sum(0) > SLOWER * others.sum(0))).all():
        return None
    speed = (others.sum(0) / own.sum(0)).max()
    return SlowRank(rank.rank, kind, float(speed), float((own - others).sum(0)[-1]))


def slow_links(recording: Recording) -> list[SlowLink]:
    """Slow links, slowest first. Links within machines are compared with each other, as are those between machines."""
    hosts = {rank.rank: rank.host for rank in recording.ranks}
    alike: dict[bool, dict[tuple[int, int], np.ndarray]] = defaultdict(dict)
    for rank in recording.ranks:
        for source in rank.steps[recording.steps[0]].links:
            times = [rank.steps[step].links[source] for step in recording.steps]
            alike[hosts[source] == rank.host][source, rank.rank] = np.quantile(times, OF_MESSAGES)
    slow = []
    for links in alike.values():
        for (source, target), seconds in links.items():
            others = [s for pair, s in links.items() if set(pair) != {source, target}]
            if others and (speed := (np.median(others, axis=0) / seconds).max()) < SLOW_LINK:
                slow.append(SlowLink(source, target, float(speed), recording.ranks[0].message / seconds[-1]))
    return sorted(slow, key=lambda link: link.speed)
