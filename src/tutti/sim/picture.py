"""The style of pictures of a simulated step, and how they are saved."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

SUFFIXES = (".svg", ".png", ".pdf")
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "tutti", "font.family": "sans-serif", "font.size": 9}


def check_suffix(path: Path) -> None:
    """Raise ValueError if a picture cannot be written to this suffix."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"cannot write a picture to {path}: its name must end in {', '.join(SUFFIXES)}")


def bare(axes: Axes, title: str, seconds: float) -> None:
    """Set up a panel of this many seconds, without a frame."""
    axes.set_xlim(0, 1e3 * seconds)
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_xlabel("ms")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def legend(figure: Figure, colors: dict[str, str]) -> None:
    figure.legend(
        handles=[Patch(color=color, label=kind) for kind, color in colors.items()],
        loc="outside lower left",
        ncols=max(1, min(6, len(colors))),
        frameon=False,
    )


def save(figure: Figure, path: Path) -> None:
    """Write a figure. Equal figures give equal bytes."""
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    if path.suffix == ".svg":
        path.write_text(re.sub(r"[ \t]+\n", "\n", path.read_text()))
