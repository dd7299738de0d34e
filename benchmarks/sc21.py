"""Predicted against SC'21: the ten end-to-end runs of Megatron-LM on 32 to 3072 A100s.

D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (SC'21,
arXiv 2104.04473), table 1: GPT models of 1.7 to 1008 billion parameters, sequences of 2048 tokens, a vocabulary of
51,200, mixed precision, all activations recomputed. What the table does not print (microbatches, chunks of the
interleaved schedule, which data parallelism) is in examples/sc21/run_table_1.sh of NVIDIA/Megatron-LM.

What is simulated is our own Program: a GPT of transformers, captured, lowered under the textbook plan with Megatron's
layouts (`as_megatron`) and priced operator by operator at O2 on `a100-80`. A run without a pipeline is the whole model;
of a pipeline it is one stage, with embedding and head. What our Programs do not do yet is added in closed form, and
each has its own line in the result:

- `recomputed`: the forward pass of the layers once more, its all-reduces included, as simulated.
- `dropout`: the model is captured without, since Megatron's kernels keep a byte for each element and ours draw anew.
  Bytes of each pass: of attention's scores 5 an element (read, write, mask), of the two of hidden size 1 (the mask).
- `bubble`, `sends`, `tied`: our (interleaved) 1F1B schedule on a clock, with all stages like the simulated one and the
  head in the last; sends are synchronous, scattered over tensor-parallel ranks and gathered behind; the all-reduce of
  the tied embedding between first and last stage.
- `reduced`: gradients over data parallelism in bfloat16, simulated. The runs of DDP=torch hide them behind the last
  microbatch's backward pass, those of DDP=local do not.

Constants: the share of the peak that matrix products reach and that of memory's bandwidth, chosen on three of the ten
runs (`FITTED`: without parallelism inside the model, with tensor parallelism, with a pipeline) by least squares; all
else is of the preset. The other seven runs judge. TFLOP/s are the paper's: its formula counts recomputation as work.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from math import log
from pathlib import Path
from typing import Any

import torch
import transformers
from scipy.optimize import least_squares

import harness
import tutti
from tutti.analysis.prices import Prices
from tutti.hardware import Cluster
from tutti.ir.step_graph import StepGraph
from tutti.plan.layouts.choice import Choice
from tutti.plan.layouts.layout import Layout, Partial
from tutti.plan.pipeline.schedule import schedule_of
from tutti.plan.pipeline.slots import makespan
from tutti.plan.plan import Plan
from tutti.plan.planner import Planner
from tutti.sim.dryrun import dry_run
from tutti.sim.step import RANK, DryRun
from tutti.sim.tasks import COMPUTE, tasks_of

transformers.logging.set_verbosity_error()

TOKENS, VOCABULARY, NODE, HALF = 2048, 51200, 8, 2  # of a sequence; GPUs of a node; bytes of a number
SHALLOW = 2  # layers that --quick simulates; the others are taken to be like them


@dataclass(frozen=True)
class Run:
    """A line of table 1 and of run_table_1.sh.

    chunks: chunks of layers that a stage has, v of the interleaved schedule. hides: DDP=torch, which reduces gradients
    during the backward pass. published: TFLOP/s of a GPU. petaflops: PFLOP/s of all.
    """

    billions: float
    heads: int
    hidden: int
    layers: int
    tp: int
    pp: int
    devices: int
    batch: int
    microbatch: int
    chunks: int
    hides: bool
    published: int
    petaflops: float

    @property
    def dp(self) -> int:
        return self.devices // (self.tp * self.pp)

    @property
    def microbatches(self) -> int:
        return self.batch // (self.dp * self.microbatch)

    @property
    def stage(self) -> int:
        """Layers of a stage."""
        return self.layers // self.pp

    @property
    def parameters(self) -> float:
        """The paper's equation (2)."""
        deep, h = self.layers, self.hidden
        return 12 * deep * h * h * (1 + 13 / (12 * h) + (VOCABULARY + TOKENS) / (12 * deep * h))

    @property
    def flops(self) -> float:
        """FLOPs of a step, recomputation included: the paper's equation (3)."""
        deep, h = self.layers, self.hidden
        return 96 * self.batch * TOKENS * deep * h * h * (1 + TOKENS / (6 * h) + VOCABULARY / (16 * deep * h))

    def weights(self, layers: int) -> float:
        """Parameters of a model with so many layers, but for what is small."""
        return 12 * layers * self.hidden**2 + VOCABULARY * self.hidden


