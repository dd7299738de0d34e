"""The verb `tutti dryrun`: predict the time and memory of a plan's step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from tutti.analysis.passes import check_level
from tutti.cli.plan.workload import Captured, Workload
from tutti.cli.restart import machine_width, show_restart
from tutti.cli.tables import SHOWN, consoles, read, show_alive, show_kinds, table
from tutti.hardware import Cluster
from tutti.launch.progress import progress
from tutti.plan.explain import mesh_name, seconds, size
from tutti.sim.dryrun import dry_run
from tutti.sim.error_bars import MEMORY, kind_of, spread
from tutti.sim.gantt import save_gantt
from tutti.sim.memory_picture import save_memory
from tutti.sim.picture import check_suffix
from tutti.sim.pipeline import PipelineDryRun
from tutti.sim.restart import USUAL, Storage
from tutti.sim.restart import restart as read_again
from tutti.sim.step import DryRun
from tutti.sim.timeline import save_timeline

OVERLAPS = {"auto": None, "yes": True, "no": False}


def dryrun(
    plan: Annotated[Path, tyro.conf.Positional],
    workload: Annotated[Workload, tyro.conf.arg(name="")],
    cluster: str = "",
    level: str = "O2",
    overlap: Literal["auto", "yes", "no"] = "auto",
    timeline: Path | None = None,
    gantt: Path | None = None,
    memory: Path | None = None,
    restart: bool = False,
    before: Path | None = None,
    storage: Storage = USUAL,
) -> None:
    """Simulate a training step under a plan. Needs neither the devices nor memory for the model.

    Lowers the plan to the Program of each device, on fake tensors, and simulates it. Prints time, communication, memory
    and the slowest operators. Give the batch, seq, optimizer, dtype, clip_norm and attention that the plan was made
    for.

    Args:
        plan: A plan saved by `tutti plan --save`.
        cluster: A known device, the number of nodes and of devices per node: h100:16x8, cpu:4; or a JSON file.
            Default: the cluster of the plan.
        level: O0 runs operator by operator, O1 compiles groups of operators, O2 whole layers.
        overlap: Start collectives early, await them late, and order operators to hide them. auto: yes, except on CPUs,
            which compute and communicate on the same cores.
        timeline: Write a trace for https://ui.perfetto.dev to this JSON file.
        gantt: Draw the step to this .svg, .png or .pdf.
        memory: Draw the memory of a device over the step to this .svg, .png or .pdf.
        restart: Also predict a restart from a checkpoint: bytes read, and seconds until the first step is done.
        before: With --restart, the plan that wrote the checkpoint. Default: the same plan.
        storage: With --restart, the speed of the storage.
    """
    check_level(level)
    if not restart and (before or storage != USUAL):
        raise ValueError("--before and --storage apply to a restart only: add --restart")
    for picture in (gantt, memory):
        if picture:
            check_suffix(picture)
    chosen = read(plan)
    if not cluster and not chosen.cluster:
        raise ValueError(f"{plan} names no cluster: add --cluster, for instance --cluster h100:8")
    target = Cluster.parse(cluster or chosen.cluster)
    written, start = read(before) if before else chosen, time.perf_counter()
    console = consoles()[0]
    with progress("reading the model") as tell:
        graph = Captured(workload, tell).graph(chosen.accumulate, chosen.variant)
        run = dry_run(graph, chosen, target, level, overlaps=OVERLAPS[overlap], progress=tell)
        planned = time.perf_counter() - start
        again = read_again(graph, chosen, machine_width(target), written, storage) if restart else None
        tell("writing")
        if timeline:
            save_timeline(run, timeline)
        if gantt:
            save_gantt(run, gantt)
        if memory:
            save_memory(run, memory)
    if chosen.graph and chosen.graph != graph.fingerprint:
        console.print("the plan was made for another step: another model, batch, seq, dtype or optimizer")
    console.print(f"plan {chosen.name or plan} at {level} on {target}: {mesh_name(chosen.mesh)}")
    if again:
        show_restart(again, run.seconds, planned, console)
    else:
        _show(run, console)
    for file in (timeline, gantt, memory):
        if file:
            console.print(f"saved {file}")


def _show(run: DryRun, console: Console) -> None:
    """Print time, communication, memory and operators as tables."""
    memory, communication = run.memory, run.communication()
    predicted = run.prediction()
    exposed, carried = predicted.communication_seconds, predicted.transfer_seconds
    device = run.cluster.device
    off = spread(kind_of(run), run.cluster)
    console.print(f"step       {seconds(run.seconds)}{off}: {seconds(run.compute)} computing, "
                  f"{seconds(exposed)} waiting for communication"
                  + (f", {seconds(carried)} for transfers between tiers" if carried else "")
                  + (f", {seconds(run.bubble)} for the pipeline" if run.bubble else ""))  # fmt: skip
    each = run.peak / run.cluster.size
    console.print(f"of peak    {100 * run.fraction_of_peak:.1f} %: {run.flops:.3g} FLOP a step, "
                  f"{run.cluster.size} devices of {each:.3g} FLOP/s")  # fmt: skip
    over = "" if memory.peak <= device.memory else f": more than the {size(device.memory)} of the device"
    console.print(f"memory     {size(memory.peak)}{spread(MEMORY, run.cluster)} per device at the peak{over}")
    for tier, count in memory.tiers.items():
        has, more = device.outside.memory, ""
        if count > has:
            more = f": more than the {size(has)} available"
        console.print(f"{tier:10} {size(count)} for each device{more}")
    if communication:
        shown = table(
            "communication and transfers" if memory.tiers else "communication", "number", "sent", "under way", "exposed"
        )
        for (kind, axis), (count, sent, took, waited) in sorted(communication.items(), key=lambda item: -item[1][2]):
            shown.add_row(f"{kind} over {axis}", f"{count:,}", size(sent), seconds(took), seconds(waited))
        console.print(shown)
    show_kinds(memory, console)
    if isinstance(run, PipelineDryRun):
        shown = table("memory by device", "bytes")
        for device, memory_of_device in enumerate(run.memories):
            shown.add_row(f"device {device}", size(memory_of_device.peak))
        console.print(shown)
    show_alive(memory, console)
    shown = table("slowest operators", "number", "seconds", "share")
    for label, _, count, took in run.slowest()[:SHOWN]:
        shown.add_row(label, f"{count:,}", seconds(took), f"{100 * took / run.seconds:.1f} %")
    console.print(shown)
