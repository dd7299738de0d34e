"""Check rules: split a call in all ways its rule allows, and compare with the unsplit result.

For each sample of an operator and each legal choice (of one axis, strided too, and of pairs of axes) every rank
computes its part from its shards of the operands, partial sums included. Combined, the parts must equal the result of
the unsplit operator. Splits that the rule forbids are tried too: they must fail or give other values, else the rule is
needlessly strict.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from random import Random
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from torch import fx
from torch.utils import _pytree as pytree

from tutti.check.samples.sample import Sample, strategy
from tutti.exec.kernels.codegen import generate
from tutti.exec.runtimes.virtual import run_virtual
from tutti.ir.kind import Kind
from tutti.ir.op_info import SENDS
from tutti.ir.spec import Spec
from tutti.ir.step_graph import FORWARD, StepGraph
from tutti.lower.program import Program
from tutti.lower.shard import shard
from tutti.ops import Cut, Rule, operands, rule_of
from tutti.ops.attention import attention_cuda
from tutti.plan.layouts.choice import Choice, Choices, Position, candidates, layouts, legal, nest
from tutti.plan.layouts.layout import Layout, Mesh, coordinates_of, devices
from tutti.plan.layouts.reshard import sent_bytes
from tutti.plan.plan import Plan
from tutti.tracing.rewrite.like_operators import UNDEFINED

aten = torch.ops.aten
LABEL = "operator"
CPU = torch.device("cpu")
MESHES = ({"a": 2}, {"a": 3}, {"a": 4})
PAIRS = ({"a": 2, "b": 2}, {"a": 2, "b": 3}, {"a": 3, "b": 2})
ROUNDING = {  # by dtype of the least precise tensor involved
    torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 2e-5, torch.complex64: 2e-5,
    torch.float16: 1e-2, torch.bfloat16: 5e-2,
}  # fmt: skip
UNCHECKED = {  # kernels that read or write out of bounds for a wrong size or index, instead of raising
    *attention_cuda.BACKWARD,  # cuDNN's takes the lengths as numbers; none looks at the shape of the log-sum-exp
    torch.ops.tutti.lstm_layer.default,
    torch.ops.tutti.lstm_layer_backward.default,
    aten._embedding_bag.default,
    aten._embedding_bag_forward_only.default,
    aten._embedding_bag_backward.default,
    aten._embedding_bag_per_sample_weights_backward.default,
    aten.adaptive_max_pool2d_backward.default,
    aten.adaptive_max_pool3d_backward.default,
    aten.max_pool3d_with_indices_backward.default,
    aten.fractional_max_pool2d_backward.default,
    aten.fractional_max_pool3d_backward.default,
    aten.max_unpool2d.default,
    aten.max_unpool3d.default,
}

STATES = {"rng_state", "unused", "philox_seed", "philox_offset"}  # outputs of fused attention, by name


@dataclass
class RuleReport:
    """The result of checking one operator."""

    samples: int = 0
    cases: int = 0  # choices with the right result
    without: int = 0  # samples to which the rule does not apply
    lines: Counter[str] = field(default_factory=Counter)  # the rule for the samples' arguments
    unpriced: int = 0  # bytes that the local computation sends, not listed in SENDS
    strict: Counter[str] = field(default_factory=Counter)  # forbidden split -> how often it was wrong or raised
    needless: Counter[str] = field(default_factory=Counter)  # forbidden split -> how often it was right

    @property
    def needlessly_forbidden(self) -> list[str]:
        """Forbidden splits that were right each time, at least three times."""
        return sorted(what for what, times in self.needless.items() if times >= 3 and not self.strict[what])


def prove(target: Any, samples, examples: int = 20) -> RuleReport:
    """Check samples of an operator; samples: a strategy, or a function of a `Draw` (see `tutti.check.samples`).

    Raises AssertionError with the smallest sample found for which the rule is wrong.
    """
    report = RuleReport()
    drawn = strategy(samples, target) if callable(samples) else samples

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None,
              suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], print_blob=False,
              report_multiple_bugs=False)  # fmt: skip
    @given(drawn)
    def run(sample: Sample) -> None:
        check(sample, report)

    run()
    return report


def check(sample: Sample, report: RuleReport) -> None:
    """Check one call under its rule. Raises AssertionError if a choice gives other values."""
    report.samples += 1
    call = _Call(sample)
    rule = rule_of(call.node)
    if rule is None:
        report.without += 1
        return
    report.lines[rule.notation] += 1
    for mesh, choices in _legal(rule, Random(report.samples)):
        try:
            call.compare(rule, mesh, choices, turned=report.cases % 2 == 1)
            call.compare_price(rule, mesh, choices, report)
        except Exception as error:
            shown = ", ".join(f"{axis}={mesh[axis]}: {c}" for axis, c in choices.items())
            raise AssertionError(f"{call}, rule {rule.notation!r}, split by {shown}: {error}") from error
        report.cases += 1
    for what, against, choice in _forbidden(rule, call.node) if sample.target not in UNCHECKED else ():
        try:
            call.compare(against, {"a": 2}, {"a": choice})
        except Exception:
            report.strict[what] += 1
        else:
            report.needless[what] += 1


def _legal(rule: Rule, rng: Random) -> Iterator[tuple[Mesh, Choices]]:
    """All choices of one axis; a few of two."""
    cuts = {factor: _divisors(size) for factor, size in rule.sizes.items()}
    for mesh in MESHES:
        for choice in candidates(rule, cuts, mesh["a"]):
            if legal(rule, {"a": choice}, mesh) and not (choice.unit and choice.outer > 1):
                yield mesh, {"a": choice}
    for mesh in PAIRS:
        yield from islice(_pairs(rule, cuts, mesh, rng), 4)


def _pairs(rule: Rule, cuts: dict[str, set[Position]], mesh: Mesh, rng: Random) -> Iterator[tuple[Mesh, Choices]]:
    options = {axis: list(candidates(rule, cuts, size)) for axis, size in mesh.items()}
    for _ in range(12 if all(options.values()) else 0):
        choices: dict[str, Choice] = {}
        for axis in rng.sample(list(mesh), len(mesh)):
            choices[axis] = nest(rng.choice(options[axis]), choices, mesh)
        if legal(rule, choices, mesh):
            yield mesh, choices


def _divisors(n: int) -> set[Position]:
    return {(d, 1) for d in range(1, n + 1) if n % d == 0}


def _forbidden(rule: Rule, node: fx.Node) -> Iterator[tuple[str, Rule, Choice]]:
    """(description, a rule that allows it, the choice): forbidden factors split, other operands as partial sums."""
    allowed = replace(rule, whole=frozenset())
    for factor in sorted(rule.whole):
        if rule.sizes[factor] % 2 == 0:
            yield f"splitting {factor}", allowed, Choice(factor)
    linear = {i for operands in rule.linear for i in operands}
    for i, operand in enumerate(operands(node)):
        if i not in linear and operand.meta["val"].dtype.is_floating_point:
            only = frozenset({i})
            yield f"operand {i} as a partial sum", replace(rule, linear=(only,)), Choice(linear=only)


class _Call:
    """A graph of one call, and its unsplit result."""

    def __init__(self, sample: Sample):
        self.sample = sample
        leaves, spec = pytree.tree_flatten((sample.args, sample.kwargs))
        self.tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        expected = sample.target(*sample.args, **sample.kwargs)
        several = isinstance(expected, (tuple, list))
        self.expected = list(expected) if several else [expected]
        graph = fx.Graph()
        inputs = {Kind.BATCH.at(i): graph.placeholder(f"x{i}") for i in range(len(self.tensors))}
        for (name, node), tensor in zip(inputs.items(), self.tensors, strict=True):
            node.meta = _meta(Spec.of(tensor), name)
        nodes = iter(inputs.values())
        args, kwargs = pytree.tree_unflatten([next(nodes) if isinstance(x, torch.Tensor) else x for x in leaves], spec)
        self.node = graph.create_node("call_function", sample.target, tuple(args), kwargs)
        self.node.meta = _meta(Spec.of(tuple(self.expected) if several else expected), LABEL)
        outputs = {"out:0": self.node}
        if several:
            outputs = {}
            for i, tensor in enumerate(self.expected):
                if isinstance(tensor, torch.Tensor):
                    outputs[f"out:{i}"] = item = graph.call_function(operator.getitem, (self.node, i))
                    item.meta = _meta(Spec.of(tensor), LABEL)
        self.unset = self._unset()
        self.expected = [t for t in self.expected if isinstance(t, torch.Tensor)]
        self.rounding = max((ROUNDING.get(t.dtype, 0.0) for t in (*self.tensors, *self.expected)), default=0.0)
        graph.output(tuple(outputs.values()))
        self.step = StepGraph(graph, inputs, outputs, device=self.tensors[0].device if self.tensors else CPU)

    def _unset(self) -> set[int]:
        """The outputs, counted among tensors, that hold the state of a generator: without dropout kernels leave them as
        they were allocated."""
        returns = getattr(self.sample.target, "_schema", None)
        names = [r.name for r in returns.returns] if returns else []
        tensors = [name for name, x in zip(names, self.expected, strict=False) if isinstance(x, torch.Tensor)]
        return {i for i, name in enumerate(tensors) if name in STATES}

    def __str__(self) -> str:
        shown = pytree.tree_map(_shown, (self.sample.args, self.sample.kwargs))
        named = [f"{k}={v}" for k, v in shown[1].items()]
        return f"{self.sample.target}({', '.join([*map(str, shown[0]), *named])})"

    def programs(self, rule: Rule, mesh: Mesh, choices: Choices, whole: bool) -> list[Program]:
        ins, outs = layouts(rule, choices)
        inputs = {Kind.BATCH.at(i): layout for i, layout in enumerate(ins)}
        wanted = {} if whole else {f"out:{i}": layout for i, layout in enumerate(outs)}
        plan = Plan(mesh, inputs, {LABEL: dict(choices)})
        return [shard(self.step, plan, rank, wanted, lambda node: rule) for rank in range(devices(mesh))]

    def compare(self, rule: Rule, mesh: Mesh, choices: Choices, turned: bool = False) -> None:
        """Run on all ranks. turned: the last two dims of the parts are swapped in memory, if neither is of size one."""
        programs = self.programs(rule, mesh, choices, whole=True)
        runs = [generate(p.graph) for p in programs]
        operand_layouts, _ = layouts(rule, choices)
        operand_parts = [_parts(x, at, mesh) for x, at in zip(self.tensors, operand_layouts, strict=True)]
        if turned:
            operand_parts = [[_turned(x) for x in parts] for parts in operand_parts]
        inputs = [[parts[rank] for parts in operand_parts] for rank in range(devices(mesh))]
        undefined = self.sample.target in {aten.empty.memory_format, *UNDEFINED}
        for rank, outputs in enumerate(run_virtual(runs, inputs, mesh)):
            for i, (ours, expected) in enumerate(zip(outputs, self.expected, strict=True)):
                shape_only = undefined or i in self.unset
                assert_same(ours, expected, f"output {i} on rank {rank}", self.rounding, shape_only)

    def compare_price(self, rule: Rule, mesh: Mesh, choices: Choices, report: RuleReport) -> None:
        """Compare SENDS with what the local computation of one axis sends."""
        choice = choices.get("a", Choice())
        if len(mesh) > 1 or not (choice.also or choice.factor in rule.local):
            return
        programs = self.programs(rule, mesh, choices, whole=False)
        sent = {
            kind: max(sum(c.bytes for c in p.collectives if c.kind == kind) for p in programs)
            for kind in {c.kind for c in programs[0].collectives}
        }
        if self.sample.target not in SENDS:
            report.unpriced += sum(sent.values())
            return
        ins, outs = layouts(rule, choices)
        inputs = [_local(layout, Spec.of(x), mesh) for layout, x in zip(ins, self.tensors, strict=True)]
        outputs = [_local(layout, Spec.of(x), mesh) for layout, x in zip(outs, self.expected, strict=False)]
        said: Counter[str] = Counter()
        factor = "&".join(factor for factor, _ in choice.splits)
        cut = Cut(self.node, rule, factor, mesh["a"], inputs, outputs)
        for kind, local in SENDS[self.sample.target](cut):
            said[kind] += local if kind == "exchange" else sent_bytes(kind, local, mesh["a"])
        for kind in {*said, *sent}:
            # The first and last part have only one neighbour.
            same = sent.get(kind, 0) <= said[kind] if kind == "ppermute" else sent.get(kind, 0) == said[kind]
            assert same, f"SENDS says {said[kind]} bytes of {kind}, the local computation sends {sent.get(kind, 0)}"


def _meta(value: Any, label: str) -> dict[str, Any]:
    return {"val": value, "phase": FORWARD, "path": "", "label": label, "flops": 0, "bytes": 1}


def _shown(x: Any) -> Any:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" if isinstance(x, torch.Tensor) else x


def _turned(x: torch.Tensor) -> torch.Tensor:
    return x.mT.contiguous().mT if x.ndim > 1 and min(x.shape[-2:]) > 1 else x


def _local(layout: Layout, spec: Spec, mesh: Mesh) -> Spec:
    return Spec(layout.local_shape(spec.shape, mesh), spec.dtype)


def _summands(x: torch.Tensor, k: int, seed: int) -> list[torch.Tensor]:
    """k tensors that sum to x: random ones, or multiples of x if those would lose digits in a low-precision dtype."""
    if x.dtype in (torch.float16, torch.bfloat16):
        multiples = [2, -2] * k
        return [x * m for m in [*multiples[: k - 1], 1 - sum(multiples[: k - 1])]]
    noise = torch.rand((k - 1, *x.shape), generator=torch.Generator().manual_seed(seed)) * 2 + 1
    noise = noise.to(x)
    return [*noise, x - noise.sum(0)]


def _parts(whole: torch.Tensor, layout: Layout, mesh: Mesh) -> list[torch.Tensor]:
    """The shard of each rank. Along partial axes, random summands of the full tensor."""
    summands: dict[tuple[int, ...], torch.Tensor] = {(): whole}
    for axis in layout.partials:
        parted = {}
        for where, x in summands.items():
            parted |= {(*where, i): part for i, part in enumerate(_summands(x, mesh[axis], len(parted)))}
        summands = parted
    split = Layout.of(dict(layout.splits))
    parts = []
    for rank in range(devices(mesh)):
        where = coordinates_of(rank, mesh)
        x = summands[tuple(where[axis] for axis in layout.partials)]
        parts.append(split.local_slice(x, mesh, where).clone())
    return parts


def assert_same(
    ours: torch.Tensor, expected: torch.Tensor, what: str, rounding: float, shape_only: bool = False
) -> None:
    """Compare up to rounding, relative to the largest magnitude, or to 1 if that is less."""
    assert ours.shape == expected.shape, f"{what} has shape {tuple(ours.shape)}, not {tuple(expected.shape)}"
    assert ours.dtype == expected.dtype, f"{what} is {ours.dtype}, not {expected.dtype}"
    if shape_only or not ours.numel():
        return
    if expected.is_complex():
        ours, expected = (torch.view_as_real(x.resolve_conj()) for x in (ours, expected))
    if not expected.dtype.is_floating_point:
        assert torch.equal(ours, expected), f"{what} differs"
        return
    finite = expected[expected.isfinite()]
    scale = max(1.0, finite.abs().max().item()) if finite.numel() else 1.0  # operands are about 1
    torch.testing.assert_close(
        ours, expected, rtol=rounding, atol=rounding * scale, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )
