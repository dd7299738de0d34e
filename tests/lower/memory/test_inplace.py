"""Updates write into the parameters, all of a group in one call, with the same numbers."""

import pytest
import torch

import tutti
import zoo
from cases import crossed
from tutti.analysis.memory import CPU, course
from tutti.analysis.replay import replay
from tutti.exec.kernels.codegen import generate
from tutti.lower.memory import inplace as module
from tutti.lower.memory.inplace import update_in_place
from tutti.lower.overlap import bucket as merging
from tutti.lower.shard import shard
from tutti.nn.adam import IN_PLACE
from tutti.plan.plan import Plan
from tutti.tracing import optimizers


def programs(optimizer, layers=1, dtype=torch.float32, **options):
    model = zoo.llama(layers).to(dtype)
    step = tutti.capture(model, zoo.tokens(4), optimizer(model), **options)
    step = step.keep([name for name in step.outputs if name not in step.gradient_names])
    return model, step, [shard(step, Plan({"dp": 1}), 0) for _ in range(2)]


def run(step, program, model):
    generator = torch.Generator().manual_seed(0)
    values = {}
    for name, (_, spec) in program.inputs.items():
        kind, _, key = name.partition(":")
        if kind == "param":
            values[name] = dict(model.named_parameters())[key].detach().clone()
        elif kind == "master":
            values[name] = dict(model.named_parameters())[key].detach().float()
        elif kind in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
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
    (_, expected), (state, ours) = run(step, plain, model), run(step, changed, model)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-7)
    for name in step.state_names:
        assert ours[name] is state[name], f"{name} is written where it lies"


ADAM = torch.ops.tutti.adam_.default
KINDS = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters()),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
}


def gradients_held(program):
    """The most bytes of gradients that the Program holds at once."""
    played = replay(program)
    return max(now["gradients"] for _, now in course(played, CPU, points=len(played.events)))


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_gradients_die_piece_by_piece_with_the_same_bits(name, masters, monkeypatch):
    dtype = torch.bfloat16 if masters else torch.float32
    model, step, (late, early) = programs(KINDS[name], 3, dtype, fp32_master_weights=masters)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_let_go", lambda graph: None)
        update_in_place(late.graph)
    monkeypatch.setattr(module, "PIECE", 1 << 12)
    update_in_place(early.graph)
    early.graph.lint()
    whole = sum(step.spec(f"param:{key}").bytes for key in step.names("param"))
    assert gradients_held(late) > 0.9 * whole and gradients_held(early) < 0.3 * whole
    (_, expected), (state, ours) = run(step, late, model), run(step, early, model)
    for key, exact in expected.items():
        assert torch.equal(ours[key], exact), key
    for key in step.state_names:
        assert ours[key] is state[key], f"{key} is written where it lies"


def test_a_piece_is_a_call(monkeypatch):
    _, _, (whole, program) = programs(KINDS["adamw"], 3)
    update_in_place(whole.graph)
    monkeypatch.setattr(module, "PIECE", 1 << 14)
    update_in_place(program.graph)
    calls = [n for n in program.graph.nodes if n.target is ADAM]
    sizes = [sum(x.meta["val"].bytes for x in call.args[1]) for call in calls]
    assert len(calls) > 3 and min(sizes[:-1]) >= 1 << 14
    assert [n.target for n in whole.graph.nodes].count(ADAM) == 1, "all that has is less than a piece"


def test_gradients_that_wait_for_their_norm_are_updated_together(monkeypatch):
    _, _, (plain, program) = programs(KINDS["adamw"], 3, clip_norm=1.0)
    update_in_place(plain.graph)
    monkeypatch.setattr(module, "PIECE", 1)
    update_in_place(program.graph)
    assert [str(n) for n in program.graph.nodes] == [str(n) for n in plain.graph.nodes]
    assert [n.target for n in program.graph.nodes].count(ADAM) == 1


PLANS = ["dp4", "dp2xtp2", "zero1", "zero2", "tp2xzero3", "zero3xrecompute", "zero3xoffload2"]


