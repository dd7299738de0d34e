"""`tutti compress`: compress a model in a folder into another folder."""

from __future__ import annotations

import sysconfig
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tutti.compress.compressor import compress
from tutti.compress.recipe import parse

STDLIB = "stdlib"


def command(
    model: Annotated[Path, tyro.conf.Positional],
    out: Path,
    recipe: str = "int4",
    calibration: str = "",
    samples: int = 128,
    length: int = 512,
) -> None:
    """Compress a model, block by block: one block is in memory at a time. A run that is interrupted goes on.

    Args:
        model: The folder of a model of transformers.
        out: The folder of the compressed model, in the format compressed-tensors.
        recipe: Such as int4, int4-g128-gptq, int4-zeros-awq, w8a8-smooth or rotate+int4-gptq; or a TOML file.
        calibration: A file with text, or `stdlib`: the source code of Python's library. For gptq, awq and smooth.
        samples: Rows of calibration data.
        length: Tokens of a row.
    """
    made = parse(recipe)
    if samples < 1 or length < 2:
        raise ValueError(f"{samples} rows of {length} tokens; expected at least 1 row of 2")
    if made.calibrated and not calibration:
        raise ValueError(f"recipe {recipe} needs data: --calibration FILE, or --calibration {STDLIB}")
    data = rows(model, calibration, samples, length) if made.calibrated and calibration else None
    console, begun = Console(highlight=False, soft_wrap=True), time.perf_counter()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(40), MofNCompleteColumn(),
               TimeElapsedColumn(), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("read", total=None)

        def show(done: int, total: int, path: str) -> None:
            bar.update(task, completed=done, total=total, description=path or "write")
            if not console.is_terminal and path:
                left = (time.perf_counter() - begun) / done * (total - done) if done else None
                rest = "" if left is None else f", about {left:.0f} s left"
                console.print(f"block {done + 1} of {total}{rest}", markup=False)

        found = compress(model, made, data, out=out, progress=show)
    console.print(str(found.report), markup=False)
    console.print(f"wrote {out}", markup=False)


def rows(model: Path, calibration: str, samples: int, length: int) -> list[dict[str, Any]]:
    """Calibration data: rows of tokens of a text. Raises ValueError if there are too few."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    tokens: list[int] = []
    for text in texts(calibration):
        tokens += tokenizer(text)["input_ids"]
        if len(tokens) >= samples * length:
            break
    found = torch.tensor(tokens[: samples * length]).split(length)
    whole = [x for x in found if len(x) == length]
    if not whole:
        raise ValueError(f"{calibration} has {len(tokens)} tokens, less than one row of {length}: give more text, or "
                         "--length")  # fmt: skip
    return [{"input_ids": x.unsqueeze(0)} for x in whole]


def texts(calibration: str) -> Any:
    """The texts of a file, or of Python's library: every seventh module, so that all parts of it are seen."""
    if calibration == STDLIB:
        library = Path(sysconfig.get_paths()["stdlib"])
        files = [x for x in sorted(library.rglob("*.py")) if "site-packages" not in x.parts and "test" not in x.parts]
        for path in files[::7]:
            yield path.read_text(errors="replace")
        return
    if not (path := Path(calibration)).is_file():
        raise ValueError(f"there is no file {path}; calibration is a file with text, or {STDLIB}")
    yield path.read_text(errors="replace")
