"""The verb `tutti peptides`: its options. The work is done in `tutti.science.peptides.command`, imported when the verb
runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro


def peptides(
    config: tyro.conf.Positional[Path],
    out: Annotated[str, tyro.conf.arg(metavar="DIR")] = "",
) -> None:
    """Train a language model of peptides, ask it for properties, and measure what it generates.

    It writes the model, an oracle, peptides as FASTA and CSV, a report and pictures. The same command goes on where it
    was interrupted; other targets or another sampling use the trained model. Ctrl-C and SIGTERM end training after a
    save.

    Args:
        config: A TOML file; runs/peptides.toml is one.
        out: Folder of the results; by default out/peptides/NAME.
    """
    from tutti.science.peptides import command

    command.run(config, out)
