"""Updates write into the parameters, all of a group in one call, with the same numbers."""

import torch

import tutti
import zoo
from tutti.lower.inplace import update_in_place
from tutti.lower.shard import shard
from tutti.nn.adam import IN_PLACE
from tutti.plan.plan import Plan
from tutti.run.code import generate


def programs(optimizer):
    model = zoo.llama(1)
    step = tutti.capture(model, zoo.tokens(4), optimizer(model))
    step = step.keep([name for name in step.outputs if name not in step.gradient_names])
    return model, step, [shard(step, Plan({"dp": 1}), 0) for _ in range(2)]


def run(step, program, model):
    generator = torch.Generator().manual_seed(0)
    values = {}
    for name, (_, spec) in program.inputs.items():
        kind, _, key = name.partition(":")
        if kind == "param":
            values[name] = dict(model.named_parameters())[key].detach().clone()
        elif kind in ("exp_avg", "exp_avg_sq"):
            values[name] = torch.rand(spec.shape, generator=generator)
        elif kind == "buffer":
            values[name] = dict(model.named_buffers())[key].clone()
        else:
            values[name] = torch.full((), 0.01, dtype=torch.float64) if kind == "lr" else torch.tensor(3)
    values |= {f"batch:{k}": v for k, v in zoo.tokens(4).items()} | step.constants
    generated = generate(program.graph)(*values.values())
    try:
        next(generated)
    except StopIteration as stop:
        return values, dict(zip(program.outputs, stop.value, strict=True))
    raise AssertionError("nothing is communicated by one rank")


def groups(model):
    vectors = [p for p in model.parameters() if p.ndim == 1]
    matrices = [p for p in model.parameters() if p.ndim > 1]
    return torch.optim.AdamW([{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.1}])


def test_one_call_for_each_group_with_the_same_numbers():
    model, step, (plain, changed) = programs(groups)
    update_in_place(changed.graph)
    changed.graph.lint()
    targets = [n.target for n in changed.graph.nodes]
    assert not set(targets) & set(IN_PLACE) and targets.count(torch.ops.tutti.adam_.default) == 2
    (_, expected), (held, ours) = run(step, plain, model), run(step, changed, model)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-7)
    for name in step.state_names:
        assert ours[name] is held[name], f"{name} is written where it lies"


def test_an_input_that_is_read_later_is_not_overwritten():
    *_, (program, _) = programs(lambda model: torch.optim.AdamW(model.parameters()))
    old = next(n for n in program.graph.nodes if n.meta.get("input") == "param:model.norm.weight")
    output = next(n for n in program.graph.nodes if n.op == "output")
    with program.graph.inserting_before(output):
        after = program.graph.call_function(torch.ops.aten.neg.default, (old,))
    output.args = ((*output.args[0], after),)
    update_in_place(program.graph)
    left = [n for n in program.graph.nodes if n.target in IN_PLACE]
    assert len(left) == 1 and left[0].args[0] is old
