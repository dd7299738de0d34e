"""The verb `tutti diagnose`: find slow ranks and links in a run, and show where time goes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from tutti.cli.tables import SHOWN, consoles, table
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
    console, told = consoles()
    with told.status(f"reading {folder}"):
        found = look_into(folder)
    _say(found, console)
    if picture:
        save_picture(found.recording, {slow.rank for slow in found.ranks}, picture)
    if timeline:
        save_timeline(found.recording, timeline)
    if numbers:
        numbers.write_text(_numbers(found))


def _say(found: Diagnosis, console: Console) -> None:
    steps = found.recording.steps
    expected = found.recording.predicted.get("seconds")
    predicted = f"; predicted {1e3 * expected:.3g} ms" if expected else ""
    console.print(
        f"{len(steps)} recorded steps, {steps[0]} to {steps[-1]}, on {len(found.shares)} ranks: "
        f"{1e3 * found.seconds:.3g} ms a step{predicted}\n"
    )
    for sentence in found.words() or ["nothing is slow: ranks that compute the same take as long, links carry as much"]:
        console.print(sentence)
    if found.exposed:
        rank, seconds, share = found.exposed
        console.print(f"rank {rank} waits {1e3 * seconds:.3g} ms a step for batches, {share:.1%} of its time")
    shown = table("share of rank", "matmuls", "other", "communicates", "waits", "pipeline", "Python", "is waited for")
    for rank, share in sorted(enumerate(found.shares), key=lambda item: -found.caused(item[0]))[:SHOWN]:
        parts = (share.computing[MATMULS], share.computing[REST], sum(share.moving.values()),
                 sum(share.waiting.values()), share.passing, share.other, found.caused(rank))  # fmt: skip
        shown.add_row(str(rank), *(f"{part / share.seconds:.0%}" for part in parts))
    console.print("", shown)
    kinds = table("rank 0, a step", "predicted ms", "measured ms", "measured / predicted")
    for title, expects, took in sorted(found.kinds, key=lambda kind: -kind[2]):
        known = (f"{1e3 * expects:.3g}", f"{took / expects:.2f}") if expects else ("", "")
        kinds.add_row(title, known[0], f"{1e3 * took:.3g}", known[1])
    console.print("", kinds)


def _numbers(found: Diagnosis) -> str:
    shares = [{**vars(share), "moving": {" over ".join(k): v for k, v in share.moving.items()}, "other": share.other}
              for share in found.shares]  # fmt: skip
    whole = {
        "steps": found.recording.steps,
        "seconds": found.seconds,
        "predicted": found.recording.predicted.get("seconds"),
        "words": found.words(),
        "slow_ranks": [asdict(slow) for slow in found.ranks],
        "slow_links": [asdict(slow) for slow in found.links],
        "ranks": shares,
        "phases": found.phases,
        "data": dict(zip(("rank", "seconds", "share"), found.exposed, strict=True)) if found.exposed else None,
        "kinds": found.kinds,
    }
    return json.dumps(whole, indent=1) + "\n"
