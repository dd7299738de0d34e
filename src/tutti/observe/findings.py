"""What is slow: ranks that compute, and links that carry, less than others that should do the same.

Other programs of a machine only ever add time, and not to every run of a call. So what is slow has to be so where it is
fast: a rank in the fastest runs of each of its calls as well as in their median, a link in its fastest messages.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from tutti.observe.calls import TITLES
from tutti.observe.recording import Rank, Recording

SLOWER = 1.25  # times as long as others: what differs less is no finding
CONSISTENT = 0.75  # of a rank's time goes to calls that take longer
MORE = 1.1  # times as long, of a single call
OF_CALLS, OF_MESSAGES = (0.1, 0.5), (0.0, 0.25)  # quantiles of what runs of a call, and messages, take
SLOW_LINK = 0.5  # of the others' bandwidth


@dataclass(frozen=True)
class SlowRank:
    """kind: of calls. speed: of the others' for the same. seconds: that it takes longer, each step."""

    rank: int
    kind: str
    speed: float
    seconds: float

    def __str__(self) -> str:
        return f"rank {self.rank}'s {TITLES[self.kind]} run at {self.speed:.0%} of the others' speed"


@dataclass(frozen=True)
class SlowLink:
    """speed: of the bandwidth of others like it. bandwidth: in bytes a second."""

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
    """The one that costs most first."""
    alike: dict[tuple, list[Rank]] = defaultdict(list)
    for rank in recording.ranks:
        alike[rank.kind].append(rank)
    found = []
    for ranks in alike.values():
        if len(ranks) > 1:
            each = np.stack([_seconds(rank, recording.steps) for rank in ranks])
            for i, rank in enumerate(ranks):
                others = np.median(np.delete(each, i, axis=0), axis=0)
                found += [slow for kind in TITLES if (slow := _compare(rank, kind, each[i], others))]
    return sorted(found, key=lambda slow: -slow.seconds)


def _seconds(rank: Rank, steps: list[int]) -> np.ndarray:
    """What a rank's calls take in a step, in order: (call, quantile)."""
    took: dict[tuple[str, int], list[float]] = defaultdict(list)
    for step in steps:
        for block in rank.steps[step].blocks:
            took[block.program, block.number].append(block.end - block.begin)
    return np.array([len(took[call]) / len(steps) * np.quantile(took[call] or [0.0], OF_CALLS) for call in rank.calls])


def _compare(rank: Rank, kind: str, own: np.ndarray, others: np.ndarray) -> SlowRank | None:
    """A rank with others, in one kind of call; slow if it is at each quantile."""
    chosen = np.array([rank.programs[program][number].kind == kind for program, number in rank.calls])
    own, others = own[chosen], others[chosen]
    longer = (own * (own > MORE * others)).sum(0) > CONSISTENT * own.sum(0)
    if not chosen.any() or not (longer & (own.sum(0) > SLOWER * others.sum(0))).all():
        return None
    speed = (others.sum(0) / own.sum(0)).max()
    return SlowRank(rank.rank, kind, float(speed), float((own - others).sum(0)[-1]))


def slow_links(recording: Recording) -> list[SlowLink]:
    """The slowest first. Links inside of machines are compared with one another, and those between machines."""
    hosts = {rank.rank: rank.host for rank in recording.ranks}
    alike: dict[bool, dict[tuple[int, int], np.ndarray]] = defaultdict(dict)
    for rank in recording.ranks:
        for source in rank.steps[recording.steps[0]].links:
            times = [rank.steps[step].links[source] for step in recording.steps]
            alike[hosts[source] == rank.host][source, rank.rank] = np.quantile(times, OF_MESSAGES)
    found = []
    for links in alike.values():
        for (source, target), seconds in links.items():
            others = [s for pair, s in links.items() if set(pair) != {source, target}]
            if others and (speed := (np.median(others, axis=0) / seconds).max()) < SLOW_LINK:
                found.append(SlowLink(source, target, float(speed), recording.ranks[0].message / seconds[-1]))
    return sorted(found, key=lambda link: link.speed)