RUNS = (
    Run(1.7, 24, 2304, 24, 1, 1, 32, 512, 16, 1, True, 137, 4.4),
    Run(3.6, 32, 3072, 30, 2, 1, 64, 512, 16, 1, True, 138, 8.8),
    Run(7.5, 32, 4096, 36, 4, 1, 128, 512, 16, 1, True, 142, 18.2),
    Run(18.4, 48, 6144, 40, 8, 1, 256, 1024, 8, 1, True, 135, 34.6),
    Run(39.1, 64, 8192, 48, 8, 2, 512, 1536, 4, 1, False, 138, 70.8),
    Run(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 2, 3, False, 140, 143.8),
    Run(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 2, 2, False, 148, 227.1),
    Run(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 1, 2, False, 155, 297.4),
    Run(529.6, 128, 20480, 105, 8, 35, 2520, 2520, 1, 3, False, 163, 410.2),
    Run(1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 1, 1, False, 163, 502.0),
)
FITTED = (RUNS[0], RUNS[3], RUNS[6])


@dataclass(frozen=True)
class Shares:
    """What is fitted: of the peak that matrix products reach, of the memory's bandwidth that all else does."""

    matmul: float
    memory: float

    def of(self, cluster: Cluster) -> Cluster:
        """The same cluster with devices that reach so much."""
        device = cluster.device
        efficiency = {**device.efficiency, "bfloat16": self.matmul, "memory": self.memory}
        return Cluster(replace(device, efficiency=efficiency), cluster.levels)


