"""The verb `tutti dryrun`: what a plan's step will take, in time and memory, before anything is run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from tutti.cluster import Cluster
from tutti.graph.capture import capture
from tutti.graph.load import load, suiting
from tutti.graph.optimizers import TABLE
from tutti.plan.explain import seconds, size
from tutti.plan.plan import Plan
from tutti.run.batches import microbatches
from tutti.run.levels import LEVELS
from tutti.run.simulated.gantt import check_suffix, save_gantt
from tutti.run.simulated.step import DryRun, dry_run
from tutti.run.simulated.timeline import save_timeline

SHOWN = 10  # operators, and tensors alive at the peak
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def dryrun(
    plan: Annotated[Path, tyro.conf.Positional],
    model: str,
    cluster: str = "",
    batch: int = 8,
    seq: int = 1024,
    optimizer: str = "adamw",
    dtype: str = "bfloat16",
    clip_norm: float | None = None,
    level: str = "O0",
    overlap: bool = False,
    timeline: Path | None = None,
    gantt: Path | None = None,
) -> None:
    """Simulate a training step under a plan. Neither model nor cluster has to be there: nothing is allocated.

    The Program that each device would run is made as for training, on tensors without memory, and put on a clock.
    Prints time, communication, memory and the slowest operators. Batch, seq, optimizer, dtype and clip_norm are to
    be those that the plan was made for.

    Args:
        plan: A plan, as `tutti plan --save` writes it.
        model: A folder with a config.json of transformers, such a file, or package.module:function that returns
            (model, batch).
        cluster: A known device, how many nodes and how many in each: h100:16x8, cpu:4; or a JSON file. By default
            the plan's.
        batch: Sequences in the global batch of a model of transformers.
        seq: Tokens of each.
        optimizer: adamw, adam or sgd.
        dtype: Of the parameters of a model of transformers: bfloat16 (with float32 masters) or float32.
        clip_norm: Clip the gradient's norm to this.
        level: O0 runs operator by operator, O2 fuses what lies between two collectives.
        overlap: Simulate a runtime in which a device computes on until it needs what a collective brings. Today's
            waits for each.
        timeline: Write a trace to this JSON file, for https://ui.perfetto.dev.
        gantt: Draw the step to this .svg, .png or .pdf.
    """
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {kind.__name__.lower(): kind for kind in TABLE}
    for value, known, what in ((optimizer, makers, "optimizer"), (dtype, DTYPES, "dtype"), (level, LEVELS, "level")):
        if value not in known:
            raise ValueError(f"no {what} {value!r}; there are {', '.join(known)}")
    if gantt:
        check_suffix(gantt)
    chosen = _read(plan)
    if not cluster and not chosen.cluster:
        raise ValueError(f"{plan} does not say which cluster it is for: give --cluster")
    target = Cluster.parse(cluster or chosen.cluster)
    console, progress = (Console(stderr=err, highlight=False, width=_width()) for err in (False, True))
    with progress.status("reading the model") as status:
        network, example = load(model, batch, seq, DTYPES[dtype])
        update = makers[optimizer](network.parameters(), lr=1e-3)
        status.update("capturing the step")
        first = microbatches(example, chosen.accumulate)[0]
        with suiting(network):
            graph = capture(network, first, update, clip_norm=clip_norm, masters=True)
        made = dry_run(graph, chosen, target, level, overlaps=overlap, progress=status.update)
        status.update("writing")
        if timeline:
            save_timeline(made, timeline)
        if gantt:
            save_gantt(made, gantt)
    if chosen.graph and chosen.graph != graph.fingerprint:
        console.print("the plan was made for another step of this model: another batch, seq, dtype or optimizer")
    console.print(f"plan {chosen.name or plan} at {level} on {target}: {' x '.join(_axes(chosen))}")
    _show(made, console)
    for file in (timeline, gantt):
        if file:
            console.print(f"saved {file}")


def _show(made: DryRun, console: Console) -> None:
    """Time, communication, memory and operators, as tables."""
    memory, communication = made.memory, made.communication()
    exposed = sum(row[3] for row in communication.values())
    device = made.cluster.device
    console.print(f"step       {seconds(made.seconds)}: {seconds(made.compute)} computing, "
                  f"{seconds(exposed)} waiting for communication")  # fmt: skip
    each = made.peak / made.cluster.size
    console.print(f"of peak    {100 * made.fraction_of_peak:.1f} %: {made.flops:.3g} FLOP a step, "
                  f"{made.cluster.size} devices of {each:.3g} FLOP/s")  # fmt: skip
    over = "" if memory.peak <= device.memory else f": more than the {size(device.memory)} that there are"
    console.print(f"memory     {size(memory.peak)} per device at the peak{over}")
    if communication:
        table = _table("communication", "number", "sent", "under way", "exposed")
        for (kind, axis), (count, sent, took, waited) in sorted(communication.items(), key=lambda item: -item[1][2]):
            table.add_row(f"{kind} over {axis}", f"{count:,}", size(sent), seconds(took), seconds(waited))
        console.print(table)
    table = _table("memory at the peak", "bytes")
    for kind, count in memory.kinds.items():
        table.add_row(kind, size(count))
    console.print(table)
    where = f" ({memory.at})" if memory.at else ""
    table = _table(f"alive at the peak{where}", "kind", "tensors", "bytes")
    for alive in memory.alive[:SHOWN]:
        table.add_row(alive.label, alive.kind, f"{alive.count:,}", size(alive.bytes))
    console.print(table)
    table = _table("slowest operators", "number", "seconds", "share")
    for label, _, count, took in made.slowest()[:SHOWN]:
        table.add_row(label, f"{count:,}", seconds(took), f"{100 * took / made.seconds:.1f} %")
    console.print(table)


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, overflow="fold")
    for title in others:
        table.add_column(title, justify="left" if title == "kind" else "right")
    return table


def _axes(plan: Plan) -> list[str]:
    return [f"{axis} {n}" for axis, n in plan.mesh.items()]


def _width() -> int | None:
    return None if sys.stdout.isatty() else 120  # of a file or a pipe


def _read(file: Path) -> Plan:
    try:
        return Plan.load(file)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
