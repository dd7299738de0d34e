"""What `plan_regret.py` measures: models of a size that a laptop trains in a fraction of a second a step, and plans.

Every model has random weights and AdamW. The plans of a case are textbook ones, what the planner chooses on this
cluster and on others, what it chose with one kind of operator split as in another plan, and random legal ones.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import transformers

import models
from tutti.hardware import Cluster
from tutti.hardware.curve import Curve
from tutti.hardware.device import Link
from tutti.ir.step_graph import StepGraph
from tutti.lower.variants.vary import vary
from tutti.plan.plan import DECISIONS, Plan, renamed
from tutti.plan.planner import Planner
from tutti.plan.random import random_plan
from tutti.plan.search.search import Search
from tutti.sim.planning import Simulator

TEXT, LENGTH, VOCABULARY = 16, 128, 4096  # sequences, tokens of each
IMAGES, PIXELS = 16, 32
RECORDS = 2048
SPEEDS = {"slow links": 0.1, "fast links": 10.0}  # of clusters that this one is not
MEMORY = 0.6  # of what the chosen plan needs, on another
CHANGED, RANDOM = 3, 1  # plans of these kinds


def _tokens(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    ids = models.integers(TEXT, LENGTH, below=VOCABULARY)
    return {"input_ids": ids, "labels": ids.clone(), **more}


def gpt2() -> models.Case:
    config = transformers.GPT2Config(
        n_embd=256, n_layer=3, n_head=4, vocab_size=VOCABULARY, n_positions=LENGTH, bos_token_id=0, eos_token_id=0
    )
    config.loss_type = "ForCausalLM"
    return transformers.GPT2LMHeadModel(config), _tokens(), None


def llama() -> models.Case:
    config = transformers.LlamaConfig(
        hidden_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, intermediate_size=704,
        vocab_size=VOCABULARY,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), _tokens(), None


def bert() -> models.Case:
    config = transformers.BertConfig(
        hidden_size=256, num_hidden_layers=3, num_attention_heads=4, intermediate_size=1024, vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    mask = torch.ones(TEXT, LENGTH, dtype=torch.int64)
    mask[::3, -16:] = 0
    return transformers.BertForMaskedLM(config), _tokens(attention_mask=mask), None


def edsr() -> models.Case:
    batch = {
        "image": models.random(IMAGES, 3, PIXELS, PIXELS, seed=2),
        "target": models.random(IMAGES, 3, 2 * PIXELS, 2 * PIXELS, seed=3),
    }
    return models.EDSR(width=48, blocks=3), batch, models.mean_squared("", "target")


def resnet() -> models.Case:
    config = transformers.ResNetConfig(
        embedding_size=64, hidden_sizes=[128, 256], depths=[2, 2], layer_type="bottleneck", num_labels=64
    )
    batch = {
        "pixel_values": models.random(IMAGES, 3, 2 * PIXELS, 2 * PIXELS, seed=2),
        "labels": models.integers(IMAGES, below=64),
    }
    return transformers.ResNetForImageClassification(config), batch, None


def dlrm() -> models.Case:
    """Tables of 80,000 rows of 32 in all."""
    rows, bag = (1 << 16, 1 << 13, 1 << 12, 1 << 11), 8
    sparse = torch.stack([models.integers(RECORDS, bag, below=n, seed=n) for n in rows], 1)
    batch = {
        "dense": models.random(RECORDS, 16),
        "sparse": sparse,
        "clicked": models.integers(RECORDS, below=2).float(),
    }

    def loss(model: torch.nn.Module, b: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(model(b["dense"], b["sparse"]), b["clicked"])

    model = models.DLRM(rows, width=32, dense=16)
    pairs = (len(rows) + 1) * len(rows) // 2
    model.bottom = torch.nn.Sequential(
        torch.nn.Linear(16, 512), torch.nn.ReLU(), torch.nn.Linear(512, 32), torch.nn.ReLU()
    )
    model.top = torch.nn.Sequential(
        torch.nn.Linear(32 + pairs, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.ReLU(),
        torch.nn.Linear(1024, 1),
    )  # fmt: skip
    return model, batch, loss


MODELS: dict[str, Callable[[], models.Case]] = {make.__name__: make for make in (gpt2, llama, bert, edsr, resnet, dlrm)}


def model_of(name: str) -> models.Case:
    """A model in training mode, the same in every process, its batch and its loss."""
    torch.manual_seed(0)
    model, batch, loss = MODELS[name]()
    return model.train(), batch, loss


@dataclass(frozen=True)
class Case:
    """A model on so many processes, at a level."""

    model: str
    processes: int
    level: str = "O0"

    def __str__(self) -> str:
        return f"{self.model} on {self.processes} at {self.level}"


CASES = (
    *(Case(model, processes) for processes in (2, 4) for model in MODELS),
    Case("llama", 2, "O2"),
)
QUICK = (Case("edsr", 2),)


# -- plans ---------------------------------------------------------------------------------------------------------


def textbook(processes: int) -> tuple[str, ...]:
    both = ("dp2xtp2", "tp2xzero1", "tp2xzero3") if processes == 4 else ()
    return ("dp", "tp", "zero1", "zero3", *both)


def plans_of(graph: StepGraph, cluster: Cluster, level: str = "O0") -> dict[str, Plan]:
    """Plans by name, all different. The planner's choice has the name "auto" among others that it goes by."""
    plans: dict[str, Plan] = {}
    named: dict[str, list[str]] = defaultdict(list)
    for name, plan in _proposed(graph, cluster, level):
        key = content(plan)
        plans.setdefault(key, plan)
        named[key].append(name)
    return {" = ".join(names): plans[key] for key, names in named.items()}


