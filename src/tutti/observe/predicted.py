"""The predicted times of the recorded Programs, in the form of the measured ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tutti.sim.panels import panels
from tutti.sim.step import RANK, DryRun, SimulatedPart

SIMULATED = "simulated.json"


def write_predicted(dry_run: DryRun, folder: Path) -> None:
    """Write the predicted times into the folder of a recording."""
    Path(folder, SIMULATED).write_text(json.dumps(predicted(dry_run)))


def predicted(dry_run: DryRun) -> dict[str, Any]:
    """Return a prediction as JSON values. seconds: seconds of the step. programs: seconds of each call before
    compilation, in order, by the program's name. panels: panels of the picture."""
    return {
        "seconds": dry_run.seconds,
        "cluster": str(dry_run.cluster),
        "level": dry_run.level,
        "programs": {part.name: _seconds(part) for part in dry_run.parts},
        "panels": [[title, seconds, rows] for title, seconds, rows in panels(dry_run)],
    }


def _seconds(part: SimulatedPart) -> list[float]:
    """Seconds of each call of a Program, in order."""
    calls = [node for node in part.program.graph.nodes if node.op == "call_function"]
    at, seconds = {node: i for i, node in enumerate(calls)}, [0.0] * len(calls)
    for task in part.simulation.tasks[RANK]:
        if task.event >= 0:
            seconds[at[part.simulation.replays[RANK].events[task.event].node]] += task.seconds
    return seconds
