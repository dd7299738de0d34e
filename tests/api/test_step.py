"""The one line: its contract, its errors, and that what it keeps can be taken out and put back."""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import tutti
import zoo
from cases import slow
from tutti.ir.spec import Spec

PAGE = Path(__file__).parents[2] / "docs/tutorial/laptop-cluster.md"


def make(
    plan: str = "single", cluster: str = "cpu:1", *, level="O0", model=None, lr: float = 1e-3, **options
) -> tutti.Step:
    model = model or zoo.llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    options = {"batch": zoo.tokens(), "cluster": cluster, "plan": plan, "level": level, **options}
    return tutti.parallelize(model, optimizer, **options)


class Net(nn.Module):
    """A dropout and a norm that differ in evaluation, and running statistics."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))

    def forward(self, x, y):
        return nn.functional.mse_loss(self.inner(x), y)


def pair(n: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(n, 6, generator=generator), torch.randn(n, 4, generator=generator)


def test_modes_are_left_as_they_were():
    model = zoo.gpt2()
    model.transformer.h[0].eval()
    modes = [m.training for m in model.modules()]
    step = make(model=model)
    step(zoo.tokens())
    step.evaluate(zoo.tokens())
    assert [m.training for m in model.modules()] == modes


def test_evaluation_is_that_of_the_eager_model():
    model, data = Net(), pair()
    step = make("dp3", "cpu:3", model=model, batch=data)
    model.eval()
    assert step.evaluate(data).item() == pytest.approx(model(*data).item(), rel=1e-6)


def test_gradients_are_autograds():
    model, data = zoo.llama(), zoo.tokens()
    step = make("dp2xtp2", "cpu:4", model=model)
    gradients = step.gradients(data)
    model(**data).loss.backward()
    for name, p in model.named_parameters():
        assert torch.allclose(gradients[name], p.grad, rtol=1e-4, atol=1e-7), name


def test_state_dict_loads_into_the_model():
    model = zoo.gpt2()
    step = make("tp4", "cpu:4", model=model)
    step(zoo.tokens())
    fresh = zoo.gpt2(seed=5)
    fresh.load_state_dict(step.state_dict())
    assert torch.equal(fresh.lm_head.weight, fresh.transformer.wte.weight)
    assert fresh.eval()(**zoo.tokens()).loss.item() == pytest.approx(step.evaluate(zoo.tokens()).item(), rel=1e-5)


def test_sharded_state_is_this_ranks_part():
    step = make("zero3", "cpu:4")
    whole, part = (step.state_dict(sharded)["lm_head.weight"] for sharded in (False, True))
    assert part.numel() * 4 == whole.numel()
    dim = 0 if len(part) < len(whole) else 1  # either costs the same
    assert torch.equal(part, whole.chunk(4, dim)[0])


@pytest.mark.parametrize(("plan", "cluster"), [("zero3", "cpu:4"), slow("dp3", "cpu:3"), slow("tp2xzero3", "cpu:4")])
def test_training_state_goes_from_any_plan_to_any_other(plan, cluster):
    straight, moved = make("tp2", "cpu:2"), make("tp2", "cpu:2")
    batches = [zoo.tokens(seed=i) for i in range(4)]
    for b in batches[:2]:
        straight(b), moved(b)
    other = make(plan, cluster, model=zoo.llama(seed=9))
    other.load_training_state(moved.training_state())
    losses = [(straight(b).item(), other(b).item()) for b in batches[2:]]
    assert [o for _, o in losses] == pytest.approx([s for s, _ in losses], rel=1e-5)


def test_state_of_another_model_is_refused():
    state = make().training_state()
    with pytest.raises(ValueError, match=r"lacks 'exp_avg:transformer"):
        make(model=zoo.gpt2()).load_training_state(state)
    state["param:lm_head.weight"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"param:lm_head.weight has \(2, 2\) torch.float32 in the state, \(96, 64\)"):
        make().load_training_state(state)


def test_another_shape_is_captured_once():
    step = make("dp2", "cpu:2")
    step(zoo.tokens())
    first = len(step._executables.plans)
    step(zoo.tokens(length=8)), step(zoo.tokens(length=8)), step(zoo.tokens(batch=6))
    assert (first, len(step._executables.plans)) == (1, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b.pop("labels"), "the batch lacks 'labels'"),
        (lambda b: b.update(extra=b["labels"]), "the batch has 'extra'"),
        (lambda b: b.update(labels=b["labels"].float()), "'labels' is torch.float32; it was torch.int64"),
        (lambda b: b.update(labels=[1, 2]), "'labels' is a list"),
    ],
)
def test_a_wrong_batch(change, message):
    step, batch = make("dp4", "cpu:4"), zoo.tokens()
    change(batch)
    with pytest.raises(ValueError, match=message):
        step(batch)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"plan": "qp4", "cluster": "cpu:4"}, "no plan 'qp4'"),
        ({"plan": "ep4", "cluster": "cpu:4"}, "plan 'ep4': the model has no experts"),
        ({"plan": "dp3", "cluster": "cpu:4"}, "needs 3 devices, not 4"),
        ({"plan": tutti.Plan({"dp": 2}), "cluster": "cpu:4"}, "the plan is for 2 devices, cpu:4 has 4"),
        ({"plan": tutti.Plan({"dp": 1}, operators={"model.leyers.*.mlp": {}})}, "the plan names 'model.leyers"),
        ({"plan": None}, "plan is None; it may be auto, dp, tp, .*, the path of a saved plan, or a tutti.Plan"),
        ({"plan": "zreo3"}, "no plan 'zreo3': did you mean 'zero3'?"),
        ({"cluster": 4}, "cluster is 4; it may be 'auto', a name such as 'cpu:4', or a tutti.Cluster"),
        ({"accumulate": 0}, "accumulate is 0"),
        ({"accumulate": 5}, "does not divide into 5 microbatches"),
        (
            {"pins": [tutti.pin("nothing.*", dim=0, axis="tp")], "cluster": "cpu:2", "plan": "tp"},
            "matches no parameter",
        ),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)


def test_the_order_of_keys_is_none_of_the_graphs():
    step, batch = make(), zoo.tokens()
    step(batch)
    step(dict(reversed(batch.items())))
    assert len(step._executables.plans) == len(step._executables.executors) == 1


@pytest.mark.parametrize("level", [slow("O1"), "O2"])
@pytest.mark.starts
def test_a_token_that_there_is_not(level):
    step, batch = make(level=level), zoo.tokens()
    before = step.state_dict()
    batch["input_ids"][0, 3] = 96
    with pytest.raises(IndexError, match="out of range"):
        step(batch)
    assert all(torch.equal(x, before[name]) for name, x in step.state_dict().items()) and step.steps == 0
    assert step(zoo.tokens()).isfinite()


def test_no_batch():
    with pytest.raises(ValueError, match="the batch is a NoneType; give a dict or tuple of tensors"):
        make(batch=None)


def test_no_optimizer():
    with pytest.raises(ValueError, match=r"the optimizer is a NoneType; it must be one of torch\.optim"):
        tutti.parallelize(zoo.llama(1), None, zoo.tokens())


def test_an_unknown_level():
    model = zoo.llama()
    with pytest.raises(ValueError, match="unknown level 'O7'; expected one of auto, O0, O1, O2"):
        tutti.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), zoo.tokens(), level="O7")


def test_learning_rates_may_change_and_nothing_else():
    step = make()
    step.optimizer.param_groups[0]["lr"] = 0.0
    before = step.state_dict()
    step(zoo.tokens())
    assert torch.equal(before["model.norm.weight"], step.state_dict()["model.norm.weight"])
    step.optimizer.param_groups[0]["weight_decay"] = 0.5
    with pytest.raises(ValueError, match=r"weight_decay of parameter group 0 was 0.01 .* and is 0.5 now"):
        step(zoo.tokens())


@pytest.mark.parametrize("plan", ["dp", slow("zero1"), "zero2", slow("zero3"), slow("dp2xtp2")])
def test_accumulation_is_the_plain_loop(plan):
    model, data = zoo.llama(), zoo.tokens(batch=24)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    step = tutti.parallelize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        data,
        cluster="cpu:4",
        plan=plan,
        level="O0",
        accumulate=2,
        clip_norm=1.0,
    )
    for _ in range(3):
        total = 0.0
        for i in range(2):
            loss = plain(**{k: v.chunk(2)[i] for k, v in data.items()}).loss / 2
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert step(data).item() == pytest.approx(total, rel=1e-5)
    state = step.state_dict()
    for name, p in plain.named_parameters():
        assert (state[name] - p).norm() <= 1e-5 * p.norm(), name


class Biases(nn.Module):
    """Two parameters with one gradient, and one whose gradient is a broadcast number."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.full((6,), 0.5)) for _ in range(3))

    def forward(self, x):
        return (x + self.a + self.b).square().mean() + self.c.sum() * x.mean()