def _proposed(graph: StepGraph, cluster: Cluster, level: str) -> Iterator[tuple[str, Plan]]:
    planner = Planner(graph, cluster)
    chosen = _searched(graph, cluster, level)
    yield "auto", chosen
    others = []
    for name in textbook(cluster.size):
        with suppress(ValueError):  # where the batch does not divide
            others.append(planner.named(name))
            yield name, others[-1]
    for name, speed in SPEEDS.items():
        yield f"auto for {name}", _searched(graph, _with_links(cluster, speed), level)
    memory = MEMORY * chosen.predicted.peak_bytes
    small = replace(cluster, device=replace(cluster.device, memory=memory))
    yield "auto for less memory", _searched(graph, small, level)
    yield from _changed(graph, chosen, others)
    for seed in range(RANDOM):
        yield f"random {seed}", random_plan(graph, cluster, seed)


def _searched(graph: StepGraph, cluster: Cluster, level: str) -> Plan:
    """The fastest plan that fits, else the smallest."""
    return Search(lambda count, variant: vary(graph, variant), 1, cluster, Simulator(level)).ranked()[0]


def _changed(graph: StepGraph, chosen: Plan, others: list[Plan]) -> Iterator[tuple[str, Plan]]:
    """The chosen plan with one kind of operator as in another plan on a like mesh: those with the most FLOPs first."""
    kinds: dict[str, set[str]] = defaultdict(set)
    work: dict[str, int] = defaultdict(int)
    for node in graph.calls:
        kind = f"{str(node.target).removeprefix('aten.')} {node.meta['phase']}"
        kinds[kind].add(node.meta["label"])
        work[kind] += node.meta["flops"] or 1
    seen, left = {content(plan) for plan in (chosen, *others)}, CHANGED
    for kind in sorted(kinds, key=lambda k: -work[k]):
        for other in others:
            if left and list(other.mesh.values()) == list(chosen.mesh.values()):
                like = renamed(other, dict(zip(other.mesh, chosen.mesh, strict=True)))
                own = {label: c for label, c in chosen.operators.items() if label not in kinds[kind]}
                new = {label: c for label, c in like.operators.items() if label in kinds[kind]}
                plan = chosen.replace(operators={**own, **new}, name=f"{kind} as {other.name}", prediction=None)
                if content(plan) not in seen:
                    seen.add(content(plan))
                    left -= 1
                    yield f"auto with {plan.name}", plan
                    break


def content(plan: Plan) -> str:
    """What a plan says, whatever its axes are called."""
    axes = {axis: f"axis{i}" for i, axis in enumerate(a for a in plan.mesh if plan.mesh[a] > 1)}
    data = json.loads(renamed(plan.replace(mesh={a: plan.mesh[a] for a in axes}), axes).to_json())
    choices = {key: data[key] for key in DECISIONS if key in data}
    choices |= {key: {label: said for label, said in choices[key].items() if said} for key in ("inputs", "operators")}
    return json.dumps(choices, sort_keys=True)


def _with_links(cluster: Cluster, speed: float) -> Cluster:
    """The same devices, with links that are so many times faster."""

    def changed(link: Link) -> Link:
        curves = tuple(
            (kind, k, Curve(tuple((x, y / speed) for x, y in curve.points))) for kind, k, curve in link.measured
        )
        ways = tuple(replace(way, latency=way.latency / speed, start=way.start / speed) for way in link.ways)
        return replace(link, bandwidth=link.bandwidth * speed, latency=link.latency / speed, ways=ways, measured=curves)

    return replace(cluster, levels=tuple((members, changed(link)) for members, link in cluster.levels))
