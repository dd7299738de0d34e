"""What a step of the engine costs, in seconds: measured on this machine, or predicted for a cluster.

A step computes some tokens, whose cost apart from attention depends on their number only; attention reads the cache of
each sequence, or multiplies with it.
"""

from __future__ import annotations

import copy
import functools
import statistics
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tutti.hardware import Cluster
from tutti.ir.kind import Kind, kind_of
from tutti.ir.step_graph import StepGraph
from tutti.lower.variants.vary import vary
from tutti.plan.layouts.layout import coordinates_of, devices
from tutti.plan.plan import Plan
from tutti.serve.cache.attention import Layer, empty_cache, slot_bytes
from tutti.serve.cache.logits import layers_of
from tutti.serve.cache.rotary import scaling_of
from tutti.serve.engine.engine import Engine
from tutti.serve.engine.request import Request, Sampling
from tutti.serve.engine.runner import CACHE, step_function
from tutti.serve.values import Model
from tutti.sim.planning import Simulator, choose
from tutti.tracing.function import capture_function
from tutti.tracing.holdings import Holdings

GRID = (1, 32, 256, 1024)  # tokens of the steps that are predicted
BLOCK = 16
SHORT = 6  # tokens of sequences that fill no block


@dataclass(frozen=True)
class Costs:
    """What an engine's steps take, in seconds. seconds: time of steps of these numbers of `tokens`, without attention.
    read: time of reading a cached token. multiply: time of a pair of a query and a cached token. overhead: time that
    each step takes in addition. sequence: time that each sequence in a step takes. sizes, most: the engine rounds
    numbers of tokens up to these sizes, and those of steps with prompts to `most` at least."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    read: float
    multiply: float
    overhead: float = 0.0
    sequence: float = 0.0
    sizes: tuple[int, ...] = ()
    most: int = 0

    def __call__(self, pieces: Sequence[tuple[int, int]]) -> float:
        """The seconds of a step. pieces: (new tokens, tokens with those before them) of each sequence."""
        total = sum(n for n, _ in pieces)
        total = max(total, self.most) if total > len(pieces) else total
        total = next((n for n in self.sizes if n >= total), total)
        attention = sum(max(self.read * c, self.multiply * n * (c - n / 2)) for n, c in pieces)
        return self._base(total) + attention + self.overhead + self.sequence * len(pieces)

    def _base(self, total: int) -> float:
        """Interpolated, or extrapolated from the last two. In plain Python: a simulated load asks for each step."""
        if len(self.tokens) == 1:
            return self.seconds[0]
        right = min(max(1, bisect_left(self.tokens, total)), len(self.tokens) - 1)
        (a, b), (x, y) = self.tokens[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        return x + (y - x) * max(0, total - a) / (b - a)


def measured(engine: Engine, rounds: int = 5) -> Costs:
    """The costs of an idle engine's steps, median over rounds. Its prefix cache must be empty."""
    runner = engine.runner
    for tensors in runner.store.parts:
        for name, x in tensors.items():
            if name.startswith(CACHE):
                x.zero_()  # memory that was never written is not read either
    sizes = [n for n in runner.sizes if n <= engine.scheduler.budget]
    most, longest = engine.scheduler.most, runner.longest

    def seconds(lengths: Sequence[tuple[int, int]]) -> float:
        """The seconds of a step of these pieces, sampling included."""
        arguments = runner.synthetic(lengths)
        durations = []
        for i in range(rounds + 1):
            begin = time.perf_counter()
            runner.execute(arguments).argmax(-1).tolist()
            if i:
                durations.append(time.perf_counter() - begin)
        return statistics.median(durations)

    generating = [n for n in sizes if n <= most]
    base = {n: seconds([(1, 1)] * n) for n in generating}
    base |= {n: seconds([(n, n)]) for n in sizes if n > most and n <= longest}
    few, many = generating[-1], longest
    read = max(0.0, (seconds([(1, many)] * few) - base[few]) / (few * (many - 1)))
    chunk = min(max(sizes), many // 2)
    multiply = max(0.0, (seconds([(chunk, many)]) - seconds([(chunk, chunk)])) / (chunk * (many - chunk)))
    for n in base:
        if n > most:
            base[n] = max(base[n] - multiply * n * n / 2, base[few])
    costs = Costs(tuple(base), tuple(base.values()), read, multiply, sizes=tuple(sizes), most=most)
    beside = {n: _step(engine, n, rounds) - costs([(1, SHORT)] * n) for n in (1, most)}
    each = max(0.0, (beside[most] - beside[1]) / max(1, most - 1))
    return replace(costs, overhead=max(0.0, beside[1] - each), sequence=each)


def _step(engine: Engine, count: int, rounds: int) -> float:
    """The median seconds of steps that generate a token of so many sequences, scheduling and sampling included."""
    for i in range(count):
        engine.add(Request([i % engine.vocabulary], Sampling(max_tokens=rounds + SHORT, ignore_end=True)))
    durations = []
    while engine.busy:
        begin = time.perf_counter()
        engine.step()
        durations.append(time.perf_counter() - begin)
    return statistics.median(durations[SHORT // 2 :])


@dataclass(frozen=True)
class Served:
    """A model on devices. costs: costs of steps. plan: plan of the largest step. weights: bytes of the parameters on a
    device. slots: tokens of the cache that its devices hold together with the weights."""

    costs: Costs
    plan: Plan
    weights: float
    slots: int
    slot_bytes: int


class Predicted:
    """Predicts the costs of a model on any cluster, without weights or devices.

    config: config of `transformers`. Its layers are alike but for some at the beginning: two depths are captured, and
    others follow.
    """

    def __init__(self, config: Model, dtype: torch.dtype = torch.bfloat16):
        self.config, self.dtype = config, dtype
        self.depth = config.num_hidden_layers
        first = getattr(config, "first_k_dense_replace", 0)
        self.depths = (min(self.depth, first + 1), min(self.depth, first + 2)) if self.depth > 1 else (1,)
        self.graphs: dict[tuple[int, int], StepGraph] = {}
        self.layers: list[Layer] = []
        self.models = {n: self._model(n) for n in self.depths}
        self.layers = layers_of(self.models[self.depths[-1]])
        self.slot = slot_bytes(self.layers[-self.layers[0].calls :], dtype) * self.depth

    def _model(self, depth: int) -> Model:
        from transformers import AutoModelForCausalLM

        config = copy.deepcopy(self.config)
        config.num_hidden_layers = depth
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:depth]
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=self.dtype).eval()

    def _graph(self, depth: int, tokens: int) -> StepGraph:
        """The step of a model of this depth, of sequences with a block each."""
        if (depth, tokens) not in self.graphs:
            model = self.models[depth]
            slots = tokens * BLOCK
            cache = empty_cache(self.layers[: depth * self.layers[0].calls], slots, self.dtype, "meta")
            ids, numbers = torch.zeros(tokens, dtype=torch.int64), torch.zeros(tokens, dtype=torch.int32)
            tables, starts = torch.zeros(tokens, 1, dtype=torch.int32), torch.zeros(tokens + 1, dtype=torch.int32)
            rows = ids[: min(tokens, 64)]
            more = {"spans": ids} if scaling_of(model) else {}
            arguments = (ids, ids, ids, tables, starts, numbers, rows, more)
            holdings = Holdings({"model": model, "cache": cache})
            captured = capture_function(step_function(model, cache, BLOCK), arguments, {}, holdings)
            self.graphs[depth, tokens] = captured.graph
        return self.graphs[depth, tokens]

    def on(self, name: str, cluster: Cluster, level: str = "O1", overhead: float = 1e-3) -> Served:
        """The model under a plan on a cluster. overhead: seconds of a step besides those of the devices.

        Raises ValueError for a plan that does not fit the model, or if its weights do not fit the devices.
        """
        device = cluster.device

        @functools.cache
        def planned(depth: int, tokens: int) -> tuple[StepGraph, Plan]:
            graph = self._graph(depth, tokens)
            return graph, choose(name, lambda _, variant: vary(graph, variant), 1, cluster, level, (), None, 1, 0.0)

        weight_bytes = self._deep({x: _weights(*planned(x, GRID[0])) for x in self.depths})
        plan = planned(self.depths[-1], GRID[-1])[1]
        share = devices(plan.mesh)
        slots = int((device.memory * 0.9 - weight_bytes) * share / self.slot)
        if slots < 2 * BLOCK:
            raise ValueError(
                f"the weights need {weight_bytes / 2**30:.0f} of {device.memory / 2**30:.0f} GiB of a device"
            )
        seconds = []
        for tokens in GRID:
            planned_steps = {x: planned(x, tokens) for x in self.depths}
            at = {x: Simulator(level)(graph, of, cluster).step_seconds for x, (graph, of) in planned_steps.items()}
            seconds.append(self._deep(at))
        heads = getattr(self.config, "num_attention_heads", self.layers[-1].heads)
        width = self.layers[-1].width + self.layers[-1].value_width
        flops = 2 * heads * width * self.depth
        read = device.stream_seconds(self.slot, "add", self.dtype) / share
        rate = device.rate(device.dtype_with_peak(self.dtype))
        costs = Costs(GRID, tuple(seconds), read, flops / rate / share, overhead)
        return Served(costs, plan, weight_bytes, slots, self.slot)

    def _deep(self, at: Mapping[int, float]) -> float:
        """A quantity of the whole model, from those of the captured depths."""
        if len(self.depths) == 1 or self.depths[0] == self.depths[1]:
            return at[self.depths[0]]
        a, b = self.depths
        return at[b] + (self.depth - b) * (at[b] - at[a])


def _weights(graph: StepGraph, plan: Plan) -> float:
    """Bytes of the parameters on the device that holds most."""
    mesh, total = plan.mesh, 0.0
    for name, node in graph.inputs.items():
        if kind_of(name) == Kind.PARAM:
            label, spec = node.meta["label"], node.meta["val"]
            shape = plan.input_layout(label).local_shape(spec.shape, mesh, coordinates_of(0, mesh))
            total += float(np.prod(shape)) * spec.dtype.itemsize / plan.mesh.get("pp", 1)
    return total
