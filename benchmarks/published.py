"""Predicted against published: training runs of several sources through the presets of the command line.

The rows are in benchmarks/published_runs/runs.json, with a transformers config for each model. Each is predicted as by
`tutti plan --model CONFIG --cluster CLUSTER --plan PLAN --accumulate N` and `tutti dryrun`: our own Program of the plan
named there, AdamW in bfloat16 with float32 master weights unless a recipe says otherwise, at O2. No constant is fitted
to these or other steps: what kernels reach is from published measurements of kernels (`tutti.hardware.reached`).

The plan is the nearest that has a name, and options follow the source where it states them (`RECIPES`). What a run does
otherwise than our Program counts as error: selective recomputation of every second product, a GPU with less power than
the preset's.

`error_bar` is what two thirds of the rows stay within, by kind. It is what the command line prints beside a prediction
(`tutti.sim.error_bars`). Predictions are cached by row and by the source of this package, so that a run that was
interrupted goes on.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
import tutti
from tutti.cli.plan.workload import Captured, Workload
from tutti.hardware import Cluster, machine
from tutti.hardware.altered import altered
from tutti.plan.planner import Planner
from tutti.plan.textbook import parse_name
from tutti.sim.dryrun import dry_run
from tutti.sim.error_bars import DENSE, EXPERTS, MEMORY, kind_of, within
from tutti.whole_files import write_text

DATA = Path(__file__).parent / "published_runs"
QUICK = ("S4", "M1", "S6")
LEVEL = "O2"
NAMES = {  # plans that have no name in ours: the nearest
    "zero3 with selective recomputation": "zero3xrecompute",
}
SCORES = {"attention": "eager"}  # before fused attention: Megatron-LM of 2021 and 2022
FLASH2 = {
    "what_if": "attention=flash2"
}  # FlashAttention-2 on an H100: runs before PyTorch preferred cuDNN's, FlexAttention
BF16_ADAM = {"optimizer": "adam", "masters": False}  # torch.optim.Adam over the model's own bfloat16 parameters
LORA = {"lora": 16}
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {  # plans and options by row, where the source has a recipe
    # configs/strategy/*.json of SimuMax: zero_state 1, use_fp32_accum_grad, enable_sequence_parallel.
    "S2": ("pp2xdp4xzero1xfp32sums", {}),
    "S4": ("tp8xspxfp32sums", {}),
    "S6": ("ep8xzero1xfp32sums", {}),
    "M6": ("zero3", FLASH2),
    "M8": ("zero3xrecompute", FLASH2),
    "T1": ("zero3xrecompute", FLASH2),
    # torchtitan's tensor parallelism splits norms and the residual stream along the sequence: SequenceParallel in
    # torchtitan/models/llama3/infra/parallelize.py.
    "T3": ("tp8xspxzero3xrecompute", FLASH2),
    # Korthikanti et al. 2022, section 5: selective recomputation is that of the scores. BigScience: Megatron-DeepSpeed.
    "K22": ("tp8xspxrecompute-attention", SCORES),
    "K175": ("pp8-interleaved3xtp8xspxrecompute-attention", SCORES),
    "B1": ("pp12xdp8xtp4xzero1xrecompute", SCORES),
    "B4": ("pp2xdp24xtp8xzero1xrecompute", SCORES),
    # llm_benchmark/qwen/qwen3_moe_30b_te_deepep.yaml of NVIDIA-NeMo/Automodel: FSDP2 over 8 devices, ep_size 8,
    # activation_checkpointing, torch.optim.Adam over the model's own bfloat16 parameters.
    "A3": ("dp8xexperts8xzero3xrecompute", BF16_ADAM),
    # gpt_oss/gptoss_20b_te_deepep.yaml beside it: the same without activation_checkpointing, with FlexAttention.
    "A4": ("dp8xexperts8xzero3", {**BF16_ADAM, **FLASH2}),
    # Megatron-Bridge: sequence parallelism wherever there is TP, distributed optimizer (ZeRO-1).
    "N1": ("zero3xfp8", {}),
    "N2": ("pp8-interleaved8xdp8xcp2xtp8xspxzero1xfp8", {}),
    "N3": ("pp2-interleaved24xdp8xexperts8xzero1xfp8", {}),
    "N4": ("pp16xdp16xexperts8xzero1xmxfp8", {}),
    # deepseek_v3_te_deepep_1024.yaml of November 2025: activation_checkpointing, reshard_after_forward: false.
    "N5": ("pp4-interleaved8xdp256xexperts64xzero2xrecompute", BF16_ADAM),
    # custom_llama3_1_70b_pretrain_benchmark_8nodes.yaml: activation_checkpointing, FusedAdam without masters.
    "N6": ("dp32xcp2xzero3xrecompute", {"masters": False}),
    # DualPipe on 16 devices is DualPipeV on 8 with twice the data parallelism (`tutti.plan.pipeline.schedule`).
    "N7": ("pp8-dualpipevxdp256xexperts64xzero1xfp8", {}),
    "N8": ("pp8-interleaved5xdp2xtp4xspxzero1xfp8", {}),
    "N9": ("dp16xexperts16xzero1xfp8", {}),
    "N10": ("single", LORA),
    "N11": ("dp4xtp2xzero3xrecompute", LORA),  # activation_checkpointing: true
    "N12": ("pp4-interleaved20xtp2xspxfp8xreround", LORA),  # the run fit into 80 GB
}
Row = dict[str, Any]


def published(quick: bool = False) -> list[Row]:
    rows: list[Row] = json.loads((DATA / "runs.json").read_text())["rows"]
    return [row for row in rows if row["row"] in QUICK] if quick else rows


def named(row: Row) -> tuple[str, dict[str, Any]]:
    """The plan of a row and the options of its workload."""
    plan: str = row["plan"]
    name, options = RECIPES.get(row["row"]) or (NAMES.get(plan, plan), {})
    return name, dict(options)


def predicted(row: Row) -> Row:
    """The prediction of a row's step."""
    start = time.perf_counter()
    cluster, count = Cluster.parse(row["cluster"]), row["microbatches"]
    name, options = named(row)
    cluster = altered(cluster, options.pop("what_if", ""))
    workload = Workload(str(DATA / row["config"]), row["global_batch"], row["sequence"], **options)
    captured = Captured(workload, lambda _: None)
    variant = parse_name(name, cluster.size).variant
    graph = captured.graph(count, variant)
    simulated = dry_run(graph, Planner(graph, cluster, (), count, variant).named(name), cluster, LEVEL)
    foreseen = simulated.prediction()
    return {
        "plan": name, "kind": kind_of(simulated), "predicted_seconds": foreseen.step_seconds,
        "communication_seconds": foreseen.communication_seconds, "bubble_seconds": simulated.bubble,
        "predicted_gib": foreseen.peak_bytes / 2**30, "fits": foreseen.peak_bytes <= cluster.device.memory,
        "took": round(time.perf_counter() - start, 1),
    }  # fmt: skip


