"""Find functions that models write operator by operator, and replace them by fused operators.

A pattern has a `reference`, a function as models write it, and a `replacement` that computes the same with fused
operators. Both are traced with their gradients, so the search is for what capture makes of the function, backward pass
included. First the forward part is searched, ignoring shapes; that gives the operands. Then the function is traced for
these operands, for each choice of which of them need gradients, and must match exactly. A component of a trace that
shares no operator with the rest, such as a backward pass without saved values, is searched separately.

As matches are exact, unusual variants are not matched. Differences in rounding are noted in `pattern_table`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import torch
from torch import fx

from tutti.ir.spec import Spec
from tutti.ir.step_graph import BACKWARD, FORWARD
from tutti.tracing.rewrite.match import SubgraphMatcher, leaves
from tutti.tracing.rewrite.replace import rewrite
from tutti.tracing.trace.joint import Joint, joint

HOLES = (1234567 / 2**24, 2345679 / 2**24)  # placeholders for numbers in the trace that finds the operands
DTYPES = (torch.float32, torch.bfloat16)  # dtypes with different traces of a function


@dataclass(frozen=True)
class Pattern:
    """A function as models write it, and its replacement. Both take tensors, then numbers.

    name: shown by `tutti patterns`.
    operator: name of the fused operator.
    reference: the function as models write it.
    replacement: the function that replaces it.
    shapes: example shapes of the tensors.
    anchor: the rarest operator of the reference.
    learned: indices of tensors that may need gradients.
    together: either all or none of them need gradients.
    reused: index of a learned tensor that models read again later.
    reusing: replacement in that case, which also returns that tensor.
    labels: indices of int64 tensors.
    numbers: how many numbers follow the tensors.
    """

    name: str
    operator: str
    reference: Callable
    replacement: Callable
    shapes: tuple[tuple[int, ...], ...]
    anchor: torch._ops.OpOverload
    learned: tuple[int, ...]
    together: bool = False
    reused: int | None = None
    reusing: Callable | None = None
    labels: tuple[int, ...] = ()
    numbers: int = 0

    def variants(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(tensors that need gradients, which of them are read again)"""
        for count in (len(self.learned), 0) if self.together else range(len(self.learned), -1, -1):
            for learns in combinations(self.learned, count):
                if self.reused in learns:
                    yield learns, (self.reused,)
                yield learns, ()


def check_pattern(pattern: Pattern) -> None:
    """Raise ValueError if the reference lacks the anchor, or the replacement differs on random operands."""
    specs = tuple(Spec(s, torch.int64 if i in pattern.labels else torch.float32) for i, s in enumerate(pattern.shapes))
    numbers = HOLES[: pattern.numbers]
    traced = joint(pattern.reference, specs, numbers, pattern.learned, (), torch.device("cpu"))
    targets = dict.fromkeys(n.target for n in traced.forward)
    if pattern.anchor not in targets:
        raise ValueError(
            f"{pattern.name}: the reference has no {pattern.anchor}; it has {', '.join(map(str, targets))}"
        )
    generator = torch.Generator().manual_seed(0)

    def operands() -> list[torch.Tensor]:
        generator.manual_seed(0)
        tensors = [torch.randn(s.shape, generator=generator) for s in specs]
        tensors = [x.abs().long() if i in pattern.labels else x for i, x in enumerate(tensors)]
        return [x.requires_grad_() if i in pattern.learned else x for i, x in enumerate(tensors)]

    def results(function: Callable) -> list[torch.Tensor]:
        inputs = operands()
        outputs = function(*inputs, *numbers)
        outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
        learned = [inputs[i] for i in pattern.learned]
        grads = torch.autograd.grad([x.square().sum() for x in outputs if x.requires_grad], learned, allow_unused=True)
        return [x.detach() for x in outputs] + [torch.zeros(()) if g is None else g for g in grads]

    for ours, theirs in zip(results(pattern.replacement), results(pattern.reference), strict=True):
        if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5):
            raise ValueError(f"{pattern.name}: the replacement gives other results or gradients than the reference")


def fuse_patterns(graph: fx.Graph, patterns: Sequence[Pattern], device: torch.device) -> Counter[str]:
    """Replace all occurrences of patterns, in place. Returns the number of occurrences of each, by name."""
    counts: Counter[str] = Counter()
    for pattern in patterns:
        if graph.find_nodes(op="call_function", target=pattern.anchor):
            finder = _Finder(graph, pattern, device)
            counts[pattern.name] += finder.replace(FORWARD)
            finder.replace(BACKWARD)
    return +counts


