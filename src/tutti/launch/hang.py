"""Find the rank that blocks the others, from the reports of all ranks."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class HangReport:
    """The state of a rank, as it reports it.

    beat: number of the report. stuck: no progress for longer than allowed. seconds: since the last progress.
    where: the step, or between which steps. busy: the long operation it is in, such as a compilation. at: the source
    line of its main thread. meeting: the communication it waits in. peers: ranks of that communication (None: all).
    left: it has finished.
    """

    beat: int
    stuck: bool = False
    seconds: float = 0.0
    where: str = ""
    busy: str = ""
    at: str = ""
    meeting: str = ""
    peers: Sequence[int] | None = None
    left: bool = False
    process: int = 0
    host: str = field(default_factory=socket.gethostname)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> HangReport:
        return HangReport(**json.loads(text))

    def takes(self, rank: int) -> bool:
        """Whether a rank takes part in its communication."""
        return self.peers is None or rank in self.peers


def verdict(reports: Mapping[int, HangReport], silent: Mapping[int, float], ranks: int) -> str | None:
    """The message that names the hung rank and the collective the others wait in. None while any rank makes progress.

    reports: the newest of each rank. silent: seconds without a report, for ranks that stopped reporting.
    """
    here = {rank: report for rank, report in sorted(reports.items()) if not report.left and rank not in silent}
    if not all(report.stuck for report in here.values()):
        return None
    waiting = {rank: report for rank, report in here.items() if report.meeting}
    causes = {rank: report for rank, report in here.items() if not report.meeting}
    said = [
        _rank(rank, _silence(seconds, reports.get(rank)), waiting, ranks) for rank, seconds in sorted(silent.items())
    ]
    said += [_rank(rank, _doing(report), waiting, ranks) for rank, report in causes.items()]
    if not said:
        said = [f"all ranks of {ranks} wait for one another: {_waits(waiting)}"]
    return "\n  ".join(said)


def _doing(report: HangReport) -> str:
    doing = f"{report.busy} ({report.where})" if report.busy else f"has been {report.where}"
    return f"{doing} for {report.seconds:.0f} s" + (f", at {report.at}" if report.at else "")


def _silence(seconds: float, report: HangReport | None) -> str:
    if report is None:
        return "has not sent a first heartbeat"
    state = _state(report) or "or that machine does not answer"
    return (
        f"has sent no heartbeat for {seconds:.0f} s, last {report.where}: "
        f"process {report.process} of {report.host} {state}"
    )


def _rank(rank: int, doing: str, waiting: Mapping[int, HangReport], ranks: int) -> str:
    """Describe a hung rank, and what the others wait in for it."""
    its = {peer: report for peer, report in waiting.items() if report.takes(rank)} or waiting
    if not its:
        return f"rank {rank} of {ranks} hangs: it {doing}"
    first = next(iter(its.values()))
    there = {peer: report for peer, report in waiting.items() if report.meeting == first.meeting}
    elsewhere = {peer: report for peer, report in waiting.items() if peer not in there}
    more = f"; {_waits(elsewhere)}" if elsewhere else ""
    those = f"{_ranks(there)} there for {first.seconds:.0f} s{more}"
    return f"rank {rank} of {ranks} has not reached {first.meeting} ({first.where}): it {doing}; {those}"


def _waits(waiting: Mapping[int, HangReport]) -> str:
    by_meeting: dict[str, dict[int, HangReport]] = {}
    for rank, report in waiting.items():
        by_meeting.setdefault(f"{report.meeting} ({report.where})", {})[rank] = report
    return "; ".join(f"{_ranks(those)} in {meeting}" for meeting, those in by_meeting.items())


def _ranks(those: Mapping[int, HangReport]) -> str:
    names = ", ".join(map(str, those))
    return f"ranks {names} wait" if len(those) > 1 else f"rank {names} waits"


def _state(report: HangReport) -> str:
    """The state that Linux reports for a process of this machine, else ""."""
    if report.host != socket.gethostname():
        return ""
    try:
        state = Path(f"/proc/{report.process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "is gone"
    descriptions = {"T": "is stopped", "D": "waits for a device or a file system", "Z": "has ended"}
    return descriptions.get(state, "lets no other thread run")