def cached(row: Row, source: str) -> Row:
    """`predicted`, or what an earlier run with the same source found."""
    key = hashlib.sha256(json.dumps([row, named(row), source]).encode()).hexdigest()[:24]
    file = machine.FOLDER / "published" / f"{key}.json"
    if not file.is_file():
        write_text(file, json.dumps(predicted(row)))
    return json.loads(file.read_text())


def source() -> str:
    """A hash of this package's source: other prices give other predictions."""
    digest = hashlib.sha256()
    for file in sorted(Path(tutti.__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def judged(row: Row, prediction: Row) -> Row:
    """A row of the result."""
    seconds, gib = row["step_seconds"], row["peak_gib"]
    return {
        "row": row["row"], "model": Path(row["config"]).stem, "cluster": row["cluster"], "plan": prediction["plan"],
        "kind": prediction["kind"], "published_seconds": seconds,
        "predicted_seconds": round(prediction["predicted_seconds"], 4),
        "error": round(prediction["predicted_seconds"] / seconds - 1, 4),
        "published_gib": gib, "predicted_gib": round(prediction["predicted_gib"], 2),
        "memory_error": round(prediction["predicted_gib"] / gib - 1, 4) if gib else None,
        "fits": prediction["fits"], "source": row["source"].split(" (")[0].split(", ")[0], "took": prediction["took"],
    }  # fmt: skip


def errors(rows: Iterable[Mapping[str, Any]], what: str = "error") -> list[float]:
    return [abs(row[what]) for row in rows if row[what] is not None]


def summary(errors: Sequence[float]) -> dict[str, float]:
    return {
        "rows": len(errors), "mean": round(statistics.mean(errors), 4), "median": round(statistics.median(errors), 4),
        "largest": round(max(errors), 4), "error_bar": round(within(errors), 4),
    }  # fmt: skip


def by_kind(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    of = {kind: errors(row for row in rows if row["kind"] == kind) for kind in (DENSE, EXPERTS)}
    return {kind: summary(values) for kind, values in {**of, MEMORY: errors(rows, "memory_error")}.items() if values}


def by_source(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    of: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        of[row["source"]].append(row)
    yield from of.items()


def run(quick: bool) -> dict[str, Any]:
    rows, same = [], source()
    for row in published(quick):
        rows.append(judged(row, cached(row, same)))
        r = rows[-1]
        memory = "" if r["memory_error"] is None else f", memory {100 * r['memory_error']:+.1f} %"
        harness.say(f"{r['row']:5} {r['model']:16} {r['predicted_seconds']:9.3f} s predicted, "
                    f"{r['published_seconds']:9.3f} published: {100 * r['error']:+6.1f} %{memory}")  # fmt: skip
    kinds = by_kind(rows)
    for kind, figures in kinds.items():
        harness.say(f"{kind}: mean error {100 * figures['mean']:.1f} % of {figures['rows']} rows")
    if not quick:
        draw(rows, harness.RESULTS / "published.svg")
    return {
        "by_kind": kinds,
        "by_source": {name: summary(errors(group)) for name, group in by_source(rows)},
        "too_fast": sum(row["error"] < 0 for row in rows),
        "refused": [row["row"] for row in rows if not row["fits"]],
        "rows": rows,
    }


def draw(rows: Sequence[Row], path: Path) -> None:
    """Predicted over published seconds of each row, with the error bar of its kind."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "tutti"
    figure, axes = pyplot.subplots(figsize=(8, 3))
    bars, colors, place = by_kind(rows), {DENSE: "#3b6ea5", EXPERTS: "#c07830"}, 0
    names: list[str] = []
    axes.axhline(1.0, color="#9aa7b4", linewidth=1)
    for kind, color in colors.items():
        those = [row for _, group in by_source(rows) for row in group if row["kind"] == kind]
        at = range(place, place + len(those))
        ratios = [1 + row["error"] for row in those]
        bar = [ratio * bars[kind]["error_bar"] for ratio in ratios] if those else []
        axes.errorbar(list(at), ratios, yerr=bar, fmt="o", color=color, capsize=3, label=kind)
        names += [row["row"] for row in those]
        place += len(those)
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="predicted / published time", xlabel="row of published_runs/runs.json")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    path.write_text("".join(f"{line.rstrip()}\n" for line in path.read_text().splitlines()))


if __name__ == "__main__":
    harness.main(run, __file__, packages=("transformers",))