def test_equal_and_broadcast_gradients_accumulate_apart():
    model, data = Biases(), (pair()[0],)
    states = [make(model=copy.deepcopy(model), batch=data, accumulate=n) for n in (1, 3)]
    for step in states:
        step(data)
    one, three = (step.state_dict() for step in states)
    for name in "abc":
        torch.testing.assert_close(three[name], one[name])


@pytest.mark.parametrize("seed", [0, slow(1)])
def test_any_plan_evaluates_and_takes_other_shapes(seed):
    model = zoo.llama(1)
    graph = tutti.capture(model, zoo.tokens(), torch.optim.AdamW(model.parameters()))
    step, short = make(tutti.random_plan(graph, 4, seed), "cpu:4", model=model), zoo.tokens(length=8)
    assert step.evaluate(zoo.tokens()).item() == pytest.approx(model(**zoo.tokens()).loss.item(), rel=1e-5)
    loss = model(**short).loss.item()
    assert step(short).item() == pytest.approx(loss, rel=1e-5)


def test_a_plan_file_that_is_missing():
    with pytest.raises(FileNotFoundError, match=r"there is no plan 'missing\.json': `step.plan.save"):
        make("missing.json")


def test_gradients_between_microbatches_lie_as_the_stage_says():
    data = zoo.tokens(batch=24)
    sent = {plan: make(plan, "cpu:4", batch=data, accumulate=2).program.sent for plan in ("zero1", "zero2")}
    assert sent["zero1"] < 100 < sent["zero2"], "ZeRO-1 sums where it is, ZeRO-2 scatters every microbatch"


