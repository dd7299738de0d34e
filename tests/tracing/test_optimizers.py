import copy
import functools
import itertools
import pickle
import re
import types
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import tutti
from tutti import compat
from tutti.tracing.optimizers import (
    TABLE,
    check,
    clip_scale,
    global_norm,
    register,
    state_of,
    step_count,
    update,
    update_counts,
)

PAGE = Path(__file__).parents[2] / "docs" / "extend" / "optimizer.md"
STEPS = 12
NUMBERS = ("mu_product", "eta", "mu")  # state that is float32 for parameters of any dtype
SHAPES = {"weight": (7, 5), "bias": (7,), "scale": (), "conv": (3, 2, 3, 3), "one": (1, 1)}


def make_params(dtype=torch.float32, seed=0, kind=None):
    """Parameters of the shapes that an optimizer class takes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for name, shape in SHAPES.items()
        if kind is not torch.optim.Muon or len(shape) == 2
    }


def make_grads(steps=STEPS, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    draw = lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return [{name: draw(shape).to(dtype) for name, shape in SHAPES.items()} for _ in range(steps)]


def by_torch(optimizer, params, grads, clip_norm=None, scheduler=None):
    for step_grads in grads:
        for name, param in params.items():
            param.grad = step_grads[name].clone().to(param.dtype)
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(params.values(), clip_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def by_update(optimizer, params, grads, clip_norm=None, scheduler=None, fp32_master_weights=False):
    """Runs the pure updates; returns parameters and state by name."""
    name_of = {param: name for name, param in params.items()}
    state = state_of(optimizer, name_of, fp32_master_weights)
    first = step_count(optimizer) + 1
    values = {name: param.detach().clone() for name, param in params.items()}
    for number, step_grads in enumerate(grads, start=first):
        scale = None if clip_norm is None else clip_scale(global_norm([step_grads[name] for name in values]), clip_norm)
        for group in optimizer.param_groups:
            lr = torch.tensor(float(group["lr"]), dtype=torch.float64)
            for param in group["params"]:
                name = name_of[param]
                values[name], state[name] = update(
                    optimizer, group, values[name], step_grads[name], state[name], torch.tensor(number), lr, scale=scale
                )
        if scheduler is not None:
            scheduler.step()
    return values, state


def assert_same(values, params, tolerance=1e-6):
    for name, param in params.items():
        assert values[name].dtype == param.dtype
        torch.testing.assert_close(values[name], param.detach(), rtol=tolerance, atol=tolerance)


SGD_OPTIONS = [
    {"momentum": m, "dampening": d, "weight_decay": w, "nesterov": n, "maximize": x}
    for m, d, w, n, x in itertools.product([0, 0.9], [0, 0.3], [0, 0.1], [False, True], [False, True])
    if not (n and (m == 0 or d != 0))
]
ADAM_OPTIONS = [
    {"betas": b, "weight_decay": w, "amsgrad": a, "maximize": x}
    for b, w, a, x in itertools.product([(0.9, 0.999), (0.5, 0.9)], [0, 0.1], [False, True], [False, True])
]
BETAS = [(0.9, 0.999), (0.5, 0.9)]
DECAY = {"weight_decay": [0, 0.1], "decoupled_weight_decay": [False, True], "maximize": [False, True]}


def cases(cls, **values):
    """All combinations of the values of some options."""
    return [(cls, dict(zip(values, chosen, strict=True))) for chosen in itertools.product(*values.values())]


CASES = [
    *((torch.optim.SGD, options) for options in SGD_OPTIONS),
    *((cls, options) for cls in (torch.optim.Adam, torch.optim.AdamW) for options in ADAM_OPTIONS),
    (torch.optim.Adam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"eps": 1e-3}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"foreach": True}),
    *cases(torch.optim.Adagrad, lr_decay=[0, 0.1], weight_decay=[0, 0.1], initial_accumulator_value=[0, 0.5],
           maximize=[False, True]),
    (torch.optim.Adagrad, {"fused": True, "eps": 1e-3}),
    *cases(torch.optim.Adadelta, rho=[0.9, 0.5], weight_decay=[0, 0.1], maximize=[False, True], eps=[1e-6, 1e-3]),
    *cases(torch.optim.Adamax, betas=BETAS, weight_decay=[0, 0.1], maximize=[False, True], eps=[1e-8, 1e-2]),
    *cases(torch.optim.NAdam, betas=BETAS, **DECAY, momentum_decay=[4e-3, 0.3]),
    *cases(torch.optim.RAdam, betas=[*BETAS, (0.9, 0.4)], **DECAY),
    *cases(torch.optim.RMSprop, momentum=[0, 0.9], centered=[False, True], weight_decay=[0, 0.1],
           maximize=[False, True]),
    (torch.optim.RMSprop, {"alpha": 0.5, "eps": 1e-2}),
    *cases(torch.optim.Rprop, etas=[(0.5, 1.2), (0.3, 1.7)], step_sizes=[(1e-6, 50), (0.005, 0.02)],
           maximize=[False, True]),
    *cases(torch.optim.ASGD, lambd=[1e-4, 0.1], t0=[1e6, 3], weight_decay=[0, 0.1], maximize=[False, True]),
    (torch.optim.ASGD, {"alpha": 0.3, "t0": 0}),
    *cases(torch.optim.Adafactor, eps=[(None, 1e-3), (1e-2, 0.5)], weight_decay=[0, 0.1], maximize=[False, True],
           d=[1.0, 2.0]),
    (torch.optim.Adafactor, {"beta2_decay": -0.3}),
    (torch.optim.Adafactor, {"lr": 0.5}),
    *cases(torch.optim.Muon, nesterov=[False, True], momentum=[0.95, 0.5], weight_decay=[0, 0.1],
           adjust_lr_fn=[None, "match_rms_adamw"]),
    (torch.optim.Muon, {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-2}),
    *((cls, {"lr": torch.tensor(0.01)}) for cls in (torch.optim.Rprop, torch.optim.ASGD)),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "options"), CASES, ids=str)
def test_equals_torch(cls, options):
    ours, theirs = make_params(kind=cls), make_params(kind=cls)
    options = {"lr": 0.01, **options}
    values, state = by_update(cls(ours.values(), **options), ours, make_grads())
    optimizer = cls(theirs.values(), **options)
    by_torch(optimizer, theirs, make_grads())
    assert_same(values, theirs)
    for name, param in theirs.items():
        slots = {key: x for key, x in optimizer.state[param].items() if key != "step" and x is not None}
        assert slots.keys() == state[name].keys()
        for key, x in slots.items():
            assert state[name][key].dtype == x.dtype
            torch.testing.assert_close(state[name][key], x, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cls", TABLE)
def test_equals_torch_in_float64(cls):
    ours, theirs = (make_params(torch.float64, kind=cls) for _ in range(2))
    grads = make_grads(dtype=torch.float64)
    values, _ = by_update(cls(ours.values(), lr=0.01), ours, grads)
    by_torch(cls(theirs.values(), lr=0.01), theirs, grads)
    assert_same(values, theirs, tolerance=1e-14)


@pytest.mark.parametrize("cls", TABLE)
def test_groups_schedule_and_clipping(cls):
    def setup():
        params = make_params(kind=cls)
        decayed = [p for p in params.values() if p.ndim > 1]
        others = [p for p in params.values() if p.ndim <= 1]
        decay = {"weight_decay": 0.1} if cls is not torch.optim.Rprop else {}
        groups = [{"params": decayed, **decay}, {"params": others, **dict.fromkeys(decay, 0), "lr": 0.05}]
        optimizer = cls(groups, lr=0.01)
        return params, optimizer, LambdaLR(optimizer, lambda t: (t + 1) / 5 if t < 5 else 0.9**t)

    ours, optimizer, scheduler = setup()
    optimizer.step()  # nothing has a gradient: only keeps the scheduler from warning about the order
    values, _ = by_update(optimizer, ours, make_grads(), clip_norm=1.0, scheduler=scheduler)
    theirs, optimizer, scheduler = setup()
    by_torch(optimizer, theirs, make_grads(), clip_norm=1.0, scheduler=scheduler)
    assert_same(values, theirs)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
        (torch.optim.SGD, {}),
        (torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
        (torch.optim.Adadelta, {}),
        (torch.optim.Adamax, {}),
        (torch.optim.NAdam, {"momentum_decay": 0.3}),
        (torch.optim.RAdam, {}),
        (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
        (torch.optim.Rprop, {}),
        (torch.optim.ASGD, {"lambd": 0.1, "t0": 3}),
        (torch.optim.Adafactor, {}),
        (torch.optim.Muon, {}),
    ],
    ids=str,
)
def test_continues_an_optimizer_that_has_stepped(cls, options):
    ours, theirs = make_params(kind=cls), make_params(kind=cls)
    grads = make_grads()
    optimizer = cls(ours.values(), lr=0.01, **options)
    by_torch(optimizer, ours, grads[:5])
    if cls not in (torch.optim.SGD, torch.optim.Muon):
        assert step_count(optimizer) == 5
    values, _ = by_update(optimizer, ours, grads[5:])
    by_torch(cls(theirs.values(), lr=0.01, **options), theirs, grads)
    assert_same(values, theirs)


def test_state_is_a_copy():
    params = make_params()
    optimizer = torch.optim.AdamW(params.values())
    by_torch(optimizer, params, make_grads(1))
    state = state_of(optimizer, {p: n for n, p in params.items()}, fp32_master_weights=False)
    state["weight"]["exp_avg"].zero_()
    assert optimizer.state[params["weight"]]["exp_avg"].abs().sum() > 0


@pytest.mark.parametrize("cls", TABLE)
def test_bf16_masters_equal_float32_training(cls):
    """bfloat16 gradients of bfloat16 parameters, but the update is the float32 one on the master."""
    ours = make_params(torch.bfloat16, kind=cls)
    grads = make_grads(dtype=torch.bfloat16)
    values, state = by_update(cls(ours.values(), lr=0.01), ours, grads, fp32_master_weights=True)
    theirs = {name: torch.nn.Parameter(p.detach().float()) for name, p in ours.items()}
    by_torch(cls(theirs.values(), lr=0.01), theirs, grads)
    for name, param in theirs.items():
        assert all(slot.dtype == torch.float32 for slot in state[name].values())
        torch.testing.assert_close(state[name]["master"], param.detach(), rtol=1e-6, atol=1e-6)
        assert torch.equal(values[name], state[name]["master"].bfloat16())


def test_masters_only_for_low_precision():
    params = make_params()
    params["half"] = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    state = state_of(torch.optim.AdamW(params.values()), {p: n for n, p in params.items()}, fp32_master_weights=True)
    assert [name for name, slots in state.items() if "master" in slots] == ["half"]


@pytest.mark.parametrize("cls", TABLE)
def test_bf16_without_masters_stays_near_torch(cls):
    ours, theirs = (make_params(torch.bfloat16, kind=cls) for _ in range(2))
    grads = make_grads(dtype=torch.bfloat16)
    values, state = by_update(cls(ours.values(), lr=0.05), ours, grads)
    by_torch(cls(theirs.values(), lr=0.05), theirs, grads)
    if cls is not torch.optim.NAdam:  # which rounds its second moments to bfloat16 before it divides by them
        assert_same(values, theirs, tolerance=2e-2)
    exact = {name: torch.nn.Parameter(p.detach().float()) for name, p in make_params(torch.bfloat16, kind=cls).items()}
    by_torch(cls(exact.values(), lr=0.05), exact, grads)
    for name, param in exact.items():
        ours_off, theirs_off = ((x.float() - param).norm().item() for x in (values[name], theirs[name]))
        assert ours_off <= theirs_off + 0.01 * param.norm().item()
    slots = [(key, x) for each in state.values() for key, x in each.items()]
    assert all(x.dtype == (torch.float32 if key in NUMBERS else torch.bfloat16) for key, x in slots)


def test_stochastic_rounding_makes_small_steps_on_average():
    """64 steps of 1/16 of what bfloat16 can tell apart at 1: rounded to the nearest they are all lost."""
    torch.manual_seed(0)
    params = {"w": torch.nn.Parameter(torch.ones(100_000, dtype=torch.bfloat16))}
    optimizer = torch.optim.SGD(params.values(), lr=2**-12)
    step, rate = torch.tensor(1), torch.tensor(2**-12, dtype=torch.float64)
    [group], values = optimizer.param_groups, {key: params["w"].detach() for key in (False, True)}
    for _ in range(64):
        for key, value in values.items():
            values[key], _ = update(optimizer, group, value, torch.ones_like(value), {}, step, rate, stochastic=key)
    assert (values[False] == 1).all()
    assert values[True].dtype == torch.bfloat16
    assert values[True].double().mean().item() == pytest.approx(1 - 2**-6, abs=1.5e-4)  # 6 standard deviations


@pytest.mark.parametrize("cls", TABLE)
def test_stochastic_rounding_is_of_a_float32_update(cls):
    """Parameter and state are next to those of an update in float32."""
    torch.manual_seed(0)
    params, [grads] = make_params(torch.bfloat16, kind=cls), make_grads(1, dtype=torch.bfloat16)
    optimizer = cls(params.values(), lr=0.05)
    [group], numbers = optimizer.param_groups, (torch.tensor(1), torch.tensor(0.05, dtype=torch.float64))
    for name, state in state_of(optimizer, {p: n for n, p in params.items()}).items():
        state = {key: torch.rand_like(value) for key, value in state.items()}
        wide = {key: value.float() for key, value in state.items()}
        value = params[name].detach()
        new, new_state = update(optimizer, group, value, grads[name], state, *numbers, stochastic=True)
        exact, exact_state = update(optimizer, group, value.float(), grads[name].float(), wide, *numbers)
        for key, ours, theirs in (("", new, exact), *((key, new_state[key], exact_state[key]) for key in new_state)):
            assert ours.dtype == (torch.float32 if key in NUMBERS else torch.bfloat16)
            torch.testing.assert_close(ours.float(), theirs, rtol=2**-7, atol=0)


@pytest.mark.parametrize("cls", TABLE)
def test_traces_to_a_graph_over_fake_tensors(cls):
    params = make_params(kind=cls)
    optimizer = cls(params.values(), lr=0.01)
    name_of = {p: n for n, p in params.items()}
    state = state_of(optimizer, name_of)["weight"]
    group = optimizer.param_groups[0]
    traced = make_fx(lambda *args: update(optimizer, group, *args), tracing_mode="fake")
    args = (params["weight"].detach(), make_grads(1)[0]["weight"], state)
    graph = traced(*args, torch.tensor(1), torch.tensor(0.01, dtype=torch.float64))
    for step, lr in ((1, 0.01), (7, 0.5)):
        late = (*args, torch.tensor(step), torch.tensor(lr, dtype=torch.float64))
        new, new_state = graph(*late)
        expected, expected_state = update(optimizer, group, *late)
        assert torch.equal(new, expected)
        assert all(torch.equal(new_state[key], expected_state[key]) for key in expected_state)


@pytest.mark.parametrize("cls", TABLE)
def test_state_stays_on_the_device_of_its_parameter(cls):
    """Step and learning rate are on the CPU, also where parameters are on a GPU."""
    params = make_params(kind=cls)
    optimizer = cls(params.values())
    state = state_of(optimizer, {p: n for n, p in params.items()})["weight"]
    with compat.fake_mode():
        fake = lambda x: torch.empty(x.shape, dtype=x.dtype, device="cuda")  # noqa: E731
        weight, old = fake(params["weight"]), {key: fake(x) for key, x in state.items()}
        numbers = torch.empty((), dtype=torch.int64), torch.empty((), dtype=torch.float64)
        new, new_state = update(optimizer, optimizer.param_groups[0], weight, weight, old, *numbers)
    assert {x.device.type for x in (new, *new_state.values())} == {"cuda"}
    assert {key: (x.shape, x.dtype) for key, x in new_state.items()} == {
        key: (x.shape, x.dtype) for key, x in state.items()
    }


def test_meta_parameters_cost_no_memory():
    param = torch.nn.Parameter(torch.empty(100_000, 100_000, dtype=torch.bfloat16, device="meta"))
    state = state_of(torch.optim.AdamW([param]), {param: "w"}, fp32_master_weights=True)["w"]
    assert {(slot.device.type, slot.dtype) for slot in state.values()} == {("meta", torch.float32)}


@pytest.mark.parametrize("max_norm", [0.1, 1.0, 1e4])
def test_clip_equals_torch(max_norm):
    params = make_params()
    grads = make_grads(1)[0]
    scale = clip_scale(global_norm(list(grads.values())), max_norm)
    for name, param in params.items():
        param.grad = grads[name].clone()
    torch.nn.utils.clip_grad_norm_(params.values(), max_norm)
    for name, param in params.items():
        assert param.grad is not None
        torch.testing.assert_close(grads[name] * scale, param.grad, rtol=1e-6, atol=0)


def test_clip_of_low_precision_gradients_is_not_rounded():
    grads = [torch.ones(4, dtype=torch.bfloat16), torch.ones((), dtype=torch.bfloat16), torch.ones(4)]
    scale = clip_scale(global_norm(grads), 1.5)
    assert scale.dtype == torch.float32
    torch.testing.assert_close(scale, torch.tensor(0.5), rtol=1e-6, atol=0)


def test_a_bad_norm_to_clip_to():
    with pytest.raises(ValueError, match="clip_norm is 0"):
        clip_scale(torch.ones(()), 0)


def one(cls, **options):
    return cls([torch.nn.Parameter(torch.zeros(2, 2))], **options)


def test_unknown_optimizer_names_the_known():
    class Mine(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

    with pytest.raises(
        ValueError, match=r"Mine is unknown; supported are ASGD, .* SGD, .*tutti\.Lion.*\. Add it with tutti\."
    ):
        check(one(Mine))


def test_every_optimizer_of_torch_has_a_rule_or_a_reason():
    every = {x for x in vars(torch.optim).values() if isinstance(x, type) and issubclass(x, torch.optim.Optimizer)}
    refused = {torch.optim.LBFGS: "evaluates the loss several times", torch.optim.SparseAdam: "needs sparse gradients"}
    assert every == {*TABLE, *refused, torch.optim.Optimizer}  # others are in NAMED
    for cls, reason in refused.items():
        with pytest.raises(ValueError, match=f"{cls.__name__} is not supported: it {reason}"):
            check(one(cls))
    for cls in TABLE:
        check(one(cls))


def test_a_subclass_may_change_options():
    class Mine(torch.optim.AdamW):
        def __init__(self, params, lr=0.02, warmup=7):
            super().__init__(params, lr=lr, weight_decay=0.3)
            self.defaults["warmup"] = warmup
            for group in self.param_groups:
                group["warmup"] = warmup

        def zero_grad(self, set_to_none=True):
            super().zero_grad(set_to_none)

        def helper(self): ...

    ours, theirs = make_params(), make_params()
    check(Mine(ours.values()))
    values, _ = by_update(Mine(ours.values()), ours, make_grads())
    by_torch(Mine(theirs.values()), theirs, make_grads())
    assert_same(values, theirs)
    with pytest.raises(ValueError, match=r"Mine\(differentiable=True\) is not supported"):
        optimizer = Mine(ours.values())
        optimizer.param_groups[0]["differentiable"] = True
        check(optimizer)


@pytest.mark.parametrize("method", ["step", "_init_group"])
def test_a_subclass_with_another_update_is_refused(method):
    def other(self, *args, **kwargs):
        return getattr(torch.optim.AdamW, method)(self, *args, **kwargs)

    class Mixin:
        pass

    setattr(Mixin, method, other)

    class Direct(torch.optim.AdamW):
        pass

    setattr(Direct, method, other)

    class Mixed(Mixin, torch.optim.AdamW):
        pass

    class Below(Direct):
        pass

    for cls in (Direct, Mixed, Below):
        with pytest.raises(ValueError, match=rf"{cls.__name__} overrides AdamW\.{method}, which takes part"):
            check(one(cls))


def test_a_wrapped_step_of_a_subclass_is_its_own():
    """functools.wraps makes it look like the one that it wraps."""

    class Mine(torch.optim.SGD):
        @functools.wraps(torch.optim.SGD.step)
        def step(self, closure=None):
            return super().step(closure)

    with pytest.raises(ValueError, match=r"Mine overrides SGD\.step"):
        check(one(Mine))


def test_schedulers_wrap_step():
    class Mine(torch.optim.AdamW):
        pass

    for optimizer in (one(torch.optim.SGD), one(Mine)):
        LambdaLR(optimizer, lambda t: 1.0)
        assert "step" in vars(optimizer)
        check(optimizer)
        check(copy.deepcopy(one(type(optimizer))))
    check(pickle.loads(pickle.dumps(one(torch.optim.SGD))))


def test_a_replaced_method_of_an_instance_is_refused():
    def other(self, closure=None): ...

    optimizer = one(torch.optim.SGD)
    optimizer.step = types.MethodType(other, optimizer)
    with pytest.raises(ValueError, match="step of this SGD instance was replaced"):
        check(optimizer)
    LambdaLR(optimizer, lambda t: 1.0)
    with pytest.raises(ValueError, match="step of this SGD instance was replaced"):
        check(optimizer)


@pytest.mark.parametrize(
    "register_hook",
    [
        lambda optimizer, hook: optimizer.register_step_pre_hook(hook),
        lambda optimizer, hook: optimizer.register_step_post_hook(hook),
        lambda optimizer, hook: register_optimizer_step_pre_hook(hook),
        lambda optimizer, hook: register_optimizer_step_post_hook(hook),
    ],
    ids=["pre", "post", "global pre", "global post"],
)
def test_step_hooks_are_refused(register_hook):
    def project(optimizer, args, kwargs): ...

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    handle = register_hook(optimizer, project)
    try:
        with pytest.raises(
            ValueError, match=r"SGD has the hook .*project \(register_.*_hook\); a captured update runs"
        ):
            tutti.capture(model, (torch.ones(2, 2),), optimizer, loss=lambda m, b: m(b[0]).sum())
    finally:
        handle.remove()
    check(optimizer)


def test_the_hook_of_the_profiler_counts_steps_only():
    def count(optimizer, args, kwargs): ...

    count.__module__ = "torch.profiler"
    handle = register_optimizer_step_post_hook(count)
    try:
        check(one(torch.optim.SGD))
    finally:
        handle.remove()


def test_muon_takes_matrices_only():
    optimizer = one(torch.optim.Muon)
    bias = torch.nn.Parameter(torch.zeros(2))
    optimizer.add_param_group({"params": [bias]})
    with pytest.raises(ValueError, match=r"Muon only supports 2D parameters .* size: torch.Size\(\[2\]\)"):
        state_of(optimizer, {p: "p" for group in optimizer.param_groups for p in group["params"]})


def test_state_of_another_shape_is_refused():
    optimizer = one(torch.optim.Adafactor)
    [param] = optimizer.param_groups[0]["params"]
    param.grad = torch.ones(2, 2)
    optimizer.step()
    optimizer.state[param]["row_var"] = torch.zeros(2)
    with pytest.raises(ValueError, match=r"row_var of p has shape \(2,\) in the optimizer; \(2, 1\) is expected"):
        state_of(optimizer, {param: "p"})


def test_adagrad_of_frozen_parameters():
    """It has state before its first step, and for parameters that it never updates."""
    used, frozen = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    optimizer = torch.optim.Adagrad([used, frozen], initial_accumulator_value=0.5)
    assert step_count(optimizer) == 0
    used.grad = torch.ones(2)
    optimizer.step()
    assert step_count(optimizer) == 1
    assert state_of(optimizer, {used: "used", frozen: "frozen"})["used"]["sum"].tolist() == [1.5, 1.5]


def test_unsupported_flag():
    param = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=r"Adam\(differentiable=True\) is not supported; only .*False"):
        state_of(torch.optim.Adam([param], differentiable=True), {param: "p"})


def test_parameter_of_another_model():
    param = torch.nn.Parameter(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"shape \(2, 3\) that is not in the model"):
        state_of(torch.optim.SGD([param]), {})


def test_parameter_left_out_of_earlier_steps():
    used, idle = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([used, idle])
    used.grad = torch.ones(2)
    optimizer.step()
    state = state_of(optimizer, {used: "used", idle: "idle"})
    assert state["used"]["exp_avg"].any() and not state["idle"]["exp_avg"].any()
    idle.grad = torch.ones(3)
    optimizer.step()
    assert (step_count(optimizer), update_counts(optimizer)) == (2, {used: 2, idle: 1})


def test_frozen_parameters_have_no_state():
    params = make_params()
    params["bias"].requires_grad_(False)
    state = state_of(torch.optim.AdamW(params.values()), {p: n for n, p in params.items()})
    assert set(state) == set(SHAPES) - {"bias"}


def test_registering_an_optimizer():
    class Sign(torch.optim.Optimizer):
        def __init__(self, params, lr=0.1):
            super().__init__(params, {"lr": lr, "twist": 0})

    @register(Sign, supports={"twist": 0})
    def sign(group, param, grad, state, step, lr):
        return param - lr.to(param.dtype) * grad.sign(), {}

    try:
        params = make_params()
        values, _ = by_update(Sign(params.values()), params, make_grads(1))
        expected = params["weight"].detach() - 0.1 * make_grads(1)[0]["weight"].sign()
        torch.testing.assert_close(values["weight"], expected)
        with pytest.raises(ValueError, match=r"Sign\(twist=1\)"):
            optimizer = Sign(params.values())
            optimizer.param_groups[0]["twist"] = 1
            by_update(optimizer, params, make_grads(1))
    finally:
        del TABLE[Sign]


def test_an_option_that_the_class_does_not_have():
    class Mine(torch.optim.Optimizer):
        def __init__(self, params, lr=0.1, momentum=0.9):
            super().__init__(params, {"lr": lr, "momentum": momentum, "hidden": 0})

    def update(group, param, grad, state, step, lr):
        return param, {}

    with pytest.raises(ValueError, match="Mine has no option 'momentun'; it has lr, momentum"):
        register(Mine, options=("momentun",))
    try:
        register(Mine, options=("momentum", "hidden"))(update)
        assert TABLE[Mine].options == {"momentum", "hidden"}
    finally:
        del TABLE[Mine]


def test_what_a_registered_update_may_not_return():
    class Bad(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

    def returning(new, new_state):
        register(Bad, state=lambda group, param: {"mean": torch.zeros(())})(lambda *args: (new, new_state))
        params = {"p": torch.nn.Parameter(torch.zeros(2))}
        by_update(Bad(params.values()), params, [{"p": torch.zeros(2)}])

    try:
        returning(torch.zeros(2), {"mean": torch.zeros(())})
        with pytest.raises(ValueError, match=r"returned the state \[\], but was given \['mean'\]"):
            returning(torch.zeros(2), {})
        with pytest.raises(ValueError, match=r"returned mean with shape \(2,\); it must be \(\)"):
            returning(torch.zeros(2), {"mean": torch.zeros(2)})
        register(Bad)(lambda group, param, grad, state, step, lr: param - grad)
        params = {"p": torch.nn.Parameter(torch.zeros(2))}
        with pytest.raises(ValueError, match="returned Tensor; it must return the new parameter and a dict"):
            by_update(Bad(params.values()), params, [{"p": torch.zeros(2)}])
    finally:
        del TABLE[Bad]


@pytest.mark.parametrize("read", [lambda group: group["lr"], lambda group: group.get("lr")])
def test_an_update_may_not_read_the_rate_of_the_group(read):
    class Frozen(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

    register(Frozen)(lambda group, param, grad, state, step, lr: (param - read(group) * grad, {}))
    params = {"p": torch.nn.Parameter(torch.zeros(2))}
    try:
        with pytest.raises(ValueError, match="use the argument lr, which holds the rate of each step"):
            by_update(Frozen(params.values()), params, [{"p": torch.zeros(2)}])
    finally:
        del TABLE[Frozen]


def test_examples_of_adding_an_optimizer():
    """The page and the docstring, executed; both optimizers equal a loop that a person writes."""
    page, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = re.findall(r"^ *(?:>>>|\.\.\.) ?(.*)$", tutti.register_optimizer.__doc__ or "", re.MULTILINE)
    registered = dict(TABLE)
    try:
        for source in (page, "\n".join(lines)):
            space = {"torch": torch, "tutti": tutti}
            exec(compile(source, "example", "exec"), space)
            (cls,) = TABLE.keys() - registered
            params = make_params()
            values, _ = by_update(cls(params.values()), params, make_grads())
            for name, param in params.items():
                expected, buffer = param.detach(), torch.zeros_like(param)
                for grads in make_grads():
                    buffer = 0.9 * buffer + 0.1 * grads[name]
                    expected = expected - 0.01 * buffer.sign()
                torch.testing.assert_close(values[name], expected)
            del TABLE[cls]
    finally:
        TABLE.clear()
        TABLE.update(registered)


@pytest.mark.parametrize("cls", [torch.optim.Rprop, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_complex_parameters(cls):
    class Magnitude(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.c = torch.nn.Parameter(torch.tensor([1 + 1j, 2 - 1j, -1 + 0.5j, 0.3 + 0.2j]))

        def forward(self, x):
            return (x * self.c).abs().square().mean()

    (x,) = batch = (torch.randn(8, 4, generator=torch.Generator().manual_seed(0)),)
    ours, theirs = Magnitude(), Magnitude()
    optimizer = cls(theirs.parameters(), lr=0.02)
    options = {"loss": lambda model, batch: model(*batch), "cluster": "cpu:2", "plan": "dp2", "level": "O0"}
    step = tutti.parallelize(ours, cls(ours.parameters(), lr=0.02), batch, **options)
    for _ in range(3):
        optimizer.zero_grad()
        theirs(x).backward()
        optimizer.step()
        step(batch)
    torch.testing.assert_close(step.state_dict()["c"], theirs.c.detach())