class _Finder:
    def __init__(self, graph: fx.Graph, pattern: Pattern, device: torch.device):
        self.graph, self.pattern = graph, pattern
        self.reference = partial(joint, pattern.reference, device=device)
        self.device = device
        self.last_variants: dict[tuple, tuple] = {}  # by phase, specs and numbers

    def replace(self, phase: str) -> int:
        """Replace matches that begin in the forward pass, or those entirely in the backward pass. Returns their
        number."""
        return sum(self._replace(phase, dtype) for dtype in DTYPES)

    def _replace(self, phase: str, dtype: torch.dtype) -> int:
        count, pattern = 0, self.pattern
        specs = tuple(Spec(s, torch.int64 if i in pattern.labels else dtype) for i, s in enumerate(pattern.shapes))
        numbers = HOLES[: pattern.numbers]
        trained = self.reference(specs, numbers, pattern.learned, ())
        count += self._replace_like(phase, trained, pattern.learned)
        if phase == FORWARD:
            evaluated = self.reference(specs, numbers, (), ())
            if len(evaluated.forward) < len(trained.forward):  # some values are computed only for the backward pass
                count += self._replace_like(phase, evaluated, ())
        return count

    def _replace_like(self, phase: str, loose: Joint, learned: tuple[int, ...]) -> int:
        count = 0
        for calls in _parts(loose, phase):
            calls = [n for n in calls if n.meta["phase"] == phase]
            like = {n: self.graph.find_nodes(op="call_function", target=n.target) for n in calls}
            first = min(calls, key=lambda n: len(like[n]))
            for node in like[first]:
                if node.users and node.meta["phase"] == phase:
                    search = SubgraphMatcher(calls, exact=False)
                    count += any(self._replace_exactly(phase, *operands, node)
                                 for _ in search.matches(first, node)
                                 if (operands := self._operands(loose, learned, search.mapping)))  # fmt: skip
        return count

    def _operands(self, loose: Joint, learned: tuple[int, ...], mapping: dict[fx.Node, fx.Node]) -> tuple | None:
        """Nodes of the operands or None, their specs, and the numbers. The spec of an operand that is not read is that
        of its gradient."""
        gradients = dict(zip(learned, loose.outputs[len(loose.outputs) - len(learned) :], strict=True))
        nodes = [mapping.get(x) for x in loose.inputs[: len(self.pattern.shapes)]]
        like = [n or mapping.get(gradients.get(i)) for i, n in enumerate(nodes)]  # pyright: ignore
        if not all(n and n.meta["val"].dtype != torch.float64 for n in like):
            return None
        numbers = {}
        for ours, theirs in mapping.items():
            if ours.op == "call_function":
                pairs = zip(leaves(ours), leaves(theirs), strict=True)
                numbers |= {a: b for a, b in pairs if isinstance(a, float) and a in HOLES}
        if len(numbers) != self.pattern.numbers:
            return None
        return nodes, tuple(n.meta["val"] for n in like if n), tuple(numbers[hole] for hole in HOLES[: len(numbers)])

    def _replace_exactly(self, phase: str, nodes: list[fx.Node | None], specs, numbers, at: fx.Node) -> bool:
        key = phase, specs, numbers
        cached = [self.last_variants[key]] if key in self.last_variants else []
        for variant in dict.fromkeys([*cached, *self.pattern.variants()]):
            reference = self.reference(specs, numbers, *variant)
            for calls in _parts(reference, phase):
                for first in calls:
                    if first.target != at.target or first.meta["phase"] != phase:
                        continue
                    search = SubgraphMatcher(calls)
                    search.mapping |= {p: n for p, n in zip(reference.inputs, nodes, strict=False) if n}
                    for _ in search.matches(first, at):
                        try:
                            new = self._replacement(specs, numbers, *variant)
                        except ValueError:  # the replacement does not support these operands
                            return False
                        if rewrite(self.graph, reference, new, search):
                            self.last_variants[key] = variant
                            return True
        return False

    def _replacement(self, specs, numbers, learns, reused) -> Joint:
        through = bool(reused) and self.pattern.reusing is not None
        function = self.pattern.reusing if through else self.pattern.replacement
        return joint(function, specs, numbers, learns, reused, self.device, through)  # pyright: ignore


def _parts(traced: Joint, phase: str) -> list[list[fx.Node]]:
    """The components that begin in the forward pass, or those entirely in the backward pass."""
    return [c for c in traced.components if (c[0].meta["phase"] == FORWARD) == (phase == FORWARD)]
