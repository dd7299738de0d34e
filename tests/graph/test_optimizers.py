import itertools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.lr_scheduler import LambdaLR

from tutti.graph.optimizers import TABLE, clip_scale, global_norm, register, state_of, step_count, update

STEPS = 12
SHAPES = {"weight": (7, 5), "bias": (7,), "scale": (), "conv": (3, 2, 3, 3), "one": (1, 1)}


def make_params(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for name, shape in SHAPES.items()
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


def by_update(optimizer, params, grads, clip_norm=None, scheduler=None, masters=False):
    """Runs the pure updates; returns parameters and state by name."""
    name_of = {param: name for name, param in params.items()}
    state = state_of(optimizer, name_of, masters)
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
CASES = [
    *((torch.optim.SGD, options) for options in SGD_OPTIONS),
    *((cls, options) for cls in (torch.optim.Adam, torch.optim.AdamW) for options in ADAM_OPTIONS),
    (torch.optim.Adam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"eps": 1e-3}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"foreach": True}),
]


@pytest.mark.parametrize(("cls", "options"), CASES, ids=str)
def test_equals_torch(cls, options):
    ours, theirs = make_params(), make_params()
    values, _ = by_update(cls(ours.values(), lr=0.01, **options), ours, make_grads())
    by_torch(cls(theirs.values(), lr=0.01, **options), theirs, make_grads())
    assert_same(values, theirs)


@pytest.mark.parametrize("cls", TABLE)
def test_equals_torch_in_float64(cls):
    ours, theirs = make_params(torch.float64), make_params(torch.float64)
    grads = make_grads(dtype=torch.float64)
    values, _ = by_update(cls(ours.values(), lr=0.01), ours, grads)
    by_torch(cls(theirs.values(), lr=0.01), theirs, grads)
    assert_same(values, theirs, tolerance=1e-14)


@pytest.mark.parametrize("cls", TABLE)
def test_groups_schedule_and_clipping(cls):
    def setup():
        params = make_params()
        decayed = [p for p in params.values() if p.ndim > 1]
        others = [p for p in params.values() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0, "lr": 0.05}]
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
    ],
    ids=str,
)
def test_continues_an_optimizer_that_has_stepped(cls, options):
    ours, theirs = make_params(), make_params()
    grads = make_grads()
    optimizer = cls(ours.values(), lr=0.01, **options)
    by_torch(optimizer, ours, grads[:5])
    if cls is not torch.optim.SGD:
        assert step_count(optimizer) == 5
    values, _ = by_update(optimizer, ours, grads[5:])
    by_torch(cls(theirs.values(), lr=0.01, **options), theirs, grads)
    assert_same(values, theirs)


def test_state_is_a_copy():
    params = make_params()
    optimizer = torch.optim.AdamW(params.values())
    by_torch(optimizer, params, make_grads(1))
    state = state_of(optimizer, {p: n for n, p in params.items()}, masters=False)
    state["weight"]["exp_avg"].zero_()
    assert optimizer.state[params["weight"]]["exp_avg"].abs().sum() > 0


@pytest.mark.parametrize("cls", TABLE)
def test_bf16_masters_equal_float32_training(cls):
    """bfloat16 gradients of bfloat16 parameters, but the update is the float32 one on the master."""
    ours = make_params(torch.bfloat16)
    grads = make_grads(dtype=torch.bfloat16)
    values, state = by_update(cls(ours.values(), lr=0.01), ours, grads, masters=True)
    theirs = {name: torch.nn.Parameter(p.detach().float()) for name, p in ours.items()}
    by_torch(cls(theirs.values(), lr=0.01), theirs, grads)
    for name, param in theirs.items():
        assert all(held.dtype == torch.float32 for held in state[name].values())
        torch.testing.assert_close(state[name]["master"], param.detach(), rtol=1e-6, atol=1e-6)
        assert torch.equal(values[name], state[name]["master"].bfloat16())


def test_masters_only_for_low_precision():
    params = make_params()
    params["half"] = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    state = state_of(torch.optim.AdamW(params.values()), {p: n for n, p in params.items()}, masters=True)
    assert [name for name, held in state.items() if "master" in held] == ["half"]


