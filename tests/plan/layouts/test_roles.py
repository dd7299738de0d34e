"""What the textbook allows an axis to do."""

import pytest
import torch

import tutti
import zoo
from tutti.ir.op_info import FLOPS
from tutti.plan.layouts.layout import Layout, Split
from tutti.plan.layouts.options import OptionTable
from tutti.plan.layouts.problem import problem_of
from tutti.plan.layouts.roles import Free, Roles
from tutti.plan.textbook import Textbook


@pytest.fixture(scope="module")
def problem():
    model = zoo.llama(1)
    return problem_of(tutti.capture(model, zoo.tokens(), torch.optim.AdamW(model.parameters())))


def options(problem, book):
    return OptionTable(book.mesh, problem.cuts, Roles(problem, book, {}, {}))


@pytest.mark.parametrize(("zero", "param", "state"), [(0, False, False), (1, False, True), (3, True, True)])
def test_the_zero_stage_says_what_is_stored_split(problem, zero, param, state):
    table = options(problem, Textbook(4, 1, zero))
    for o in problem.operators.values():
        if o.kind in ("param", "exp_avg"):
            split = [bool(choices) for choices in table[o].choices]
            assert all(x == (param if o.kind == "param" else state) for x in split), o.label


def test_data_parallelism_splits_the_batch_and_uses_weights_whole(problem):
    table = options(problem, Textbook(4, 1, 3))
    batch = problem.operators["batch:input_ids"]
    assert [str(c["dp"]) for c in table[batch].choices] == [batch.rule.outputs[0][0][0]]
    for o in problem.operators.values():
        if o.target in FLOPS and o.label in problem.weight_operand:
            factors = {c["dp"].factor for c in table[o].choices if "dp" in c}
            assert factors and not factors & problem.weight_factors(o), o.label


def test_tensor_parallelism_uses_matrices_where_they_lie(problem):
    table = options(problem, Textbook(1, 4))
    for o in problem.operators.values():
        if o.target in FLOPS and o.label in problem.weight_operand:
            assert {c["tp"].factor for c in table[o].choices} <= problem.weight_factors(o), o.label


def test_gradients_are_found_through_views(problem):
    label = "model.layers.*.mlp.up_proj/backward/"
    assert any(g.startswith(label + "mm") for g in problem.gradients)
    assert not any("/forward/" in g or "/update/" in g for g in problem.gradients)


def test_inputs_that_are_given_lie_so(problem):
    name, mesh = "param:model.layers.*.mlp.up_proj.weight", {"dp": 2, "tp": 2}
    o = problem.operators[name]
    free = Free(problem, mesh, {name: {"tp": Split(1)}}, {})
    table = OptionTable(mesh, problem.cuts, free, free.required)
    assert {str(c["tp"]) for c in table[o].choices} == {"b"} and any("dp" in c for c in table[o].choices)
    free = Free(problem, mesh, {}, {name: Layout.of({"dp": Split(0)})})
    table = OptionTable(mesh, problem.cuts, free, free.required)
    assert [{a: str(c) for a, c in choices.items()} for choices in table[o].choices] == [{"dp": "a"}]


def test_a_pin_that_does_not_divide_is_an_error(problem):
    name, mesh = "param:model.norm.weight", {"tp": 3}
    with pytest.raises(ValueError, match=r"of shape \(64,\) cannot be split at dim 0 over 3 devices of axis 'tp'"):
        OptionTable(mesh, problem.cuts, Free(problem, mesh, {name: {"tp": Split(0)}}, {}))[problem.operators[name]]
