"""The verb `tutti diagnose`: find slow ranks and links in a run, and show where time goes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from tutti.cli.tables import SHOWN, consoles, table
from tutti.launch.progress import progress
from tutti.observe.calls import MATMULS, REST
from tutti.observe.diagnosis import MONITOR, Diagnosis
from tutti.observe.diagnosis import diagnose as look_into
from tutti.observe.picture import save_picture, save_timeline
from tutti.sim.picture import check_suffix


def diagnose(
    folder: Annotated[Path, tyro.conf.Positional],
    picture: Path | None = None,
    timeline: Path | None = None,
    numbers: Path | None = None,
) -> None:
    """Find slow ranks, links and data loading in a run, and compare its step time with the prediction.

    `tutti train` records a step at intervals; in a script, `step.record(folder)` does.

    Args:
        folder: A run folder, or the folder of a recording.
        picture: Draw a typical step, measured and simulated, to this file (.svg, .png, .pdf).
        timeline: Write that step as a trace for https://ui.perfetto.dev (.json).
        numbers: Write all results (.json).
    """
    if picture:
        check_suffix(picture)
    folder = folder / MONITOR if (folder / MONITOR).is_dir() else folder
    console = consoles()[0]
    with progress(f"reading {folder}"):
        diagnosis = look_into(folder)
    _say(diagnosis, console)
    if picture:
        save_picture(diagnosis.recording, {slow.rank for slow in diagnosis.ranks}, picture)
    if timeline:
        save_timeline(diagnosis.recording, timeline)
    if numbers:
        numbers.write_text(_numbers(diagnosis))


def _say(diagnosis: Diagnosis, console: Console) -> None:
    steps = diagnosis.recording.steps
    expected = diagnosis.recording.predicted.get("seconds")
    predicted = f"; predicted {1e3 * expected:.3g} ms" if expected else ""
    console.print(
        f"{len(steps)} recorded steps, {steps[0]} to {steps[-1]}, on {len(diagnosis.shares)} ranks: "
        f"{1e3 * diagnosis.seconds:.3g} ms a step{predicted}\n"
    )
    for sentence in diagnosis.words() or [
        "nothing is slow: ranks that compute the same take as long, links carry as much"
    ]:
        console.print(sentence)
    if diagnosis.exposed:
        rank, seconds, share = diagnosis.exposed
        console.print(f"rank {rank} waits {1e3 * seconds:.3g} ms a step for batches, {share:.1%} of its time")
    shown = table("share of rank", "matmuls", "other", "communicates", "waits", "pipeline", "Python", "is waited for")
    for rank, share in sorted(enumerate(diagnosis.shares), key=lambda item: -diagnosis.caused(item[0]))[:SHOWN]:
        parts = (share.computing[MATMULS], share.computing[REST], sum(share.moving.values()),
                 sum(share.waiting.values()), share.passing, share.other, diagnosis.caused(rank))  # fmt: skip
        shown.add_row(str(rank), *(f"{part / share.seconds:.0%}" for part in parts))
    console.print("", shown)
    kinds = table("rank 0, a step", "predicted ms", "measured ms", "measured / predicted")
    for title, expects, took in sorted(diagnosis.kinds, key=lambda kind: -kind[2]):
        expectation = (f"{1e3 * expects:.3g}", f"{took / expects:.2f}") if expects else ("", "")
        kinds.add_row(title, expectation[0], f"{1e3 * took:.3g}", expectation[1])
    console.print("", kinds)


def _numbers(diagnosis: Diagnosis) -> str:
    shares = [{**vars(share), "moving": {" over ".join(k): v for k, v in share.moving.items()}, "other": share.other}
              for share in diagnosis.shares]  # fmt: skip
    whole = {
        "steps": diagnosis.recording.steps,
        "seconds": diagnosis.seconds,
        "predicted": diagnosis.recording.predicted.get("seconds"),
        "words": diagnosis.words(),
        "slow_ranks": [asdict(slow) for slow in diagnosis.ranks],
        "slow_links": [asdict(slow) for slow in diagnosis.links],
        "ranks": shares,
        "phases": diagnosis.phases,
        "data": dict(zip(("rank", "seconds", "share"), diagnosis.exposed, strict=True)) if diagnosis.exposed else None,
        "kinds": diagnosis.kinds,
    }
    return json.dumps(whole, indent=1) + "\n"