def test_a_pin_is_kept_and_the_rest_is_found():
    pins = [tutti.pin("model.layers.*.mlp.up_proj.weight", dim=1, axis="tp")]
    step, plain = make("tp4", "cpu:4", pins=pins), make()
    assert str(step.plan.inputs["param:model.layers.*.mlp.up_proj.weight"]) == "tp:S1"
    assert step.state_dict(sharded=True)["model.layers.0.mlp.up_proj.weight"].shape == (96, 16)
    assert step(zoo.tokens()).item() == pytest.approx(plain(zoo.tokens()).item(), rel=1e-5)


def test_bfloat16_with_masters():
    model = zoo.llama().to(torch.bfloat16)
    step, plain = (
        make("tp2xzero3", "cpu:4", model=model, fp32_master_weights=True),
        make(model=copy.deepcopy(model), fp32_master_weights=True),
    )
    losses = [(step(zoo.tokens()).item(), plain(zoo.tokens()).item()) for _ in range(5)]
    assert [a for a, _ in losses] == pytest.approx([b for _, b in losses], rel=2e-2)
    state = step.training_state()
    assert state["param:lm_head.weight"].dtype == torch.bfloat16
    assert torch.equal(state["master:lm_head.weight"].to(torch.bfloat16), state["param:lm_head.weight"])


def test_autocast_is_kept_for_shapes_that_come_later():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step = make()
    assert any(n.meta["val"].dtype == torch.bfloat16 for n in step.graph.calls if isinstance(n.meta["val"], Spec))
    loss = step(zoo.tokens(length=8))
    (graph, _), *_ = [v for k, v in step._executables.plans.items() if k.signature[0][1].shape[1] == 8]
    assert any(n.meta["val"].dtype == torch.bfloat16 for n in graph.calls if isinstance(n.meta["val"], Spec))
    assert loss.dtype == torch.float32


def test_autocast_around_a_step_changes_nothing():
    alone, within = make(), make()
    batch = zoo.tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = within(batch)
    assert loss == alone(batch)


def test_operators_without_a_rule_run_whole_and_say_so():
    torch.manual_seed(0)
    model, data = nn.Linear(6, 8), (torch.randn(12, 6),)

    def loss(model, batch):
        return (zoo.ruleless(model(batch[0])) * torch.arange(8.0)).square().mean()

    def first(plan, cluster):
        own = copy.deepcopy(model)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        return tutti.parallelize(own, optimizer, data, loss=loss, plan=plan, cluster=cluster, level="O0")(data).item()

    with pytest.warns(UserWarning, match=r"no rule says how to split .*ruleless.*: every device computes"):
        assert first("dp", "cpu:4") == pytest.approx(first("single", "cpu:1"), rel=1e-6)


def test_no_pins_may_be_said_by_none():
    assert make(pins=None).plan.name == make().plan.name


def losses_under_gloo(plan: str) -> list[float]:
    step = make(plan, "auto")
    return [step(zoo.tokens()).item(), step.evaluate(zoo.tokens()).item(), len(step.training_state())]


