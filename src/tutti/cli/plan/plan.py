"""The verb `tutti plan`: plan a model for any cluster; show, explain and compare plans."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import tyro

from tutti.analysis.passes import check_level
from tutti.cli.plan.answer import check_amounts, in_float32, ranking, summary
from tutti.cli.plan.report import page as report_page
from tutti.cli.plan.stopwatch import Stopwatch
from tutti.cli.plan.workload import Captured, Workload
from tutti.cli.tables import consoles, read, show_alive, show_kinds
from tutti.config.options import call_with_options
from tutti.hardware import Cluster
from tutti.hardware.altered import altered, without_effect
from tutti.launch.progress import narrated
from tutti.plan.explain import counted, seconds, size
from tutti.plan.layouts.layout import Mesh, devices
from tutti.plan.layouts.pin import parse_pin
from tutti.plan.plan import Plan
from tutti.plan.search.counterfactual import otherwise
from tutti.plan.search.microbatches import named
from tutti.plan.search.reasons import TooLarge, difference
from tutti.plan.search.search import BUDGET, Search, check_mesh
from tutti.plan.textbook import parse_name, refined
from tutti.sim.dryrun import dry_run
from tutti.sim.error_bars import MEMORY, error_bar, kind_of
from tutti.sim.memory_picture import save_memory
from tutti.sim.picture import check_suffix
from tutti.sim.planning import Simulator

SECONDS = 90.0  # of a search


def plan(argv: list[str]) -> None:
    """`tutti plan --model ... --cluster ...`, `tutti plan show FILE`, `tutti plan --compare FILE FILE`,
    `tutti plan --compare CLUSTER CLUSTER --model ...`, `tutti plan --sweep CLUSTERS --model ...`,
    `tutti plan --serve MODEL --cluster ...`, `tutti plan --rl CONFIG --cluster ...`, and `tutti plan --align ppo
    --model MODEL --cluster ...`."""
    if argv[:1] == ["show"]:
        call_with_options(show, "tutti plan show", argv[1:])
    elif argv[:1] == ["--compare"] and any(word.partition("=")[0] in ("--model", "-h", "--help") for word in argv):
        from tutti.cli.plan.compare import plan_compare

        call_with_options(plan_compare, "tutti plan --compare", argv[1:])
    elif argv[:1] == ["--compare"]:
        call_with_options(compare, "tutti plan --compare", argv[1:])
    elif argv[:1] == ["--serve"]:
        from tutti.cli.plan.serve import plan_serve

        call_with_options(plan_serve, "tutti plan --serve", argv[1:])
    elif argv[:1] == ["--sweep"]:
        from tutti.cli.plan.sweep import plan_sweep

        call_with_options(plan_sweep, "tutti plan --sweep", argv[1:])
    elif argv[:1] == ["--rl"]:
        from tutti.cli.plan.rl import plan_rl

        call_with_options(plan_rl, "tutti plan --rl", argv[1:])
    elif argv[:1] == ["--align"]:
        from tutti.cli.plan.align import plan_align

        call_with_options(plan_align, "tutti plan --align", argv[1:])
    else:
        call_with_options(partial(make, command=shlex.join(["tutti", "plan", *argv])), "tutti plan", argv)


def make(
    workload: Annotated[Workload, tyro.conf.arg(name="")],
    cluster: str,
    plan: str = "auto",
    top: int = 5,
    pin: tuple[str, ...] = (),
    mesh: str = "",
    accumulate: int | Literal["auto"] = "auto",
    recompute: tuple[str, ...] = (),
    level: str = "O2",
    budget: float = SECONDS,
    what_if: str = "",
    tokens: float = 0.0,
    price: float = 0.0,
    why: str = "",
    memory: Path | None = None,
    report: Path | None = None,
    save: Path | None = None,
    command: tyro.conf.Suppress[str] = "",
) -> None:
    """Plan the training of a model for a cluster. Needs neither the devices nor memory for the model.

    Prints the fastest plans that fit into memory, each simulated, and explains the first: why it won, and what the
    runner-up would cost. `tutti plan show FILE` explains a saved plan. `tutti plan --compare h100:8x8 h200:8x8 --model
    ...` plans for two clusters and says where the difference comes from, or compares two saved plans (`tutti plan
    --compare --help`). `tutti plan --sweep h100:1x8..64x8 --model ...` draws how a model scales (`tutti plan --sweep
    --help`). `tutti plan --serve FOLDER --cluster ...` plans how to serve a model (`tutti plan --serve --help`),
    `tutti plan --rl CONFIG --cluster ...` where the fragments of an agent's training run (`tutti plan --rl --help`),
    `tutti plan --align ppo --model FOLDER --cluster ...` where completions are written (`tutti plan --align --help`).

    Args:
        cluster: A known device (cpu, v100-32, v100-32-sxm3, a100-40, a100-80, h100, h200, h800, b200, gb200, l40s,
            rtx-4090, mi300x, ascend-910, ascend-910b), the number of nodes and of devices per node: h100:16x8,
            a100-80:8, gb200:4x72, cpu:4; h100:64/3x16x8 (64 pods of 16 nodes, the spine
            oversubscribed three times); or a JSON file.
        plan: Explain this plan instead of the fastest: dp, tp4, zero3, dp2xtp4, tp8xzero1, ...; pipelines: pp4xtp2,
            pp4-gpipe, pp4-interleaved2, pp4-zb-h1, pp2-zb-vxdp2, pp4-dualpipev, pp4-auto, pp4-seq1f1b4; context and
            expert parallelism: dp2xcp4, dp2xep4, experts over 8 devices of dp x tp: dp8xtp2xexperts8; ZeRO over 8 of
            64: dp64xzero3xshard8; choices without an axis: tp8xspxrecompute-attentionxfp32sumsxfp8 (residuals along the
            sequence, recomputation of attention, sums of gradients in float32, products in FP8; or mxfp8, nvfp4); or
            the path of a saved plan, *.json.
        top: Number of plans to show.
        pin: Fix the layout of parameters and search the rest:
            'model.layers.*.mlp.up_proj.weight=tp:S0' (shard dim 0 over axis tp) or '...=tp:R' (replicate).
        mesh: Fix the mesh axes, outermost first: dp=4,tp=2. With experts=8, axes on which experts can be spread over 8
            of the devices of dp x tp: dp=8,tp=2,experts=8.
        accumulate: Microbatches per update. auto: searched; with --plan, the fastest by estimate of those that fit.
        recompute: With --plan, what the backward pass recomputes: layers (activations inside layers), attention, names
            of operators (silu, '*norm*') or labels of a plan. In a plan's name: tp8xrecompute-attention.
        level: O0 runs operator by operator, O1 compiles groups of operators, O2 whole layers.
        budget: Seconds, once the model is captured, after which the search ends with the best plan so far. If none fits
            yet, it goes on while one may. It also ends by itself, after 20 nominal seconds of work (about as many on
            an idle core), or in proportion more with a budget above 90.
        what_if: Other figures of the cluster, as factors or amounts: link=2x, memory=141GiB, network=100GB/s,
            peak=1.5x, power=500W, node (links inside a node), bandwidth (of memory), overhead (of a launch),
            attention=flash2 (the kernel, on an H100); separated by commas. Also prints what the plan takes without
            them, and compares the plan that is best without them.
        tokens: Also print how long training on so many tokens takes (rows, for a model without tokens; tokens of the
            encoder, for one with a decoder, too): 1e12.
        price: Price of a device hour: also print what these tokens cost. Energy is printed for devices whose power is
            known.
        why: Also print the cost of other layouts of this parameter: model.layers.*.mlp.up_proj.weight.
        memory: Print the tensors alive at a device's peak, and draw its memory over the step to this .svg, .png or
            .pdf.
        report: Write the whole answer as a page to this .html file, to send to others: figures, reasons, timeline and
            memory. It needs no network.
        save: Write the plan to this file, for `tutti.parallelize(..., plan=FILE)` with the same optimizer, clip_norm
            and dtype (fp32_master_weights=True with bfloat16 and --masters).
    """
    check_level(level)
    if memory:
        check_suffix(memory)
    if report and report.suffix not in (".html", ".htm"):
        raise ValueError(f"--report {report}: a page is written, so its name must end in .html")
    for option, file in (("save", save), ("report", report), ("memory", memory)):  # found out before the search
        if file and not file.parent.is_dir():
            raise ValueError(f"--{option} {file}: there is no folder {file.parent}")
    if top < 1 or (accumulate != "auto" and accumulate < 1):
        raise ValueError(f"--top {top}, --accumulate {accumulate}: both must be at least 1")
    if recompute and (plan == "auto" or plan.endswith(".json")):
        raise ValueError("--recompute goes with a plan's name, such as --plan zero3; others decide it")
    if plan != "auto" and mesh:
        raise ValueError(f"plan {plan!r} already fixes the mesh: leave out --mesh or --plan")
    check_amounts(budget, tokens, price)
    unaltered, pins, axes = Cluster.parse(cluster), [parse_pin(text) for text in pin], _mesh(mesh)
    target = altered(unaltered, what_if)
    check_size(plan, axes, target)
    console, progress = consoles()
    with narrated(progress, "reading the model") as tell:
        captured = Captured(workload, tell)
        graph = captured.graph(1 if accumulate == "auto" else accumulate)
        count = 1 if accumulate == "auto" else accumulate
        progress.print(f"captured {len(graph.nodes):,} nodes: {captured.facts.parameters:.3g} parameters, "
                       f"{count * graph.flops:.3g} FLOP a step")  # fmt: skip
        batch = captured.facts.batch
        options = {
            "pins": pins, "mesh": axes or None, "budget": nominal(budget), "progress": tell,
            "accumulate": None if accumulate == "auto" else accumulate, "error": error_bar(MEMORY, target) or 0.0,
        }  # fmt: skip
        usual = None
        if what_if and plan == "auto":  # the best plan without it is compared too
            progress.print(f"searching without {what_if}", markup=False)
            usual = _best_without(
                Search(captured.graph, batch, unaltered, Simulator(level), **options, stop=Stopwatch(budget).past)
            )
            progress.print(f"searching with {what_if}", markup=False)
        search = Search(captured.graph, batch, target, Simulator(level), **options,
                        stop=Stopwatch(budget).past, better=lambda plan: tell.result(_brief(plan)))  # fmt: skip
        compared = search.judgement(usual) if usual else None
        work = captured.facts.work
        if plan != "auto":
            best = _asked(plan, search, recompute)
            ranked = [best]
        else:
            best = search.best(top)
            ranked = [best, *search.in_order()[1:]]
            cut_short = not search.affords(best.accumulate)
        others = otherwise(search, best, why) if why else []
        best_graph = captured.graph(best.accumulate, best.variant)
        if what_if:
            tell(f"simulating {best.name} without {what_if}")
        before = search.judge(best_graph, best, unaltered) if what_if else None
        if memory or report:
            tell("drawing")
            run = dry_run(best_graph, best, target, level)
        if memory:
            save_memory(run, memory)
        if report:
            page = report_page(command, captured, search, ranked[:top], run, tokens, price)
            report.write_text(page, "utf-8")
    off = error_bar(kind_of(graph), target)
    lines = summary(search, best, work, off, tokens, price)
    lines += in_float32(captured.facts.dtype, target, ":" not in workload.model)
    if off:
        lines.append("±                the error that two thirds of published runs on such devices stay within")
    print("\n".join(lines))
    if plan == "auto":
        shown = ranked[:top]
        if compared and all(compared is not p for p in [search.in_order()[0], *shown]):
            shown.append(compared)
        console.print(ranking(search, shown, work, console), crop=False)
        if len(ranked) > len(shown):
            console.print(f"and {counted(len(ranked) - len(shown), 'other')} simulated")
        if cut_short:
            print(f"the search ended because its budget was spent; --budget {2 * max(budget, SECONDS):g} allows twice "
                  "the work")  # fmt: skip
    print(best.explain())
    if before:
        for line in without_effect(unaltered, what_if):
            print(line)
        print(f"without {what_if}: this plan takes {difference(best, best.replace(prediction=before))}")
    if usual:
        print(f"without {what_if}, the best plan is {usual.name}: {_brief(usual).partition(': ')[2]}")
    if memory:
        show_kinds(run.memory, console)
        show_alive(run.memory, console)
        print(f"saved {memory}")
    for label, layout, other in others:
        print(f"were {label} {layout}: {difference(best, other)}{'' if search.fits(other) else ', which does not fit'}")
    if report:
        print(f"saved {report}")
    if save:
        best.save(save)
        print(f"saved {save}")


def check_size(plan: str, mesh: Mesh, cluster: Cluster) -> None:
    """Raise ValueError if a named plan, a saved one or a mesh is for another number of devices."""
    if plan.endswith(".json"):
        saved = read(Path(plan))
        if devices(saved.mesh) != cluster.size:
            raise ValueError(f"{plan} is for {devices(saved.mesh)} devices, {cluster} has {cluster.size}")
    elif plan != "auto":
        parse_name(plan, cluster.size)
    else:
        check_mesh(mesh, cluster)


def _best_without(search: Search) -> Plan | None:
    """The best plan on the unaltered cluster; None if none fits there."""
    try:
        return search.best()
    except TooLarge:
        return None


def nominal(budget: float) -> float:
    """Nominal seconds of work of a search that may take so many seconds."""
    return BUDGET * max(1.0, budget / SECONDS)


def _asked(name: str, search: Search, recompute: tuple[str, ...] = ()) -> Plan:
    """The plan in a file or of a name."""
    if not name.endswith(".json"):
        return named(search, name, recompute)
    saved = read(Path(name))
    saved.check(search.planner(saved.accumulate, saved.variant).step)
    return search.judgement(saved)


def show(file: Annotated[Path, tyro.conf.Positional]) -> None:
    """Explain a saved plan.

    Args:
        file: A plan saved by `tutti plan --save` or `Plan.save`.
    """
    print(read(file).explain())


def compare(first: Annotated[Path, tyro.conf.Positional], second: Annotated[Path, tyro.conf.Positional]) -> None:
    """Print how two saved plans differ: lines with - are of the first, lines with + of the second."""
    for file in (first, second):
        if not file.exists():
            raise ValueError(f"there is no plan {file}; to compare two clusters, say for which model: add --model")
    a, b = read(first), read(second)
    print("\n".join(a.diff(b)) or "the plans say the same")
    if a.prediction and b.prediction:
        print(f"the second takes {difference(a, b)}")


def _brief(plan: Plan) -> str:
    prediction = plan.predicted
    return f"{plan.name}: {seconds(prediction.step_seconds)} a step, {size(prediction.peak_bytes)}"


def _mesh(text: str) -> dict[str, int]:
    """The mesh of "dp=4,tp=2"."""
    axes: dict[str, int] = {}
    for part in text.split(",") if text else ():
        axis, _, count = part.partition("=")
        if not axis.isidentifier() or not count.isdigit() or int(count) < 1 or axis in axes:
            raise ValueError(f"--mesh {text!r} is no mesh: write its axes, outermost first, as in dp=4,tp=2")
        axes[axis] = int(count)
    return refined(axes)
