"""Costs of a round of PPO, GRPO and relatives on a cluster, under each placement of rollouts.

A round writes completions, scores them, makes the steps of training on them, and moves the new weights to the engines.
Steps of training are simulated under the plans of a search, and steps of engines under serving plans; scoring is a
forward pass by engines over whole sequences. Completions are as long as is said, all of them, so writing takes the
slowest case. The loss is taken to cost what cross-entropy does.

Placements are those of `placement`: together, replicas, and apart, where a share of the devices writes. Apart with
staleness 1, a round takes the longer of writing and learning. Functions of rewards and environments cost nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from tutti.align.rollouts.rollout import MAX_SEQUENCES
from tutti.exec.runtimes.relayout import Placed, pieces
from tutti.hardware import Cluster
from tutti.ir.kind import Kind, kind_of, path_of
from tutti.ir.spec import Spec
from tutti.ir.step_graph import StepGraph
from tutti.plan.explain import seconds
from tutti.plan.layouts.layout import devices
from tutti.plan.plan import Plan
from tutti.plan.search.search import Search
from tutti.plan.variant import Variant
from tutti.progress import Say, silent
from tutti.serve.apart.costs import Predicted, Served
from tutti.serve.apart.planning import plans
from tutti.sim.planning import Simulator

EVERY = 16  # tokens between the steps of an engine whose cost is computed
SHARES = (1 / 4, 1 / 2, 3 / 4)  # of the devices that write, if they are apart
OLDER = 1.1  # how many times as fast a placement must be that learns from older weights
PARTS = 16  # of a device's memory, to which what is in it beside training is rounded up
GIB = 1 << 30


@dataclass(frozen=True)
class Round:
    """The sizes of a round. completions: number of completions, `generations` of each prompt. prompt, tokens: number
    of tokens of each prompt and of each completion. steps: number of steps of training. scored: how often all sequences
    are scored: by the policy, a reference, a reward model. models: how many models besides the policy are in memory."""

    completions: int
    generations: int
    prompt: int
    tokens: int
    steps: int
    scored: int
    models: int
    scores_old: bool = True  # whether the policy is among what scores, also if weights that wrote are those that learn

    def __post_init__(self) -> None:
        if min(self.completions, self.generations, self.prompt, self.tokens, self.steps) < 1:
            raise ValueError("completions, generations, prompt, tokens and steps must be at least 1")
        if self.completions % self.generations:
            raise ValueError(f"{self.completions} completions are no multiple of {self.generations} generations")

    @classmethod
    def of(cls, algorithm: str, completions: int, generations: int, prompt: int, tokens: int, batch: int, epochs: int,
           reference: bool, reward_model: bool) -> Round:  # fmt: skip
        """A round of "ppo" or of "grpo" (as RLOO and REINFORCE++). batch: rows of a step. epochs: passes over them."""
        if min(completions, batch, epochs) < 1:
            raise ValueError(f"completions is {completions}, batch {batch} and epochs {epochs}; expected at least 1")
        if completions % batch:
            raise ValueError(f"{completions} completions are no multiple of the {batch} rows of a step")
        steps = completions // batch * epochs
        old = algorithm == "ppo" or steps > 1
        return cls(completions, generations, prompt, tokens, steps, old + reference + reward_model,
                   reference + reward_model, old)  # fmt: skip


@dataclass(frozen=True)
class Forecast:
    """A placement and its predicted round. Times in seconds, bytes of a device that trains, or holds engines too.

    training: the plan. engines: how many, and the plan of each. moved: bytes of weights that a device receives.
    """

    placement: str
    training: str
    engines: str
    writing: float
    scoring: float
    learning: float
    moving: float
    moved: float
    memory: float
    ahead: bool = False

    @property
    def seconds(self) -> float:
        """Seconds per round."""
        if self.ahead:
            return max(self.writing, self.scoring + self.learning) + self.moving
        return self.writing + self.scoring + self.learning + self.moving

    @property
    def bottleneck(self) -> str:
        """The longest part."""
        return max(("writing", "scoring", "learning", "moving"), key=lambda name: getattr(self, name))


class Planner:
    """Compares placements.

    graph_of: the captured step of training, as for `plan.search.search.Search`, of `batch` rows. config: config
    of `transformers` of the engines' model, whose weights are of `dtype`. Placements that do not fit are in `refused`,
    with the reason.
    """

    def __init__(self, graph_of: Callable[[int, Variant], StepGraph], batch: int, config: Any, dtype: torch.dtype,
                 cluster: Cluster, round: Round, level: str = "O2",
                 progress: Say = silent):  # fmt: skip
        self.graph_of, self.batch, self.cluster, self.round = graph_of, batch, cluster, round
        self.level, self.progress = level, progress
        self.predicted, self.refused = Predicted(config, dtype), dict[str, str]()
        self._trained: dict[tuple[int, int], Plan] = {}
        self._served: dict[str, Served] = {}

    def forecasts(self) -> list[Forecast]:
        """All placements that fit, the fastest first. Raises ValueError if none does."""
        candidates = [*self._together(), *self._replicas(), *self._apart()]
        if not candidates:
            raise ValueError(f"no placement fits {self.cluster}: {'; '.join(self.refused.values())}")
        return sorted(candidates, key=lambda x: x.seconds)

    def _together(self) -> Iterator[Forecast]:
        for name, n in plans(self.cluster.size):
            if n == self.cluster.size and n > 1:
                yield from self._on("together", name, self.cluster.size, 1, self.cluster.size)

    def _replicas(self) -> Iterator[Forecast]:
        yield from self._on("replicas", "single", self.cluster.size, self.cluster.size, self.cluster.size)

    def _apart(self) -> Iterator[Forecast]:
        size = self.cluster.size
        for writers in sorted({round(size * share) for share in SHARES} - {0, size}):
            yield from self._on("apart", "single", size - writers, writers, writers)

    def _on(self, placement: str, name: str, trainers: int, engines: int, writers: int) -> Iterator[Forecast]:
        """The forecast if it fits, for engines apart also of rounds that are written ahead.

        trainers: devices that train. engines: how many, on `writers` devices together.
        """
        r = self.round
        label = f"{placement}, {engines} x {name}" + (f", {trainers} train" if placement == "apart" else "")
        try:
            self.progress(f"{label}: engines")
            served = self._engine(name, writers // engines)
            scorer = self._scorer(served)
            slots = (r.prompt + r.tokens) * min(MAX_SEQUENCES, self._share(engines)) * served.slot_bytes
            of_engine = served.weights + slots * engines / writers
            beside = r.models * self.parameter_bytes / trainers + (0 if placement == "apart" else of_engine)
            self.progress(f"{label}: training on {trainers}")
            plan = self._training(trainers, beside)
        except ValueError as error:
            self.refused[label] = str(error)
            return
        assert plan.prediction is not None
        memory = max(plan.prediction.peak_bytes + beside, of_engine)
        moved = self.moved(plan, served.plan) if placement == "together" else self.parameter_bytes
        moving = self.cluster.time("all_gather", moved, 1, self.cluster.size) if self.cluster.size > 1 else 0.0
        for ahead in (False, True) if placement == "apart" else (False,):
            yield Forecast(
                placement, plan.name, f"{engines} x {name}", self.writing(served, engines),
                self.scoring(scorer, trainers, ahead), plan.prediction.step_seconds * r.steps, moving, moved, memory,
                ahead,
            )  # fmt: skip

    def _training(self, size: int, beside: float) -> Plan:
        """The fastest plan of a step on so many devices whose memory holds `beside` bytes, too.

        Raises ValueError if none fits.
        """
        device = self.cluster.device
        part = math.ceil(PARTS * beside / device.memory)
        if part >= PARTS:
            raise ValueError(f"engines and other models need {beside / GIB:.1f} of the {device.memory / GIB:.1f} GiB "
                             "of a device")  # fmt: skip
        if (size, part) not in self._trained:
            free = replace(device, memory=device.memory * (1 - part / PARTS))
            search = Search(self.graph_of, self.batch, replace(self.cluster.of(size), device=free),
                            Simulator(self.level), progress=self.progress)  # fmt: skip
            plan = search.best()
            if not search.fits(plan):
                raise ValueError(f"no plan of training on {size} devices fits into {free.memory / GIB:.1f} GiB, which "
                                 "engines and other models leave")  # fmt: skip
            self._trained[size, part] = plan
        return self._trained[size, part]

    def _engine(self, name: str, size: int) -> Served:
        if name not in self._served:
            self._served[name] = self.predicted.on(name, self.cluster.of(size))
        return self._served[name]

    def _scorer(self, served: Served) -> Served:
        """An engine on one device if the model fits on it, else the given one."""
        try:
            return self._engine("single", 1)
        except ValueError:
            return served

    @cached_property
    def parameters(self) -> Mapping[str, Spec]:
        """Parameters of the training step, by name."""
        graph = self.graph_of(1, Variant())
        return {name: graph.spec(name) for name in graph.inputs if kind_of(name) == Kind.PARAM}

    @cached_property
    def labels(self) -> Mapping[str, str]:
        graph = self.graph_of(1, Variant())
        return {name: graph.inputs[name].meta["label"] for name in self.parameters}

    @property
    def parameter_bytes(self) -> int:
        return sum(x.bytes for x in self.parameters.values())

    def moved(self, training: Plan, serving: Plan) -> float:
        """The most bytes of weights that a device receives when they change from one plan to another."""
        if training.stages or serving.stages or devices(training.mesh) != devices(serving.mesh):
            return self.parameter_bytes
        received = [0] * devices(serving.mesh)
        sizes: dict[tuple, list[int]] = {}
        for name, spec in self.parameters.items():
            label = self.labels[name]
            before = Placed(training.input_layout(label), training.mesh)
            after = Placed(serving.input_layout(Kind.PARAM.at(f"model.{path_of(label)}")), serving.mesh)
            key = before.layout, after.layout, spec.shape, spec.dtype
            if key not in sizes:
                sizes[key] = [0] * len(received)
                for piece in pieces(tuple(spec.shape), before, after):
                    if piece.source != piece.target:
                        sizes[key][piece.target] += Spec(piece.sizes, spec.dtype).bytes
            received = [a + b for a, b in zip(received, sizes[key], strict=True)]
        return max(received)

    def _share(self, engines: int) -> int:
        """The most completions that one of the engines writes: all of a prompt are written by one."""
        r = self.round
        return math.ceil(r.completions // r.generations / engines) * r.generations

    def writing(self, served: Served, engines: int) -> float:
        """Seconds until so many engines have written the completions of a round, each an equal share."""
        r = self.round
        share = self._share(engines)
        active = min(MAX_SEQUENCES, share, max(1, served.slots // (r.prompt + r.tokens)))
        waves = math.ceil(share / active)
        prompts = math.ceil(active / r.generations)
        wave = served.costs([(r.prompt, r.prompt)] * prompts)
        for begin in range(0, r.tokens, EVERY):
            wave += min(EVERY, r.tokens - begin) * served.costs([(1, r.prompt + begin)] * active)
        return waves * wave

    def scoring(self, served: Served, trainers: int, ahead: bool = False) -> float:
        """Seconds to score the sequences of a round on the devices that train, each group with an equal share. Those
        written ahead are scored by the policy in any case, to correct for older weights."""
        r, length = self.round, self.round.prompt + self.round.tokens
        groups = max(1, trainers // devices(served.plan.mesh))
        times = r.scored + (ahead and not r.scores_old)
        return times * served.costs([(length, length)] * math.ceil(r.completions / groups))


def chosen(ranked: list[Forecast]) -> Forecast:
    """The fastest placement. One that learns from older weights must be faster by a tenth."""
    same = next((x for x in ranked if not x.ahead), ranked[0])
    return ranked[0] if ranked[0].ahead and same.seconds > OLDER * ranked[0].seconds else same


def why(ranked: list[Forecast], best: Forecast) -> str:
    """Explain the choice and the two next best, with the parts of their rounds."""
    share = getattr(best, best.bottleneck) / best.seconds
    options = f"rollout_placement = {best.placement!r}"
    if best.placement == "apart":
        options += f", rollout_workers = {best.engines.split()[0]}" + (", staleness = 1" if best.ahead else "")
    lines = [f"chosen: {_described(best)}; {best.bottleneck} takes {share:.0%} of it", f"options: {options}"]
    for candidate in [x for x in ranked if (x.placement, x.ahead) != (best.placement, best.ahead)][:2]:
        older = "" if candidate.seconds >= best.seconds else f", but learns from older weights, for less than {OLDER} x"
        lines.append(f"next: {_described(candidate)}{older}")
    return "\n".join(lines)


def _described(x: Forecast) -> str:
    joined = " beside " if x.ahead else " + "
    parts = f"{seconds(x.writing)} writing{joined}{seconds(x.scoring)} scoring + {seconds(x.learning)} learning"
    placement = x.placement + (", a round ahead" if x.ahead else "")
    return f"{placement}, trained by {x.training}, engines {x.engines}: {seconds(x.seconds)} a round ({parts})"
