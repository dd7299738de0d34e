"""Prices of moves between many layouts at once, held against the shortest paths that are found one by one."""

from itertools import product
from math import prod
from random import Random

import numpy as np
import pytest

from tutti.plan.layouts.layout import Layout, Partial, R, Split
from tutti.plan.layouts.options import code
from tutti.plan.layouts.reshard import reshard, sent_bytes
from tutti.plan.layouts.reshard_costs import Moves
from tutti.plan.network.network import NEVER

SHAPE = (16, 48)
ITEMSIZE = 4


def bytes_sent(mesh):
    return Moves(mesh, lambda kind, axis, local: 0.0 if kind == "mask" else float(sent_bytes(kind, local, mesh[axis])))


def table(mesh, source: Layout, target: Layout) -> float:
    codes = [np.array([[code(at[axis]) for axis in mesh]]) for at in (source, target)]
    return float(bytes_sent(mesh).table(*codes, prod(SHAPE) * ITEMSIZE)[0, 0])


def shortest(mesh, source: Layout, target: Layout) -> float:
    return sum(step.sent(SHAPE, ITEMSIZE, mesh) for step in reshard(source, target, SHAPE, mesh, ITEMSIZE))


@pytest.mark.parametrize(("source", "target"), list(product([R, Split(0), Split(1), Split(1, 3), Partial()], repeat=2)))
def test_one_axis_is_the_shortest_path(source, target):
    mesh, a, b = {"a": 4}, Layout.of({"a": source}), Layout.of({"a": target})
    assert table(mesh, a, b) == shortest(mesh, a, b)


def layouts(mesh) -> list[Layout]:
    """Whatever fits, of plain and nested splits."""
    fitting = []
    for placements in product(
        [R, Partial(), Split(0), Split(0, 2), Split(0, 4), Split(1), Split(1, 2)], repeat=len(mesh)
    ):
        layout = Layout.of(dict(zip(mesh, placements, strict=True)))
        if layout.fits(SHAPE, mesh):
            fitting.append(layout)
    return fitting


def test_two_axes_are_never_cheaper_than_the_shortest_path_and_mostly_that():
    mesh, rng = {"a": 2, "b": 4}, Random(0)
    every = layouts(mesh)
    ratios = []
    for _ in range(600):
        source, target = rng.choice(every), rng.choice(every)
        ours, least = table(mesh, source, target), shortest(mesh, source, target)
        assert ours >= 0.93 * least, f"{source} to {target}"
        ratios.append(ours / least if least else 1.0)
    assert np.mean(np.array(ratios) < 1.05) > 0.75


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ({"a": Split(0), "b": Split(0, 2)}, {"a": Split(0)}),  # the inner axis gathers
        ({"a": Split(0), "b": Split(0, 2)}, {}),  # both do
        ({"a": Partial(), "b": Partial()}, {"a": Split(0), "b": Split(0, 2)}),
        ({"a": Split(0), "b": Partial()}, {"a": Split(0), "b": Split(1)}),
        ({"a": Split(0), "b": Split(1)}, {"a": Split(0), "b": Split(0, 2)}),
        ({"b": Split(0)}, {"a": Split(0), "b": Split(0, 2)}),  # the inner axis must let go first
    ],
)  # fmt: skip
def test_what_textbook_plans_do_is_the_shortest_path(source, target):
    mesh = {"a": 2, "b": 4}
    source, target = Layout.of(source), Layout.of(target)
    assert table(mesh, source, target) == pytest.approx(shortest(mesh, source, target))


def test_what_cannot_be_done_is_never():
    mesh = {"a": 2}
    assert table(mesh, Layout.of({"a": Partial("max")}), Layout.of({"a": Partial()})) == NEVER
    assert table(mesh, Layout(), Layout.of({"a": Partial("max")})) == NEVER


def test_outer_axes_send_less_than_inner_ones():
    """Scatters begin inside, gathers outside: so the outer axis, whose links are slower, has the smaller tensor."""
    sent: dict[str, int] = {}

    def price(kind, axis, local):
        sent[f"{kind} {axis}"] = local
        return 1.0

    moves, mesh = Moves({"a": 2, "b": 4}, price), ("a", "b")
    split = np.array([[code(Split(0)), code(Split(0, 2))]])
    partial, whole = np.array([[code(Partial())] * 2]), np.array([[code(R)] * 2])
    moves.table(partial, split, 64)
    moves.table(split, whole, 64)
    assert sent == {"reduce_scatter b": 64, "reduce_scatter a": 16, "all_gather a": 8, "all_gather b": 16}
    assert mesh == tuple(moves.mesh)
