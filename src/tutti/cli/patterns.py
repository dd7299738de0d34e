"""The verb `tutti patterns`: show the fused operators that replace patterns of a model's step."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import torch
import tyro

from tutti.cli.plan.workload import DTYPES
from tutti.cli.tables import consoles, table
from tutti.launch.progress import progress
from tutti.tracing.capture import capture
from tutti.tracing.load import load, suiting
from tutti.tracing.rewrite.fused import fused, left_over
from tutti.tracing.rewrite.pattern_table import PATTERNS


def patterns(
    model: Annotated[str, tyro.conf.Positional],
    batch: int = 8,
    seq: int = 128,
    dtype: str = "bfloat16",
    autocast: bool = False,
    numbers: Path | None = None,
) -> None:
    """Capture a training step of a model, and print the patterns found, their counts, and the near misses.

    Args:
        model: A folder with a transformers config.json, such a file, or package.module:function that returns
            (model, batch).
            The module is imported and the function is called: name only code that you trust.
        batch: Sequences or images in the batch of a transformers model.
        seq: Tokens per sequence.
        dtype: Parameters of a transformers model: bfloat16 or float32.
        autocast: Compute in bfloat16 under torch.autocast.
        numbers: Write all results (.json).
    """
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; expected one of {', '.join(DTYPES)}")
    console = consoles()[0]
    with progress("capturing the step"):
        network, example = load(model, batch, seq, DTYPES[dtype])
        with suiting(network), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            graph = capture(network, example)
    operators = {pattern.name: pattern.operator for pattern in PATTERNS}
    shown = table("pattern", "operator", "matches", left=("operator",))
    for name, operator in operators.items():
        shown.add_row(name, operator, f"{graph.matches[name]:,}")
    console.print(shown)
    whole, left = fused(graph), Counter(left_over(graph))
    shown = table("family", "operator", "number", left=("operator",))
    for family, counts in whole.items():
        for operator, count in counts.items():
            shown.add_row(family, operator, f"{count:,}")
    console.print(shown)
    if left:
        shown = table("left over", "module", "operator", "number", left=("module", "operator"))
        for (family, path, operator), count in left.items():
            shown.add_row(family, path, operator, f"{count:,}")
        console.print(shown)
    else:
        console.print("nothing is left over")
    if numbers:
        rows = [
            {"family": family, "module": path, "operator": operator, "number": n}
            for (family, path, operator), n in left.items()
        ]
        report = {"matches": {name: graph.matches[name] for name in operators}, "fused": whole, "left": rows}
        numbers.write_text(json.dumps(report, indent=1) + "\n")
