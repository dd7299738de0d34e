"""The verb `tutti md`: its options. The work is done in `tutti.science.mol.command`, imported when the verb runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro


def md(
    config: tyro.conf.Positional[Path],
    out: Annotated[str, tyro.conf.arg(metavar="DIR")] = "",
    steps: int = 0,
    processes: int = 1,
) -> None:
    """Run a molecular-dynamics simulation. The same command goes on where it was interrupted.

    It writes a log, a trajectory, restart files, a report and pictures. Ctrl-C and SIGTERM end it after a save.

    Args:
        config: A TOML file; runs/md_argon.toml is one.
        out: Folder of the results; by default out/md/NAME.
        steps: Steps after equilibration in all, instead of the config's: more of them go on with a complete run.
        processes: Processes that divide the space of the simulation. For several machines: `tutti run -m tutti md ...`
            on each, with a folder that all of them see. It may differ when a run goes on.
    """
    from tutti.launch.launch import launch, under_launcher
    from tutti.science.mol import command

    if processes < 1:
        raise ValueError(f"--processes is {processes}; expected 1 or more")
    if processes > 1 and not under_launcher():
        launch(command.run, processes, config, out, steps)
    else:
        command.run(config, out, steps)