def trained(name, optimizer, plan, cluster, folder=None):
    """Losses and parameters after three steps; GPT-2 has tied embeddings and dropout."""
    model, batch = {"llama": zoo.llama, "gpt2": zoo.gpt2}[name](), zoo.tokens(8)
    outside = {"memory": "1GiB", "folder": folder} if "offload" in plan else {}
    step = tutti.parallelize(model, KINDS[optimizer](model), batch, cluster=cluster, plan=plan, level="O0", **outside)
    return [step(batch).item() for _ in range(3)], step.state_dict(), step


QUICK = [("llama", "adamw", "zero2"), ("llama", "adamw", "zero3xoffload2"), ("llama", "adamw", "dp2xtp2"),
         ("gpt2", "sgd", "tp2xzero3")]  # fmt: skip


@pytest.mark.parametrize("name, optimizer, plan", crossed([("llama", "adamw"), ("gpt2", "sgd")], PLANS, quick=QUICK))
def test_pieces_give_the_numbers_of_one_device(name, optimizer, plan, monkeypatch, tmp_path):
    losses, state, _ = trained(name, optimizer, "single", "cpu:1")
    monkeypatch.setattr(module, "PIECE", 1)
    monkeypatch.setattr(merging, "BUCKET", 1 << 14)
    ours, after, step = trained(name, optimizer, plan, "cpu:4", str(tmp_path))
    events = replay(step.program).events
    computed = [i for i, event in enumerate(events) if event.phase == "backward" and event.allocated]
    written = [i for i, event in enumerate(events) if event.phase == "update" and event.writes]
    assert written[0] < computed[2 * len(computed) // 3], "updates go along with the backward pass"
    assert ours == pytest.approx(losses, rel=1e-5)
    for key, exact in state.items():
        assert (after[key] - exact).norm() <= 1e-5 * exact.norm(), key


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


@pytest.mark.parametrize("name", KINDS)
def test_an_input_that_another_part_reads_later_is_not_overwritten(name):
    """Those of the norms: by themselves, and in the call that updates all parameters."""
    model, step, (plain, changed) = programs(KINDS[name])
    later = {n for n in step.state_names if "norm" in n and not n.startswith("exp_avg_sq:")}
    for node in changed.graph.find_nodes(op="placeholder"):
        if node.meta["input"] in later:
            node.meta["read_later"] = True
    update_in_place(changed.graph)
    (_, expected), (state, ours) = run(step, plain, model), run(step, changed, model)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-7)
    before, _ = run(step, programs(KINDS[name])[2][0], model)
    assert later and all(torch.equal(state[n], before[n]) and ours[n] is not state[n] for n in later)
    assert all(ours[n] is state[n] for n in step.state_names if n not in later)


def test_what_an_update_reads_of_old_parameters_is_not_written_over_before(monkeypatch):
    class Averaging(torch.optim.SGD):
        pass

    monkeypatch.setitem(optimizers.TABLE, Averaging, None)  # removed again after the test

    @optimizers.register(
        Averaging,
        state=lambda group, param: {"mean": torch.zeros_like(param)},
        options=tuple(torch.optim.SGD([torch.ones(1)]).defaults),
    )
    def averaging(group, param, grad, state, step, lr):
        new = param.float() - lr.to(torch.float32) * grad.float()
        return new.to(param.dtype), {"mean": 0.5 * state["mean"] + 0.5 * param}

    model = torch.nn.Linear(4, 4).to(torch.bfloat16)
    old = {name: p.detach().clone() for name, p in model.named_parameters()}
    step = tutti.parallelize(model, Averaging(model.parameters(), lr=0.5), (torch.ones(2, 4).bfloat16(),),
                             loss=lambda m, b: m(b[0]).float().square().sum(), cluster="cpu:1", plan="single",
                             level="O0")  # fmt: skip
    step((torch.ones(2, 4).bfloat16(),))
    state = step.training_state()
    for name, value in old.items():
        torch.testing.assert_close(state[f"mean:{name}"], 0.5 * value)