def losses_of_unseeded_ranks() -> list[float]:
    rank = int(os.environ["RANK"])
    step = make("dp4", "auto", model=zoo.llama(seed=rank))
    losses = [step(zoo.tokens()).item() for _ in range(2)]
    other = make("dp4", "auto")
    with pytest.raises(ValueError, match=r"'input_ids' differs between ranks 0 and 1.*equal seeds and data"):
        other(zoo.tokens(seed=rank))
    return losses


def test_ranks_train_one_model_on_one_batch(pool):
    alone = make()
    expected = [alone(zoo.tokens()).item() for _ in range(2)]
    for losses in pool.run(losses_of_unseeded_ranks):
        assert losses == pytest.approx(expected, rel=1e-5)


def losses_of_the_tutorial() -> list[float]:
    """The script of the page without `cluster`, which is then made of the processes."""
    (script,) = re.findall(r"```python\n(import torch, transformers.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict = {}
    exec(script.replace('cluster="cpu:4", ', ""), names)
    return [names["step"](names["batch"]).item()]


def test_the_script_of_the_tutorial_runs_in_processes(pool):
    first, *others = pool.run(losses_of_the_tutorial)
    assert 6 < first[0] < 8, "about log 1024"
    assert others == [first] * 3


@pytest.mark.slow
def test_the_same_script_under_gloo(pool):
    alone = make()
    expected = [alone(zoo.tokens()).item(), alone.evaluate(zoo.tokens()).item(), len(alone.training_state())]
    for numbers in pool.run(losses_under_gloo, "auto"):
        assert numbers == pytest.approx(expected, rel=1e-5)


class Remembers(nn.Module):
    """Keeps, in buffers, what its weight and its input were."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.arange(6.0).view(2, 3))
        self.register_buffer("weight_before", torch.zeros(6))
        self.register_buffer("last", torch.zeros(4, 2))

    def forward(self, x):
        self.weight_before.copy_(self.w.detach().flatten())
        self.last.copy_(x)
        return (x @ self.w).square().mean()


def test_buffers_are_copies_of_what_they_looked_at():
    model, x = Remembers(), torch.randn(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = tutti.parallelize(model, optimizer, (x,), cluster="cpu:1", level="O0")
    step((x,))
    original = x.clone()
    x.zero_()
    state = step.state_dict()
    assert torch.equal(state["weight_before"], torch.arange(6.0))
    assert torch.equal(state["last"], original)


class Tables(nn.Module):
    """Layers that look alike in their output and differ in their weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.e = nn.ModuleList([nn.Embedding(7, 4), nn.Embedding(8, 4)])

    def forward(self, ids):
        return sum(e(ids).square().mean() for e in self.e)


def test_evaluation_finds_parameters_where_training_keeps_them():
    model, ids = Tables(), torch.arange(6).view(2, 3)
    step = make("zero3", "cpu:2", model=model, batch=(ids,))
    assert step.evaluate((ids,)).item() == pytest.approx(model(ids).item(), rel=1e-6)


def test_random_numbers_that_the_backward_pass_draws_are_refused():
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g + torch.randn_like(g)

    class Net2(Net):
        def forward(self, x, y):
            return nn.functional.mse_loss(Noisy.apply(self.inner(x)), y)

    with pytest.raises(ValueError, match=r"draws random numbers in the backward pass of the model"):
        make(model=Net2(), batch=pair())


def test_a_given_plan_says_all():
    plan = make("tp2", "cpu:2").plan
    with pytest.raises(ValueError, match="pins and mesh have no effect"):
        make(plan, "cpu:2", pins=[tutti.pin("*norm*", dim=0, axis="tp")])
    with pytest.raises(ValueError, match="the plan accumulates 1 microbatches, not 2"):
        make(plan, "cpu:2", accumulate=2)


class Windows(nn.Module):
    """Two layers that look alike only where the input is short."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.h = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(2)])

    def forward(self, x):
        return self.h[0](x[:, :6]).square().mean() + self.h[1](x[:, :3]).square().mean()


def test_another_shape_finds_parameters_where_the_plan_keeps_them():
    model, x = Windows(), torch.randn(4, 12, 4, generator=torch.Generator().manual_seed(1))
    step, short = make("zero3", "cpu:2", model=model, batch=(x,)), x[:, :3]
    assert {"param:h.0.weight", "param:h.1.weight"} <= set(step.plan.inputs)
    alone, loss = make(model=copy.deepcopy(model), batch=(x,)), model(short).item()
    assert step((short,)).item() == pytest.approx(loss, rel=1e-6)
    assert alone((short,)).item() == pytest.approx(loss, rel=1e-6)
    for name, value in alone.training_state().items():
        torch.testing.assert_close(step.training_state()[name], value)
