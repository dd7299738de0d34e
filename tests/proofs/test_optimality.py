"""The chosen layouts are the cheapest of all: held against every assignment.

Small problems, random ones and pieces cut out of models, on meshes of two and three axes. The cost of every combination
of the choices of all operators along all axes is written down by its definition, in one array with a dim for each
operator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from math import prod
from random import Random

import numpy as np
import pytest
import torch
import transformers
from torch import fx

import models
import tutti
import zoo
from tutti.ir.spec import Spec
from tutti.ir.step_graph import BACKWARD, FORWARD, UPDATE
from tutti.ops import parse
from tutti.plan.layouts.price import Pricer
from tutti.plan.layouts.problem import Edge, Operator, Problem, problem_of
from tutti.plan.network.sharding_problem import ShardingProblem

MESHES = {"cpu:4": {"a": 2, "b": 2}, "h100:2x3": {"a": 2, "b": 3}, "a100-80:4x2": {"a": 2, "b": 2, "c": 2}}
MOST = 4_000_000  # assignments that are tried
NOTATIONS = ["a b -> a b", "a b -> a b | ~0", "a b! -> a b!", "a! b -> a! b", "a b -> b a", "a:sum b -> b | ~0"]
JOINS = ["a b, a b -> a b | ~01", "a k, k b -> a b | ~0 ~1"]
SHAPE = (24, 24)


def everything(joint: ShardingProblem) -> np.ndarray:
    """The costs of all assignments."""
    problem, labels = joint.problem, list(joint.options)
    sizes = [len(joint.options[label]) for label in labels]
    assert prod(sizes) <= MOST
    total = np.zeros(sizes)

    def add(costs: np.ndarray, *dims: int) -> None:
        """A term that depends on the choices of these operators, which may be one and the same."""
        letters = [chr(97 + d) for d in dims]
        axes = sorted(set(dims))
        once = np.einsum(f"{''.join(letters)}->{''.join(chr(97 + d) for d in axes)}", costs)
        total.__iadd__(once.reshape([n if d in axes else 1 for d, n in enumerate(sizes)]))

    readers = defaultdict(list)
    for edge in problem.edges:
        readers[edge.tensor].append(edge)
    for i, label in enumerate(labels):
        o = problem.operators[label]
        add(np.array([o.count * joint.pricer.compute(o, c) for c in joint.options[label].choices]), i)
    for tensor in problem.outputs:
        outputs = joint.options[tensor[0]].outputs[tensor[1]]
        add(
            joint.move(tensor, outputs, np.zeros((1, outputs.shape[1]), dtype=int), FORWARD)[:, 0],
            labels.index(tensor[0]),
        )
    for tensor, edges in readers.items():
        add(moved(joint, tensor, edges), labels.index(tensor[0]), *(labels.index(e.reader) for e in edges))
    return total


def moved(joint: ShardingProblem, tensor, edges: list[Edge]) -> np.ndarray:
    """What it costs to bring a tensor from its maker to all readers: (options of the maker, of each reader)."""
    outputs, count = joint.options[tensor[0]].outputs[tensor[1]], joint.problem.operators[tensor[0]].count
    reads = [joint.read(edge) for edge in edges]
    weights = [min(count, joint.problem.edges[edge]) for edge in edges]
    phases = [joint.phase(edge) for edge in edges]
    if len(edges) == 1:
        return weights[0] * joint.move(tensor, outputs, reads[0], phases[0])
    every = np.unique(np.concatenate([outputs, *reads]), axis=0)
    shared, several = min(count, sum(joint.problem.edges[e] for e in edges)), len(set(phases)) > 1
    first = next(phase for phase in (FORWARD, BACKWARD, UPDATE) if phase in phases)
    best = np.full([len(outputs), *map(len, reads)], np.inf)
    for settled in every[:, None]:
        cost = shared * joint.move(tensor, outputs, settled, first)[:, 0]
        if several:
            cost = np.where(joint.moves[FORWARD].gathers(outputs, settled)[:, 0], NEVER, cost)
        cost = cost.reshape(-1, *[1] * len(edges))
        for phase in dict.fromkeys(phases):
            group = [i for i, p in enumerate(phases) if p == phase]
            halls = every[:, None] if several and len(group) > 1 else [settled]
            options = []
            for hall in halls:
                through = shared * joint.move(tensor, settled, hall, phase)[0, 0] if len(halls) > 1 else 0.0
                for i in group:
                    one = weights[i] * joint.move(tensor, hall, reads[i], phase)[0]
                    through = through + one.reshape([-1 if d == i + 1 else 1 for d in range(len(edges) + 1)])
                options.append(through)
            cost = cost + np.minimum.reduce(options)
        best = np.minimum(best, cost)
    return best


NEVER = 1e9


def random_problem(seed: int, count: int) -> Problem:
    """Two inputs and some operators, each of which reads what came before it."""
    rng = Random(seed)
    spec, operators, edges = Spec(SHAPE, torch.float32), {}, {}
    for i in range(2):
        operators[f"in{i}"] = Operator(f"in{i}", parse("-> a b", [], [SHAPE]), [spec], FORWARD, 0, 0, None, 1)
    for i in range(count):
        notation = rng.choice(NOTATIONS + JOINS * 3)
        operands, outputs = notation.split("|")[0].split("->")
        shapes = [SHAPE] * (operands.count(",") + 1)
        output_shape = SHAPE if len(outputs.split()) == 2 else SHAPE[:1]
        before = [label for label, o in operators.items() if o.outputs[0].shape == SHAPE]
        phase = rng.choice([FORWARD, FORWARD, BACKWARD, UPDATE])
        operators[f"op{i}"] = Operator(
            f"op{i}", parse(notation, shapes, [output_shape]), [Spec(output_shape, torch.float32)], phase,
            rng.randrange(10**9), 1, fx.Graph().placeholder("x"), rng.choice([1, 1, 3]),
        )  # fmt: skip
        for operand in range(len(shapes)):
            edges[Edge((rng.choice(before), 0), f"op{i}", operand)] = rng.choice([1, 1, 3])
    problem = Problem(operators, edges, {(list(operators)[-1], 0): 1} if rng.random() < 0.5 else {})
    problem.cuts = {label: {f: {(1, 1)} for f in o.rule.sizes} for label, o in operators.items()}
    return problem


@cache
def whole(name: str) -> Problem:
    if name in ("llama", "gpt2"):
        model = getattr(zoo, name)(2)
        return problem_of(tutti.capture(model, zoo.tokens(), torch.optim.AdamW(model.parameters())))
    model, batch, loss = models.case(name)
    return problem_of(tutti.capture(model, batch, torch.optim.AdamW(model.parameters()), loss))


def piece(name: str, seed: int, count: int) -> Problem:
    """Some operators of a model that are joined to one another, and what lies between them."""
    rng, problem = Random(seed), whole(name)
    joined = defaultdict(set)
    for edge in problem.edges:
        joined[edge.tensor[0]].add(edge.reader)
        joined[edge.reader].add(edge.tensor[0])
    taken = [rng.choice(sorted(joined))]
    while len(taken) < count:
        near = sorted({other for label in taken for other in joined[label]} - set(taken))
        if not near:
            break
        taken.append(rng.choice(near))
    edges = {e: n for e, n in problem.edges.items() if {e.tensor[0], e.reader} <= set(taken)}
    outputs = {t: n for t, n in problem.outputs.items() if t[0] in taken}
    return Problem({label: problem.operators[label] for label in taken}, edges, outputs, [], problem.cuts)


def check(make: Callable[[int], Problem], on: str, counts: Iterable[int]) -> None:
    """The chosen cost is the least of all, for the first of so many operators that can all be tried."""
    for count in counts:
        joint = ShardingProblem(make(count), Pricer(tutti.Cluster.parse(on), MESHES[on]))
        if prod(map(len, joint.options.values())) <= MOST:
            break
    chosen, least = joint.choose(), everything(joint).min()
    assert chosen.cost == pytest.approx(least, rel=1e-9) and chosen.bound == pytest.approx(least, rel=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_random_problems(seed):
    check(lambda count: random_problem(seed, count), list(MESHES)[seed % 2], (4, 3, 2))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "edsr", "dlrm"])
def test_pieces_of_models(name, seed):
    check(lambda count: piece(name, seed, count), list(MESHES)[seed % 3], range(8, 1, -1))


def wide() -> Problem:
    """A Llama whose parameters are about as large as its activations."""
    config = transformers.LlamaConfig(
        hidden_size=1024, num_hidden_layers=2, num_attention_heads=8, intermediate_size=2816, vocab_size=8192
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).train()
        ids = torch.empty(8, 128, dtype=torch.long)
    return problem_of(tutti.capture(model, {"input_ids": ids, "labels": ids}, torch.optim.AdamW(model.parameters())))


def test_axes_are_not_decided_one_by_one():
    """To decide one axis, and then the other given that, costs more, whichever is first."""
    problem, pricer = wide(), Pricer(tutti.Cluster.parse("h100:2x4"), {"a": 2, "b": 4})
    together = ShardingProblem(problem, pricer).choose()
    assert together.gap < 1e-6
    for first in pricer.mesh:
        alone = ShardingProblem(
            problem, pricer, None, lambda o, axis, legal, f=first: legal if axis == f else [None]
        ).choose()

        def then(o, axis, legal, f=first, taken=alone.choices):
            return [taken[o.label].get(f)] if axis == f else legal

        assert ShardingProblem(problem, pricer, None, then).choose().cost > 1.004 * together.cost
