"""The watchdog of a job. It ends a job in which a rank hangs, and names the rank and the collective the others wait in.

Each rank has a thread that watches the progress of its main thread (`launch.heartbeat`); a main thread that is stuck in
C shows nothing else. A second thread reports it to the job's store over its own connection; it may block when rank 0,
which hosts the store, hangs. A rank that makes no progress for too long writes the stacks of all its threads to a file.
When all remaining ranks are stuck or silent, each exits with the same error.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

import torch.distributed as dist

from tutti import compat
from tutti.launch.error_file import ErrorFile, frame_of_user
from tutti.launch.hang import HangReport, verdict
from tutti.launch.heartbeat import HEARTBEAT
from tutti.launch.launch import Hang, hang

LONG = 6  # times the allowed seconds during a long operation
BEAT = 5.0  # maximum seconds between two reports
JUDGES = 8  # about this many ranks of a large job read the reports of all others
LEAVING = 5.0  # seconds that rank 0 keeps the store open for ranks that are exiting

STACKS = "stacks"  # folder for the stacks of jobs started by `tutti run --hang`

_count = 0  # watchdogs created in this process; all ranks create them in the same order
_watchdogs: list[Watchdog] = []


class Watchdog:
    """Ends a job whose ranks make no progress. Wrap the loop on every rank: `with Watchdog(600, "out/stacks"): ...`.

    seconds: time without progress (a collective, a step, an evaluation) after which the job ends; six times as long
        while a rank plans, compiles, saves or loads. Raises ValueError unless it is positive.
    folder: folder for files `rank-2.txt` with the stacks of all Python threads.

    The error names the rank that hangs and the collective that the others wait in. It is passed to torchrun or
    `tutti run`, or printed to stderr, and the process exits with code 1.
    """

    def __init__(self, seconds: float, folder: str | Path):
        if not seconds > 0:
            raise ValueError(f"a watchdog needs more than 0 seconds without progress, not {seconds}")
        self.seconds, self.folder = seconds, Path(folder)
        self.beat = min(BEAT, seconds / 20)
        self.main = threading.main_thread()

    def __enter__(self) -> Watchdog:
        distributed = dist.is_initialized() and dist.get_world_size() > 1
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
        self.moves, self.since = HEARTBEAT.moves, time.monotonic()
        self.over = threading.Event()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file: IO[bytes] = open(self.folder / f"rank-{self.rank}.txt", "ab")
        self.before = self.file.tell()  # stacks left by an earlier attempt
        self.wire = _Wire(self) if distributed else None
        self._arm()
        self.thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")
        self.thread.start()
        return self

    def __exit__(self, kind: type | None = None, error: BaseException | None = None, tb: TracebackType | None = None):
        self.over.set()
        self.thread.join()
        faulthandler.cancel_dump_traceback_later()
        empty = not self.file.seek(0, os.SEEK_END)
        self.file.close()
        if empty:
            (self.folder / f"rank-{self.rank}.txt").unlink(missing_ok=True)
        with suppress(OSError):  # other ranks' files remain
            self.folder.rmdir()
        if self.wire:
            self.wire.leave(patient=error is None)

    def report(self, beat: int) -> HangReport:
        """The state of this rank now."""
        seconds, meeting, busy = time.monotonic() - self.since, HEARTBEAT.meeting, HEARTBEAT.busy
        stuck = seconds > self.seconds * (LONG if busy and not meeting else 1)
        at = "" if meeting or not stuck else frame_of_user(_stack(self.main))
        return HangReport(
            beat, stuck, seconds, HEARTBEAT.where, busy, at, str(meeting or ""), HEARTBEAT.peers(), process=os.getpid()
        )

    def _watch(self) -> None:
        dumped = False
        while not self.over.wait(self.beat):
            if HEARTBEAT.moves != self.moves:
                self.moves, self.since = HEARTBEAT.moves, time.monotonic()
            self._arm()
            report = self.report(0)
            if report.stuck and not dumped:
                self._dump(report)
            elif not report.stuck and os.fstat(self.file.fileno()).st_size > self.before:
                self.file.truncate(self.before)
            dumped = report.stuck
            said = self.wire.judged(report) if self.wire else verdict({0: report}, {}, 1)
            if said and dumped:
                self._end(said)

    def _arm(self) -> None:
        """Dump the stacks even if the main thread holds the GIL: faulthandler does not need it."""
        faulthandler.dump_traceback_later(self.seconds - 2 * self.beat, file=self.file)

    def _dump(self, report: HangReport) -> None:
        doing = report.meeting or report.busy or report.at
        self.file.write(f"{time.ctime()}: rank {self.rank} of {self.ranks}, {report.where}, {doing}\n".encode())
        self.file.flush()
        faulthandler.dump_traceback(self.file)

    def _end(self, said: str) -> None:
        error = Hang(f"{said}\n  stacks of all threads: {self.folder}/rank-*.txt")
        if not ErrorFile().left(error):
            print(error, file=sys.stderr)
        if self.rank == 0:  # which hosts the store
            time.sleep(4 * self.beat)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


class _Wire:
    """Exchanges reports with the other ranks through the store, on its own thread."""

    def __init__(self, dog: Watchdog):
        global _count
        _count += 1
        self.dog, self.store = dog, compat.job_store(f"watchdog/{_count}")
        self.judge = dog.rank % max(1, dog.ranks // JUDGES) == 0
        self.alert: float | None = None  # when this rank began to suspect a hang
        self.answered = time.monotonic()
        self.said, self.gone = "", False
        self.heard: dict[int, tuple[HangReport, float]] = {}  # with the time of arrival
        self.store.set(str(dog.rank), self.dog.report(0).to_json())
        self.thread = threading.Thread(target=self._talk, daemon=True, name="watchdog's wire")
        self.thread.start()

    def judged(self, own: HangReport) -> str | None:
        """The verdict, once there is one. Called by the watching thread; never blocks."""
        now, seconds = time.monotonic(), self.dog.seconds
        if own.seconds < seconds / 2:
            self.alert, self.heard = None, {}
            return None
        self.alert = self.alert or now
        if self.gone:
            return verdict({self.dog.rank: own}, {}, self.dog.ranks)
        if (quiet := now - self.answered) > seconds:
            return verdict({self.dog.rank: own}, {0: quiet}, self.dog.ranks)
        return self.said or None

    def leave(self, patient: bool) -> None:
        self.thread.join(LEAVING)
        if self.thread.is_alive() or self.gone:
            return
        try:
            self.store.set(str(self.dog.rank), HangReport(0, left=True).to_json())
            end = time.monotonic() + (LEAVING if patient and self.dog.rank == 0 else 0)
            while time.monotonic() < end and not all(r.left for r in self._reports().values()):
                time.sleep(self.dog.beat / 4)
        except (RuntimeError, ValueError):
            self.gone = True

    def _talk(self) -> None:
        beat = 0
        try:
            while not self.dog.over.wait(self.dog.beat):
                beat += 1
                self.store.set(str(self.dog.rank), self.dog.report(beat).to_json())
                if self.alert is not None:
                    self._hear(self.alert)
                elif self.dog.rank:
                    self.store.check(["0"])  # does the store answer?
                self.answered = time.monotonic()
        except RuntimeError:  # the store is gone, and the job with it
            self.gone = True

    def _hear(self, alert: float) -> None:
        if self.store.check(["verdict"]):
            self.said = self.store.get("verdict").decode()
        elif self.judge:
            now, doubt, heard = time.monotonic(), self.dog.seconds / 2, self.heard
            for rank, report in self._reports().items():
                if rank not in heard or heard[rank][0].beat != report.beat:
                    heard[rank] = report, now
            reports = {rank: report for rank, (report, _) in heard.items()}
            silent = {}
            for rank in range(self.dog.ranks):
                report, new = heard.get(rank, (None, alert))
                patience = doubt * (LONG if report and report.busy and not report.meeting else 1)
                if now - new > patience and not (report and report.left):
                    silent[rank] = now - new
            said = verdict(reports, silent, self.dog.ranks)
            if said and self.dog.report(0).stuck:
                self.said = self.store.compare_set("verdict", "", said).decode()

    def _reports(self) -> dict[int, HangReport]:
        """The newest report of each rank."""
        names = [str(rank) for rank in range(self.dog.ranks)]
        if not self.store.check(names):
            names = [name for name in names if self.store.check([name])]
        texts = self.store.multi_get(names)
        return {int(name): HangReport.from_json(text) for name, text in zip(names, texts, strict=True)}


def watch_as_asked() -> None:
    """Start the watchdog that `tutti run --hang` asked for, once."""
    if (seconds := hang()) and not _watchdogs:
        _watchdogs.append(Watchdog(seconds, STACKS))
        _watchdogs[0].__enter__()


def done() -> None:
    """This rank is done: stop watching it."""
    while _watchdogs:
        _watchdogs.pop().__exit__()


def _stack(thread: threading.Thread) -> traceback.StackSummary:
    frame = sys._current_frames().get(thread.ident or 0)
    return traceback.extract_stack(frame) if frame else traceback.StackSummary()
