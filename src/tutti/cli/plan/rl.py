"""`tutti plan --rl`: where acting and learning of an agent run."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import tyro

from tutti.cli.tables import consoles, table
from tutti.hardware import PRESETS, Cluster
from tutti.hardware.device import Device
from tutti.launch.progress import progress
from tutti.rl.placement import links
from tutti.rl.placement.forecast import OLDER, Costs, Forecast, chosen, forecasts, on_device
from tutti.rl.placement.fragments import costs
from tutti.rl.run import RunConfig, options_of, parsed
from tutti.sim.picture import check_suffix


def plan_rl(
    config: Annotated[str, tyro.conf.Positional],
    cluster: str = "auto",
    ranks: int = 4,
    level: str | None = None,
    option: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = (),
    top: int = 12,
    fresh: bool = False,
    picture: Path | None = None,
    save: Path | None = None,
) -> None:
    """Predict how fast an agent trains under each placement, and choose one.

    The fragments of the algorithm (a rollout, learning, stepping environments) are measured on this machine for some
    seconds each, and so are messages between processes; `docs/guide/rl-placements.md` says what is assumed. `tutti rl
    train CONFIG --plan FILE` runs what --save writes.

    Args:
        config: A TOML file, or a preset such as ppo-cartpole, as for `tutti rl train`.
        cluster: auto is this machine, whose ranks share its cores. Else devices that each run one rank, such as cpu:64
            (cores like those of this machine) or h100:8x8; links are those of the preset.
        ranks: Most ranks on this machine. A cluster has one for each device.
        level: Instead of the config's: O2, O0 or eager. Compiling fragments takes minutes for the first time.
        option: An option of the algorithm, as in `--option n_envs=256`; may be repeated.
        top: Placements to print.
        fresh: Measure fragments again.
        picture: Draw the throughput of each placement over the number of devices to this .svg, .png or .pdf.
        save: Write the choice, and what was predicted, to this JSON file.
    """
    if ranks < 1 or top < 1:
        raise ValueError(f"--ranks {ranks}, --top {top}: both must be at least 1")
    if picture:
        check_suffix(picture)
    run = RunConfig.of(config)
    run = replace(run, level=level or run.level, options={**run.options, **dict(map(parsed, option))})
    target = None if cluster == "auto" else Cluster.parse(cluster)
    remote = target is not None and not target.device.name.startswith("cpu")
    console = consoles()[0]
    with progress("measuring messages") as tell:
        machine = links.this_machine(ranks, tell)
        measured = costs(run.algorithm, run.env, options_of(run), "eager" if remote else run.level, tell,
                      fresh=fresh)  # fmt: skip
    notes = list(machine.notes)
    if target is not None:
        machine = links.of_cluster(target, machine)
        notes = [f"fragments: measured on a core of this machine, level {measured.level}", *machine.notes]
        if remote:
            measured, note = _scaled(measured, target.device)
            notes.append(note)
    ranked = forecasts(measured, machine)
    best = chosen(ranked)
    console.print(_ranking(ranked[:top], best))
    print(why(ranked, best))
    for placement, error in measured.refused.items():
        print(f"not possible: {placement}: {error}")
    print(f"on {machine.name}: {'; '.join(notes)}")
    if picture:
        draw(ranked, picture, f"{run.algorithm} on {run.env}, n_envs {measured.n_envs}, {machine.name}")
        print(f"saved {picture}")
    if save:
        rows = [{**asdict(x.place), "steps_per_second": round(x.rate, 1)} for x in ranked]
        content = {"place": asdict(best.place), "cluster": cluster, "predicted": rows}
        save.write_text(json.dumps(content, indent=2) + "\n")
        print(f"saved {save}")


def why(ranked: list[Forecast], best: Forecast) -> str:
    """The choice, the runner-up, and what they are worth."""
    fused = next(x for x in ranked if x.place.placement == "fused")
    said = f"chosen: {best.place}, {best.rate:,.0f} steps/s, {best.rate / fused.rate:.2f} x fused; "
    said += f"most of it is {best.bottleneck}"
    others = [x for x in ranked if x.place != best.place]
    if others:
        said += f"\nrunner-up: {others[0].place}, {others[0].rate:,.0f} steps/s"
        if others[0].rate > best.rate:
            older = others[0].place.placement in OLDER
            said += (
                ", which learns from older policies" if older else ", no faster as far as predictions go, on more ranks"
            )
    if best.place.placement in OLDER:
        same = next(x for x in ranked if x.place.placement not in OLDER)
        said += f"\nof those that learn from the newest policy: {same.place}, {same.rate:,.0f} steps/s"
    return said


def _ranking(ranked: list[Forecast], best: Forecast):
    shown = table("placement", "ranks", "processes", "steps/s", "iteration, ms", "acting", "learning", "messages",
                  "waiting", "bottleneck", left=("bottleneck",))  # fmt: skip
    for x in ranked:
        parts = [f"{1e3 * part:.1f}" for part in (x.seconds, x.act, x.learn, x.messages, x.waiting)]
        name = f"{x.place.placement}{' (chosen)' if x is best else ''}"
        shown.add_row(name, str(x.place.ranks), str(x.place.processes), f"{x.rate:,.0f}", *parts, x.bottleneck)
    return shown


def _scaled(measured: Costs, device: Device) -> tuple[Costs, str]:
    """The costs on another device, and what is assumed."""
    core = PRESETS["cpu"].device
    launches = device.overhead / core.overhead
    numbers = 1 / min(device.rate("float32") / core.rate("float32"), device.bandwidth / core.bandwidth)
    note = (
        f"fragments on a {device.name} are extrapolated, not measured: what does not grow with n_envs is launches, "
        f"{launches:.2g} times as long; what does is {1 / numbers:.0f} times as fast, the smaller ratio of FLOP/s and "
        "bandwidth; environments of the host stay on cores like this machine's, one for each device"
    )
    return on_device(measured, launches, numbers), note


def draw(ranked: list[Forecast], to: Path, title: str) -> None:
    """Throughput over devices, a line for each placement whose ranks have a process each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    fused = next(x for x in ranked if x.place.placement == "fused")
    for kind in dict.fromkeys(x.place.placement for x in ranked):
        own = {x.place.ranks: x.rate for x in ranked if x.place.placement == kind
               and (x.place.processes == x.place.ranks or kind == "environments")}  # fmt: skip
        if kind != "fused" and own:
            points = sorted({1: fused.rate, **own}.items())
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=kind)
    axes.axhline(fused.rate, color="gray", linewidth=1, linestyle="--", label="fused, 1 device")
    axes.set(xscale="log", yscale="log", xlabel="devices", ylabel="steps of environments per second", title=title)
    axes.set_xscale("log", base=2)
    axes.legend()
    figure.savefig(to)