def gpt(run: Run, layers: int) -> StepGraph:
    """A microbatch of the run's model with so many layers, its attention not fused as in 2021, its embeddings tied."""
    options: dict[str, Any] = dict(
        n_embd=run.hidden, n_layer=layers, n_head=run.heads, vocab_size=VOCABULARY, n_positions=TOKENS,
        activation_function="gelu_pytorch_tanh", attn_implementation="eager", use_cache=False, loss_type="ForCausalLM",
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = network(transformers.GPT2Config(**options)).to(torch.bfloat16).train()
        ids = torch.empty(run.microbatch * run.dp, TOKENS, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return tutti.capture(model, {"input_ids": ids, "labels": ids}, optimizer, fp32_master_weights=True, clip_norm=1.0)


def network(config: transformers.GPT2Config) -> torch.nn.Module:
    return transformers.GPT2LMHeadModel(config)


LAYER = r"transformer\.h\.[^./]+"
# What Megatron-LM computes whole on every tensor-parallel rank (before its sequence parallelism of 2022): the residual
# stream, its norms, and the results of matrix products that are all-reduced into it.
WHOLE = re.compile(
    rf"transformer(\.ln_f)?/(for|back)ward/|{LAYER}(\.ln_\d)?/(for|back)ward/|lm_head/backward/reshape\.1$|"
    rf"{LAYER}\.\w+\.c_proj/(forward/reshape\.1|backward/(reshape|sum\.dim_IntList|reshape\.1))$|"
    rf"{LAYER}\.\w+\.c_(fc|attn)/backward/reshape\.2$"
)
LOOKUPS = ("transformer.wte/forward/embedding", "transformer.wte/backward/embedding_dense_backward")  # rows are split


def as_megatron(plan: Plan) -> Plan:
    """The textbook plan with the layouts of Megatron-LM in 2021: all-reduces around whole residuals."""
    operators = {
        label: {axis: choice for axis, choice in choices.items() if axis != "tp" or not WHOLE.match(label)}
        for label, choices in plan.operators.items()
    }
    operators |= {label: {**operators[label], "tp": Choice("v")} for label in LOOKUPS if "tp" in plan.mesh}
    inputs = {
        label: Layout.of({a: p for a, p in dict(at.placements).items() if a != "tp" or not isinstance(p, Partial)})
        for label, at in plan.inputs.items()
    }
    return plan.replace(operators=operators, inputs=inputs)


def plan_of(run: Run, graph: StepGraph, cluster: Cluster) -> Plan:
    pins = [tutti.pin("transformer.wte.weight", dim=0, axis="tp")] if run.tp > 1 else []
    sizes = {"dp": run.dp, "tp": run.tp}
    name = "x".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1)
    return as_megatron(Planner(graph, cluster, pins, accumulate=run.microbatches).named(name))


def a100s(devices: int) -> Cluster:
    """Equal ones: that a step waits for the slowest is in the fitted share."""
    cluster = Cluster.parse(f"a100-80:{devices // NODE}x{NODE}")
    return replace(cluster, device=replace(cluster.device, varies=0.0))


@dataclass(frozen=True)
class Stage:
    """One stage of a run, or the whole model where there is no pipeline, simulated with so many of its layers."""

    run: Run
    layers: int

    @cached_property
    def dry_run_of_stage(self) -> DryRun:
        run, cluster = self.run, a100s(self.run.dp * self.run.tp)  # of one stage: the others are like it
        graph = gpt(run, self.layers)
        return dry_run(graph, plan_of(run, graph, cluster), cluster, "O2", overlaps=False)

    def seconds(self, shares: Shares | None = None) -> dict[str, float]:
        """Seconds of what the simulated Programs do, of all layers of the stage.

        `forward` and `backward` of the layers in a microbatch, communication included (that alone: `communication`);
        `ends`: embedding, head and loss, both passes; `sums`: adding a microbatch's gradients; `update`, and `reduce`:
        gradients over `dp`, once a step.
        """
        cluster = shares.of(self.dry_run_of_stage.cluster) if shares else self.dry_run_of_stage.cluster
        deeper = self.run.stage / self.layers
        larger = self.run.weights(self.run.stage) / self.run.weights(self.layers)
        seconds: dict[str, float] = defaultdict(float)
        for part in self.dry_run_of_stage.parts:
            for task in tasks_of(part.simulation.replays[RANK], Prices(cluster, part.program)):
                if task.name.startswith("copy for "):  # Megatron's collectives are in place
                    continue
                if task.phase == "update" and part.runs > 1 and task.stream == COMPUTE:
                    seconds["sums"] += (deeper if re.match(LAYER, task.name) else 1) * task.seconds
                elif task.phase == "update":
                    seconds["reduce" if task.stream == "dp" else "update"] += larger * task.seconds
                elif re.match(LAYER, task.name):
                    seconds[task.phase] += deeper * task.seconds
                    seconds["communication"] += deeper * task.seconds * (task.stream != COMPUTE)
                else:
                    seconds["ends"] += task.seconds
        return dict(seconds)


def step(stage: Stage, shares: Shares | None = None) -> dict[str, float]:
    """Seconds of a step of the run, by what takes them; their sum is the step.

    The last stage of a pipeline has the head too, and the others wait for it: `ends` counts for each microbatch.
    """
    run, once = stage.run, defaultdict(float, stage.seconds(shares))
    cluster = shares.of(a100s(run.devices)) if shares else a100s(run.devices)
    dropout = dropped(run, cluster)
    layers = 2 * once["forward"] + once["backward"] + 3 * dropout
    m, behind = run.microbatches, once["backward"] + once["forward"] + dropout
    parts = {
        "forward": m * once["forward"],
        "backward": m * once["backward"],
        "recomputed": m * once["forward"],
        "dropout": m * 3 * dropout,
        "ends": m * once["ends"],
        "sums": m * once["sums"],
        "update": once["update"],
        "reduced": max(0.0, once["reduce"] - behind) if run.hides else once["reduce"],
    }
    forward = once["forward"] + dropout
    return parts | pipelined(run, forward, layers - forward, once["ends"], cluster)


def dropped(run: Run, cluster: Cluster) -> float:
    """Seconds of dropout in a pass over a stage's layers, of one microbatch."""
    scores = run.microbatch * run.heads // run.tp * TOKENS**2
    hidden = run.microbatch * TOKENS * run.hidden
    move = cluster.device.stream_seconds
    return run.stage * (move((2 * HALF + 1) * scores, "add", "bfloat16") + 2 * move(hidden, "add", "bfloat16"))


def pipelined(run: Run, forward: float, backward: float, ends: float, cluster: Cluster) -> dict[str, float]:
    """What a pipeline adds to the work of its last device, which works longest.

    forward, backward: seconds of the passes over a device's layers, with what is recomputed, of one microbatch. ends:
    of both passes over the head. A chunk's result is sent forward and its gradient back, and both stages wait (the
    paper's sections 2.2 and 4.1).
    """
    if run.pp == 1:
        return {}
    size, apart = HALF * run.microbatch * TOKENS * run.hidden, run.dp * run.tp
    send = cluster.time("ppermute", size / run.tp, apart, run.pp)
    gather = cluster.time("all_gather", size * (run.tp - 1) / run.tp, 1, run.tp)
    tied = cluster.time("all_reduce", HALF * VOCABULARY * run.hidden / run.tp, apart, 2)
    stages = run.pp * run.chunks
    schedule = schedule_of("interleaved" if run.chunks > 1 else "1f1b", run.pp, stages, run.microbatches)
    chunk = (forward / run.chunks + send + gather, backward / run.chunks + send + gather, 0.0, 0.0)
    last = (chunk[0] + ends / 3, chunk[1] + ends * 2 / 3, 0.0, 0.0)  # a backward pass is two products for each of one
    sends = 2 * run.microbatches * run.chunks * (send + gather)
    work = run.microbatches * (forward + backward + ends) + sends
    return {"bubble": makespan(schedule, [chunk] * (stages - 1) + [last]) - work, "sends": sends, "tied": tied}


def teraflops(stage: Stage, shares: Shares | None = None) -> float:
    """TFLOP/s of each GPU, as the paper counts them."""
    return stage.run.flops / (stage.run.devices * sum(step(stage, shares).values())) / 1e12


def fit(stages: Mapping[Run, Stage], runs: Sequence[Run] = FITTED) -> Shares:
    """The shares with the least squares of relative errors on the runs that are for fitting."""

    def errors(shares: Sequence[float]) -> list[float]:
        return [log(teraflops(stages[run], Shares(*shares)) / run.published) for run in runs]

    solution = least_squares(errors, (0.75, 0.75), bounds=(0.3, 1.0), diff_step=1e-3)
    return Shares(*map(float, solution.x))


def table(stages: Mapping[Run, Stage], shares: Shares | None) -> list[dict[str, Any]]:
    """A row for each run: predicted and published TFLOP/s, and what shares of the step are."""
    rows = []
    for run, stage in stages.items():
        parts, rate = step(stage, shares), teraflops(stage, shares)
        seconds = sum(parts.values())
        communication = run.microbatches * stage.seconds(shares).get("communication", 0.0)
        rows.append(
            {
                "billions": run.billions, "devices": run.devices, "tp": run.tp, "pp": run.pp, "dp": run.dp,
                "microbatch": run.microbatch, "microbatches": run.microbatches, "chunks": run.chunks,
                "predicted": round(rate, 1), "published": run.published, "error": round(rate / run.published - 1, 4),
                "fitted": run in FITTED, "step_seconds": round(seconds, 3),
                "published_step_seconds": round(run.flops / (run.petaflops * 1e15), 3),
                "parts": {name: round(part / seconds, 4) for name, part in parts.items()},
                "tp_communication": round(communication / seconds, 4),
            }
        )  # fmt: skip
    return rows


def other_choices(stages: Mapping[Run, Stage]) -> dict[str, float]:
    """Mean errors on seven runs for each choice of the three that are fitted: how much depends on that choice."""
    means = []
    for chosen in combinations(RUNS, len(FITTED)):
        shares = fit(stages, chosen)
        judged = [run for run in RUNS if run not in chosen]
        means.append(statistics.mean(abs(teraflops(stages[run], shares) / run.published - 1) for run in judged))
    return {
        "choices": len(means), "smallest": round(min(means), 4), "median": round(statistics.median(means), 4),
        "largest": round(max(means), 4),
    }  # fmt: skip


def mean_error(rows: Sequence[Mapping[str, Any]], fitted: bool) -> float:
    return round(statistics.mean(abs(row["error"]) for row in rows if row["fitted"] is fitted), 4)


def bus_bandwidth(devices: int, size: float) -> float:
    """Bytes/s that an all-reduce of `size` bytes over all devices reaches, as nccl-tests counts."""
    sent = 2 * (devices - 1) / devices * size
    cluster = a100s(devices) if devices > NODE else Cluster.parse(f"a100-80:{devices}")
    return sent / cluster.time("all_reduce", sent, 1, devices)


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    harness.say(" billions  GPUs  tp  pp  predicted  published   error   (TFLOP/s of a GPU)")
    for r in rows:
        mark = "  fitted" if r["fitted"] else ""
        harness.say(f"{r['billions']:9.1f} {r['devices']:5} {r['tp']:3} {r['pp']:3} {r['predicted']:10.1f} "
                    f"{r['published']:10} {100 * r['error']:+6.1f} %{mark}")  # fmt: skip


def run(quick: bool) -> dict[str, Any]:
    stages = {}
    for each in RUNS:
        stages[each] = Stage(each, min(SHALLOW, each.stage) if quick else each.stage)
        shown = stages[each].dry_run_of_stage.seconds
        harness.say(f"{each.billions} billion: simulated {stages[each].layers} layers, {shown:.2f} s a step of them")
    shares = fit(stages)
    harness.say(f"share of the peak {shares.matmul:.3f}, of the memory's bandwidth {shares.memory:.3f}")
    rows, preset = table(stages, shares), table(stages, None)
    show(rows)
    result: dict[str, Any] = {
        "constants": {"matmul": round(shares.matmul, 4), "memory": round(shares.memory, 4)},
        "mean_error": mean_error(rows, fitted=False), "mean_error_fitted": mean_error(rows, fitted=True),
        "rows": rows,
        "without_fitting": {"errors": [row["error"] for row in preset], "mean_error": mean_error(preset, fitted=False)},
        "bus_bandwidth_gb": {f"{n} GPUs, {size} MiB": round(bus_bandwidth(n, size * 2**20) / 1e9, 1)
                          for n in (NODE, 16 * NODE) for size in (64, 192, 4096)},
    }  # fmt: skip
    harness.say(f"mean error {100 * result['mean_error']:.1f} % on the {len(RUNS) - len(FITTED)} runs not fitted")
    if not quick:
        few = {each: Stage(each, min(SHALLOW, each.stage)) for each in RUNS}  # to price them quickly
        result["other_choices"] = other_choices(few)
        harness.say(f"fitted on any other three runs: mean error {result['other_choices']}")
        result["depth"] = depth_check(stages[RUNS[0]], shares)
        draw(rows, harness.RESULTS / "sc21.svg")
    return result


def depth_check(whole: Stage, shares: Shares) -> dict[str, float]:
    """How far a step scaled up from few layers, as --quick does, is from the whole model's."""
    few = sum(step(Stage(whole.run, SHALLOW), shares).values())
    all_of_them = sum(step(whole, shares).values())
    return {"layers": whole.layers, "scaled": few, "whole": all_of_them, "error": few / all_of_them - 1}


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "tutti"
    figure, axes = pyplot.subplots(figsize=(8, 3))
    at = range(len(rows))
    axes.bar([x - 0.2 for x in at], [r["published"] for r in rows], 0.4, label="published", color="#9aa7b4")
    colors = ["#7aa6d1" if r["fitted"] else "#3b6ea5" for r in rows]
    axes.bar([x + 0.2 for x in at], [r["predicted"] for r in rows], 0.4, label="predicted", color=colors)
    axes.set_xticks(list(at), [f"{r['billions']:g}B\n{r['devices']}" for r in rows])
    axes.set(ylabel="TFLOP/s of a GPU", xlabel="parameters, GPUs (lighter: fitted on)")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    path.write_text("".join(f"{line.rstrip()}\n" for line in path.read_text().splitlines()))


if __name__ == "__main__":
    harness.main(run, __file__, packages=("transformers", "scipy"))
