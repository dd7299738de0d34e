"""The verb `tutti plan`: plan a model for a cluster that need not be there, and read, explain and compare plans."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tutti.cluster import Cluster
from tutti.graph.capture import capture
from tutti.graph.load import load, suiting
from tutti.graph.optimizers import TABLE
from tutti.plan.explain import seconds, size
from tutti.plan.plan import Plan
from tutti.plan.planner import Planner

SHOWN = 10  # plans in the table
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def plan(argv: list[str]) -> None:
    """`tutti plan --model ... --cluster ...`, `tutti plan show FILE`, `tutti plan --compare FILE FILE`."""
    if argv[:1] == ["show"]:
        tyro.cli(show, prog="tutti plan show", args=argv[1:])
    elif argv[:1] == ["--compare"]:
        tyro.cli(compare, prog="tutti plan --compare", args=argv[1:])
    else:
        tyro.cli(make, prog="tutti plan", args=argv)


def make(
    model: str,
    cluster: str,
    batch: int = 8,
    seq: int = 1024,
    plan: str = "auto",
    optimizer: str = "adamw",
    dtype: str = "bfloat16",
    clip_norm: float | None = None,
    save: Path | None = None,
) -> None:
    """Plan the training of a model for a cluster. Neither has to be there: nothing is allocated.

    Prints the fastest plans that fit into memory, and explains the first. `tutti plan show FILE` explains a saved
    plan, `tutti plan --compare FILE FILE` says what differs between two.

    Args:
        model: A folder with a config.json of transformers, such a file, or package.module:function that returns
            (model, batch).
        cluster: A known device (cpu, v100-32, v100-32-sxm3, a100-40, a100-80, h100, h200, b200, mi300x, ascend-910,
            ascend-910b), how many nodes and how many in each: h100:16x8, a100-80:8, cpu:4; or a JSON file.
        batch: Sequences in the global batch of a model of transformers.
        seq: Tokens of each.
        plan: Explain this plan instead of the fastest: dp, tp4, zero3, dp2xtp4, tp8xzero1, ...
        optimizer: adamw, adam or sgd.
        dtype: Of the parameters of a model of transformers: bfloat16 (with float32 masters) or float32.
        clip_norm: Clip the gradient's norm to this.
        save: Write the plan to this file, for `tutti.parallelize(..., plan=FILE)` with the same optimizer, clip_norm
            and dtype (masters=True with bfloat16).
    """
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {kind.__name__.lower(): kind for kind in TABLE}
    for value, known, what in ((optimizer, makers, "optimizer"), (dtype, DTYPES, "dtype")):
        if value not in known:
            raise ValueError(f"no {what} {value!r}; there are {', '.join(known)}")
    target = Cluster.parse(cluster)
    console, progress = (Console(stderr=err, highlight=False, width=_width()) for err in (False, True))
    with progress.status("reading the model"):
        network, example = load(model, batch, seq, DTYPES[dtype])
        update = makers[optimizer](network.parameters(), lr=1e-3)
    with progress.status("capturing the step"), suiting(network):
        graph = capture(network, example, update, clip_norm=clip_norm, masters=True)
    parameters = sum(p.numel() for p in network.parameters())
    progress.print(f"captured {len(graph.nodes):,} nodes: {parameters / 1e9:.3g}e9 parameters, "
                   f"{graph.flops / 1e12:.3g}e12 FLOP a step")  # fmt: skip
    planner = Planner(graph, target)
    if plan != "auto":
        best = planner.named(plan)
    else:
        with Progress(console=progress, transient=True) as bar:
            task = bar.add_task("planning")
            ranked = planner.ranked(lambda done, total: bar.update(task, completed=done, total=total))
        console.print(table(ranked[:SHOWN], target.device.memory))
        if len(ranked) > SHOWN:
            console.print(f"and {len(ranked) - SHOWN} others")
        best = planner.best(ranked)
    print(best.explain())
    if save:
        best.save(save)
        print(f"saved {save}")


def show(file: Annotated[Path, tyro.conf.Positional]) -> None:
    """Explain a saved plan.

    Args:
        file: What `tutti plan --save` or `Plan.save` has written.
    """
    print(_read(file).explain())


def compare(first: Annotated[Path, tyro.conf.Positional], second: Annotated[Path, tyro.conf.Positional]) -> None:
    """Say what differs between two saved plans: a line with - for the first, one with + for the second.

    Args:
        first: A plan.
        second: Another.
    """
    a, b = _read(first), _read(second)
    print("\n".join(a.diff(b)) or "the plans say the same")


def table(plans: list[Plan], memory: float) -> Table:
    """Name, predicted time and memory of plans, and whether they fit into so many bytes."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("plan")
    for title in ("step", "computing", "communicating", "sent", "memory", "fits"):
        shown.add_column(title, justify="right")
    for p in plans:
        made = p.prediction
        assert made is not None
        times = (made.step_seconds, made.compute_seconds, made.communication_seconds)
        sizes = (made.communication_bytes, made.peak_bytes)
        fits = "yes" if made.peak_bytes <= memory else "no"
        shown.add_row(p.name, *map(seconds, times), *map(size, sizes), fits)
    return shown


def _width() -> int | None:
    return None if sys.stdout.isatty() else 120  # of a file or a pipe


def _read(file: Path) -> Plan:
    try:
        return Plan.load(file)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
