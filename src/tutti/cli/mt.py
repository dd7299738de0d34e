"""The verb `tutti mt`: its options. The work is done in `tutti.science.em.mt.command`, imported when a verb runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from tutti.config.options import call_verb

First = tyro.conf.Positional
Folder = Annotated[str, tyro.conf.arg(metavar="DIR")]


def forward(config: First[Path], out: Folder = "") -> None:
    """Compute the responses of a section, with noise, and draw them.

    Args:
        config: A TOML file; runs/mt_basin.toml is one.
        out: Folder of the results; by default out/mt/NAME.
    """
    from tutti.science.em.mt import command

    command.forward(config, out)


def invert(config: First[Path], out: Folder = "") -> int:
    """Invert data, or the synthetic data of the config's model, and draw the result.

    The exit code is 1 if the data are not fitted to the target.

    Args:
        config: A TOML file; runs/mt_basin.toml is one.
        out: Folder of the results; by default out/mt/NAME.
    """
    from tutti.science.em.mt import command

    return command.invert(config, out)


def mt(argv: list[str]) -> int | None:
    """Run `tutti mt`."""
    verbs = {"forward": forward, "invert": invert}
    return call_verb(verbs, "tutti mt", "Magnetotellurics.", argv)