@pytest.mark.parametrize("cls", TABLE)
def test_bf16_without_masters_stays_near_torch(cls):
    ours, theirs = make_params(torch.bfloat16), make_params(torch.bfloat16)
    grads = make_grads(dtype=torch.bfloat16)
    values, state = by_update(cls(ours.values(), lr=0.05), ours, grads)
    by_torch(cls(theirs.values(), lr=0.05), theirs, grads)
    assert_same(values, theirs, tolerance=2e-2)
    assert all(held.dtype == torch.bfloat16 for each in state.values() for held in each.values())


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
    params, [grads] = make_params(torch.bfloat16), make_grads(1, dtype=torch.bfloat16)
    optimizer = cls(params.values(), lr=0.05)
    [group], numbers = optimizer.param_groups, (torch.tensor(1), torch.tensor(0.05, dtype=torch.float64))
    for name, state in state_of(optimizer, {p: n for n, p in params.items()}).items():
        state = {key: torch.rand_like(value) for key, value in state.items()}
        wide = {key: value.float() for key, value in state.items()}
        value = params[name].detach()
        new, held = update(optimizer, group, value, grads[name], state, *numbers, stochastic=True)
        exact, exact_held = update(optimizer, group, value.float(), grads[name].float(), wide, *numbers)
        for ours, theirs in ((new, exact), *((held[key], exact_held[key]) for key in held)):
            assert ours.dtype == torch.bfloat16
            torch.testing.assert_close(ours.float(), theirs, rtol=2**-7, atol=0)


@pytest.mark.parametrize("cls", TABLE)
def test_traces_to_a_graph_over_fake_tensors(cls):
    params = make_params()
    optimizer = cls(params.values(), lr=0.01)
    name_of = {p: n for n, p in params.items()}
    state = state_of(optimizer, name_of)["weight"]
    group = optimizer.param_groups[0]
    traced = make_fx(lambda *args: update(optimizer, group, *args), tracing_mode="fake")
    args = (params["weight"].detach(), make_grads(1)[0]["weight"], state)
    graph = traced(*args, torch.tensor(1), torch.tensor(0.01, dtype=torch.float64))
    for step, lr in ((1, 0.01), (7, 0.5)):
        late = (*args, torch.tensor(step), torch.tensor(lr, dtype=torch.float64))
        new, held = graph(*late)
        expected, expected_held = update(optimizer, group, *late)
        assert torch.equal(new, expected)
        assert all(torch.equal(held[key], expected_held[key]) for key in expected_held)


def test_meta_parameters_cost_no_memory():
    param = torch.nn.Parameter(torch.empty(100_000, 100_000, dtype=torch.bfloat16, device="meta"))
    state = state_of(torch.optim.AdamW([param]), {param: "w"}, masters=True)["w"]
    assert {(held.device.type, held.dtype) for held in state.values()} == {("meta", torch.float32)}


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


def test_unknown_optimizer_names_the_known():
    param = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="RMSprop has no pure form; supported are Adam, AdamW, SGD"):
        state_of(torch.optim.RMSprop([param]), {param: "p"})


def test_a_subclass_is_not_taken_for_its_parent():
    class Mine(torch.optim.AdamW):
        pass

    param = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="Mine has no pure form"):
        step_count(Mine([param]))


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
    with pytest.raises(ValueError, match="parameter idle has no exp_avg; freeze it"):
        state_of(optimizer, {used: "used", idle: "idle"})
    idle.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(ValueError, match=r"different numbers of updates: \[1, 2\]"):
        step_count(optimizer)


def test_frozen_parameters_have_no_state():
    params = make_params()
    params["bias"].requires_grad_(False)
    state = state_of(torch.optim.AdamW(params.values()), {p: n for n, p in params.items()})
    assert set(state) == set(SHAPES) - {"bias"}


def test_registering_an_optimizer():
    class Sign(torch.optim.Optimizer):
        def __init__(self, params, lr=0.1):
            super().__init__(params, {"lr": lr, "twist": 0})

    @register(Sign, state=lambda group: (), supports={"twist": 0}, counts=False)
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
