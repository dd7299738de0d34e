"""The style of pictures of a simulated step, and how they are saved."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti.extras import extra

if TYPE_CHECKING:  # matplotlib takes half a second, and is of an extra
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png", ".pdf")
INK, PAPER = re.compile(r"#(?:000000|222222)"), "#ffffff"  # colors of lines and gaps
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


@contextmanager
def drawing(path: Path | StringIO, width: float, height: float) -> Iterator[Figure]:
    """A figure of this size in inches, written to `path` at the end of the block: a file, or text as SVG without a
    background. Equal figures give equal bytes.

    Raises ValueError for a suffix that is no picture's, ModuleNotFoundError without matplotlib.
    """
    if isinstance(path, Path):
        check_suffix(path)
    with extra("train"):
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    with rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        if isinstance(path, StringIO):
            figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})
            return
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    if path.suffix == ".svg":
        path.write_text(re.sub(r"[ \t]+\n", "\n", path.read_text()))


def inline(draw: Callable[[StringIO], None]) -> str:
    """What `draw` writes as an <svg> element of a page: lines have the page's color, gaps its `--paper`."""
    text = StringIO()
    draw(text)
    drawn = text.getvalue()
    drawn = re.sub(r"<style.*?</style>|<metadata>.*?</metadata>", "", drawn[drawn.index("<svg") :], flags=re.DOTALL)
    drawn = re.sub(r'<g id="[^"]*"', "<g", re.sub(r"[ \t]+\n", "\n", drawn))  # two pictures have the same names
    return INK.sub("currentColor", drawn).replace(PAPER, "var(--paper)")


def legend(figure: Figure, colors: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    figure.legend(
        handles=[Patch(color=color, label=kind) for kind, color in colors.items()],
        loc="outside lower left",
        ncols=max(1, min(6, len(colors))),
        frameon=False,
    )
