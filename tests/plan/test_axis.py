"""The integer program finds what trying everything finds."""

from itertools import product
from random import Random

import pytest
import torch
from torch import fx

from tutti.graph.step_graph import Spec
from tutti.plan.axis import Prices, kind_of, solve
from tutti.plan.choice import Choice, candidates, input_placement, output_placement
from tutti.plan.layout import Partial, R, Split
from tutti.plan.problem import Edge, Operator, Problem
from tutti.rules import parse

SHAPE = (8, 8)
NOTATIONS = ["a b -> a b", "a b -> a b | ~0", "a b! -> a b!", "a! b -> a! b", "a b -> b a"]
JOINS = ["a b, a b -> a b | ~01", "a k, k b -> a b | ~0 ~1"]


def random_problem(rng: Random) -> Problem:
    """Two inputs and four operators, each of which reads what came before it."""
    spec, operators, edges = Spec(SHAPE, torch.float32), {}, {}
    for i in range(2):
        operators[f"in{i}"] = Operator(f"in{i}", parse("-> a b", [], [SHAPE]), [spec], "forward", 0, 0, None, 1)
    for i in range(4):
        notation, before = rng.choice(NOTATIONS + JOINS * 2), list(operators)
        count = 2 if "," in notation else 1
        rule = parse(notation, [SHAPE] * count, [SHAPE])
        phase = rng.choice(["forward", "backward"])
        operators[f"op{i}"] = Operator(f"op{i}", rule, [spec], phase, 1, 1, fx.Graph().placeholder("x"), 1)
        for operand in range(count):
            edges[Edge((rng.choice(before), 0), f"op{i}", operand)] = 1
    return Problem(operators, edges, {("op3", 0): 1})


def cost(problem, chosen, prices) -> float | None:
    """By the definition: operators, and every reshard once for all of a phase that need it so."""
    total, paid = sum(prices.compute(o, chosen[label]) for label, o in problem.operators.items()), set()
    edges = [(e.tensor, e.reader, e.operand) for e in problem.edges] + [(t, "", 0) for t in problem.outputs]
    for tensor, reader, operand in edges:
        made = output_placement(problem.operators[tensor[0]].rule, chosen[tensor[0]], 0) if chosen[tensor[0]] else R
        o = problem.operators.get(reader)
        read = input_placement(o.rule, chosen[reader], operand) if o and chosen[reader] else R
        price = prices.reshard(tensor, made, read)
        if price is None:
            return None
        key = (tensor, made, read, o.phase if o and isinstance(made, Split) else "")
        if price and key not in paid:
            paid.add(key)
            total += price
    return total


@pytest.mark.parametrize("seed", range(12))
def test_equals_brute_force(seed):
    rng = Random(seed)
    problem = random_problem(rng)
    options = {label: [None, *candidates(o.rule, {}, 2)] for label, o in problem.operators.items()}
    times = {}
    for label, found in options.items():
        times |= {(label, s): rng.randint(1, 20) * (1.0 if s is None else 0.5) * 1e-6 for s in found}
    kinds = {kind: rng.randint(1, 12) * 1e-6 for kind in ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")}

    def reshard(tensor, source, target):
        kind = kind_of(source, target)
        return None if kind is None else kinds.get(kind, 0.0)

    prices = Prices(lambda o, s: times[o.label, s], reshard)
    everything = [cost(problem, dict(zip(options, combination, strict=True)), prices)
                  for combination in product(*options.values())]  # fmt: skip
    assert cost(problem, solve(problem, options, prices), prices) == pytest.approx(
        min(c for c in everything if c is not None), rel=1e-3
    )


@pytest.mark.parametrize(
    ("source", "target", "kind"),
    [
        (R, Split(0), ""), (R, Partial(), ""), (Split(0), Split(0), ""), (Split(0), Split(1), "all_to_all"),
        (Split(0), R, "all_gather"), (Partial(), R, "all_reduce"), (Partial(), Split(1), "reduce_scatter"),
        (R, Partial("max"), None), (Partial("max"), Partial(), None),
    ],
)  # fmt: skip
def test_kind_of(source, target, kind):
    assert kind_of(source, target) == kind


def test_no_combination_is_an_error():
    problem = random_problem(Random(0))
    options = {label: [Choice("a")] if o.is_input else [None] for label, o in problem.operators.items()}
    prices = Prices(lambda o, s: 1e-6, lambda tensor, p, q: None if p != q else 0.0)
    with pytest.raises(ValueError, match="no combination of choices is possible"):
        solve(problem, options, prices)
