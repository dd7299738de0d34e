"""Options: every legal choice of all axes, each layout once."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from tutti.ir.spec import Spec
from tutti.ir.step_graph import FORWARD
from tutti.ops import parse
from tutti.plan.layouts.choice import Choice, candidates, layouts, legal
from tutti.plan.layouts.layout import Layout, Split
from tutti.plan.layouts.options import PLACEMENTS, OptionTable
from tutti.plan.layouts.problem import Operator


def operator(notation: str, inputs, output, label: str = "o") -> Operator:
    node = object() if inputs else None
    return Operator(label, parse(notation, inputs, [output]), [Spec(output, torch.float32)], FORWARD, 0, 0, node, 1)


MM = operator("m k, k n -> m n | ~0 ~1", [(8, 12), (12, 6)], (8, 6))
CUTS = {"o": {"m": {(1, 1), (2, 1)}, "k": {(1, 1)}, "n": {(1, 1)}}}


def test_all_legal_combinations_are_there_once():
    mesh = {"a": 2, "b": 2}
    options = OptionTable(mesh, CUTS)[MM]
    combinations = [layouts(MM.rule, choices) for choices in options.choices]
    assert len({repr(at) for at in combinations}) == len(combinations)
    for a, b in product([None, *candidates(MM.rule, CUTS["o"], 2)], repeat=2):
        choices = {axis: c for axis, c in (("a", a), ("b", b)) if c}
        if legal(MM.rule, choices, mesh):
            assert layouts(MM.rule, choices) in combinations
    assert all(legal(MM.rule, choices, mesh) for choices in options.choices)


def test_axes_that_split_one_factor_nest_in_every_order():
    options = OptionTable({"a": 2, "b": 3}, {"o": {"k": {(1, 1)}}})[MM]
    first = {str(layouts(MM.rule, c)[0][0]) for c in options.choices if all(x.factor == "k" for x in c.values())}
    assert {"a:S1 b:S1/2", "a:S1/3 b:S1"} <= first


def test_codes_say_how_operands_and_outputs_lie():
    mesh = {"a": 2, "b": 2}
    options = OptionTable(mesh, CUTS)[MM]
    for i, choices in enumerate(options.choices):
        ins, outs = layouts(MM.rule, choices)
        for at, codes in zip([*ins, *outs], [*options.inputs, *options.outputs], strict=True):
            assert Layout.of({axis: PLACEMENTS[c] for axis, c in zip(mesh, codes[i], strict=True)}) == at


def test_only_what_is_allowed_and_what_is_legal_together():
    def only(o, axis, choices):
        return [c for c in choices if c and c.factor == "n"]

    assert OptionTable({"a": 2}, CUTS, only)[MM].choices == [{"a": Choice("n")}]
    tight = OptionTable({"a": 2, "b": 7}, CUTS, only)[MM].choices  # 6 columns cannot be split into 7 parts
    assert tight == [{"a": Choice("n")}, {}], "computing the whole is always possible"


def test_inputs_are_no_partial_sums_and_operators_without_a_rule_share_nothing():
    feed = operator("-> a b", [], (4, 4), "in")
    options = OptionTable({"a": 2}, {"in": {}})[feed]
    assert {PLACEMENTS[c] for c in options.outputs[0][:, 0]} >= {Split(0), Split(1)} and len(options) == 3


@pytest.mark.parametrize("inputs", [1, 2])
def test_rules_of_one_notation_and_unlike_operands_are_told_apart(inputs):
    table = OptionTable({"a": 2}, {"o": {}})
    for count in (1, 2, inputs):
        whole = operator(", ".join(["a!"] * count) + " -> a!", [(4,)] * count, (4,))
        whole.rule = replace(whole.rule, notation="whole")
        assert len(table[whole].inputs) == count
