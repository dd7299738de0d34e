"""Any function of modules, optimizers and caches gives, under any plan, the numbers of plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
import zoo
from cases import crossed, some

PLANS = {"single": 1, "dp": 2, "tp": 2, "zero3": 2, "dp2xtp2": 4}
WIDTH, ROWS, STEPS = 16, 8, 3


class Case(NamedTuple):
    """What a store holds, the function, and its arguments at each call."""

    objects: dict[str, Any]
    function: Callable
    arguments: Callable[[int], tuple]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mlp(seed: int, outputs: int = WIDTH) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, outputs))


def adversarial() -> Case:
    g, d = mlp(1), mlp(2, 1)
    optimizer_g = torch.optim.Adam(g.parameters(), lr=1e-2, betas=(0.5, 0.9))
    optimizer_d = torch.optim.AdamW(d.parameters(), lr=2e-2)

    def update(real: Tensor, noise: Tensor) -> dict[str, Tensor]:
        fake = g(noise)
        optimizer_d.zero_grad()
        of_d = F.softplus(-d(real)).mean() + F.softplus(d(fake.detach())).mean()
        of_d.backward()
        torch.nn.utils.clip_grad_norm_(d.parameters(), 0.5)
        optimizer_d.step()
        optimizer_g.zero_grad()
        of_g = F.softplus(-d(fake)).mean()
        of_g.backward()
        optimizer_g.step()
        return {"d": of_d, "g": of_g}

    objects = {"g": g, "d": d, "optimizer_g": optimizer_g, "optimizer_d": optimizer_d}
    return Case(objects, update, lambda i: (numbers(ROWS, WIDTH, seed=i), numbers(ROWS, WIDTH, seed=100 + i)))


def distillation() -> Case:
    teacher, student = mlp(1).requires_grad_(False).eval(), mlp(2)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)

    def update(x: Tensor, temperature: float) -> tuple[Tensor, dict[str, Tensor]]:
        optimizer.zero_grad()
        with torch.no_grad():
            target = F.softmax(teacher(x) / temperature, -1)
        logits = student(x)
        loss = F.kl_div(F.log_softmax(logits / temperature, -1), target, reduction="batchmean")
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            agrees = (logits.argmax(-1) == target.argmax(-1)).float().mean()
        return loss, {"agrees": agrees, "logits": logits}

    objects = {"teacher": teacher, "student": student, "optimizer": optimizer}
    return Case(objects, update, lambda i: (numbers(ROWS, WIDTH, seed=i), 2.0))


def two_losses_and_a_scheduled_critic() -> Case:
    """An actor updated once and a critic twice, a target that follows it, gradients by `torch.autograd.grad`."""
    actor, critic = mlp(1), mlp(2, 1)
    target = copy.deepcopy(critic).requires_grad_(False)
    optimizer_a = torch.optim.Adam(actor.parameters(), lr=1e-2)
    optimizer_c = torch.optim.Adam(critic.parameters(), lr=1e-2)

    def update(state: Tensor, reward: Tensor) -> dict[str, Tensor]:
        losses = []
        for _ in range(2):
            optimizer_c.zero_grad()
            loss = (
                (critic(state).squeeze(-1) - reward - 0.9 * target(actor(state).detach()).squeeze(-1)).square().mean()
            )
            loss.backward()
            optimizer_c.step()
            losses.append(loss)
        optimizer_a.zero_grad()
        value = -critic(actor(state)).mean()
        for p, gradient in zip(actor.parameters(), torch.autograd.grad(value, list(actor.parameters())), strict=True):
            p.grad = gradient
        optimizer_a.step()
        with torch.no_grad():
            for p, q in zip(target.parameters(), critic.parameters(), strict=True):
                p.lerp_(q, 0.1)
        return {"critic": torch.stack(losses), "actor": value}

    objects = {"actor": actor, "critic": critic, "target": target, "oa": optimizer_a, "oc": optimizer_c}
    return Case(objects, update, lambda i: (numbers(ROWS, WIDTH, seed=i), numbers(ROWS, seed=50 + i)))


def pure() -> Case:
    """No module at all."""

    def solve(a: Tensor, b: Tensor) -> dict[str, Tensor]:
        x = torch.zeros_like(b)
        for _ in range(3):
            x = x + 0.1 * (b - torch.einsum("rij,rj->ri", a, x))
        return {"x": x, "residual": (b - torch.einsum("rij,rj->ri", a, x)).norm()}

    return Case({}, solve, lambda i: (numbers(ROWS, 6, 6, seed=i), numbers(ROWS, 6, seed=9)))


CASES = {f.__name__: f for f in (adversarial, distillation, two_losses_and_a_scheduled_critic, pure)}


def state_of(objects: dict[str, Any]) -> dict[str, Tensor]:
    modules = {name: x for name, x in objects.items() if isinstance(x, nn.Module)}
    return {f"{name}.{key}": x for name, module in modules.items() for key, x in module.state_dict().items()}


@pytest.mark.parametrize("name, plan", crossed(CASES, PLANS))
def test_calls_are_those_of_plain_pytorch(name, plan):
    objects, function, arguments = CASES[name]()
    store = tutti.Store(**objects)
    before = {key: x.clone() for key, x in state_of(objects).items()}
    fn = tutti.function(function, *arguments(0), store=store, cluster=f"cpu:{PLANS[plan]}", plan=plan)
    found = [fn(*arguments(i)) for i in range(STEPS)]
    for key, x in state_of(objects).items():
        assert torch.equal(x, before[key]), f"{key} was changed by capture"
    expected = [function(*arguments(i)) for i in range(STEPS)]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for module, x in objects.items():
        if isinstance(x, nn.Module):
            torch.testing.assert_close(store.state_dict(module), dict(x.state_dict()), rtol=1e-5, atol=1e-6)


PLANS_OF_STEPS = ["zero3xrecompute", "tp2xsplits2", "dpxoffload", "dp2xoverlap2", "cp"]


@pytest.mark.parametrize("plan", some(PLANS_OF_STEPS, PLANS_OF_STEPS[:2]))
def test_an_update_takes_the_plans_of_a_training_step(plan):
    model, batch = zoo.llama(2), zoo.tokens(4)
    optimizer = torch.optim.AdamW(model.parameters())

    def update(batch: dict[str, Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        return loss

    store = tutti.Store(model=model, optimizer=optimizer)
    fn = tutti.function(update, batch, store=store, cluster="cpu:2", plan=plan)
    found = [fn(batch) for _ in range(STEPS)]
    torch.testing.assert_close(found, [update(batch) for _ in range(STEPS)], rtol=1e-5, atol=1e-6)


# -- several functions over one store ------------------------------------------------------------------------------


def language_model() -> tuple[nn.Module, Callable[[], Any]]:
    """A model of `transformers`, and what makes an empty cache for 4 sequences of at most 16 tokens."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64,
    )  # fmt: skip

    def cache():
        made = transformers.StaticCache(config=config, max_cache_len=16)
        made.early_initialization(batch_size=4, num_heads=4, head_dim=8, dtype=torch.float32, device="cpu")
        return made

    return transformers.LlamaForCausalLM(config).eval(), cache


def generated(prefill: Callable, decode: Callable, cache: Any, prompt: Tensor, count: int) -> Tensor:
    length = prompt.shape[1]
    tokens = [prefill(cache, prompt, torch.arange(length))]
    for i in range(count):
        tokens.append(decode(cache, tokens[-1], torch.tensor([length + i])))
    return torch.cat(tokens, 1)


@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
@pytest.mark.parametrize(("plan", "dim"), [("tp", "tp:S1"), ("dp", "dp:S0"), ("zero3", "dp:S0")])
def test_decoding_keeps_its_cache_split(plan, dim):
    model, empty = language_model()

    @torch.no_grad()
    def forward(cache, tokens, position):
        logits = model(
            input_ids=tokens,
            past_key_values=cache,
            cache_position=position,
            position_ids=position[None],
            use_cache=True,
        ).logits
        return logits[:, -1:].argmax(-1)

    prompt = torch.randint(0, 64, (4, 5), generator=torch.Generator().manual_seed(3))
    expected = generated(forward, forward, empty(), prompt, 6)
    cache = empty()
    store = tutti.Store(model=model, cache=cache)
    prefill = tutti.function(forward, cache, prompt, torch.arange(5), store=store, cluster="cpu:2", plan=plan)
    decode = tutti.function(forward, cache, prompt[:, :1], torch.tensor([5]), store=store, cluster="cpu:2", plan=plan)
    assert torch.equal(generated(prefill, decode, cache, prompt, 6), expected)
    keys = [name for name in store.layouts if name.endswith((".keys", ".values"))]
    assert len(keys) == 4 and all(str(store.layouts[name]) == dim for name in keys)
    of_a_layer = store["cache:cache.layers.0.keys"].numel() * 4 // 2
    for fn in (prefill, decode):
        assert all(c.bytes < of_a_layer for c in fn.program.collectives if not c.label.startswith(("param:", "model.")))
        assert not [c for c in fn.program.collectives if "index_copy" in c.label or c.label.startswith("cache:")]
    assert not cache.layers[0].keys.any()  # the object itself is read, never changed


@pytest.mark.parametrize("plan", ["dp", "tp", "zero3"])
def test_actor_reference_and_reward_share_a_store(plan):
    """Three functions: log-probabilities of a frozen reference, a reward, and an update of the actor with both."""

    def objects() -> dict[str, Any]:
        actor = mlp(1)
        reference = copy.deepcopy(actor).requires_grad_(False)
        optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-2)
        return {"actor": actor, "reference": reference, "reward": mlp(3, 1), "optimizer": optimizer}

    def functions(o: dict[str, Any]) -> tuple[Callable, Callable, Callable]:
        def of_reference(x, action):
            with torch.no_grad():
                return F.log_softmax(o["reference"](x), -1).gather(-1, action[:, None]).squeeze(-1)

        def rewarded(x, action):
            with torch.no_grad():
                return torch.tanh(o["reward"](x)).squeeze(-1) + action.float().cos()

        def update(x, action, reward, old):
            o["optimizer"].zero_grad()
            new = F.log_softmax(o["actor"](x), -1).gather(-1, action[:, None]).squeeze(-1)
            ratio = (new - old).exp()
            advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            loss = loss + 0.1 * (new - old).mean()
            loss.backward()
            o["optimizer"].step()
            return loss, ratio

        return of_reference, rewarded, update

    def run(of_reference, rewarded, update) -> list:
        found = []
        for i in range(STEPS):
            x = numbers(ROWS, WIDTH, seed=i)
            action = torch.randint(0, WIDTH, (ROWS,), generator=torch.Generator().manual_seed(i))
            found.append(update(x, action, rewarded(x, action), of_reference(x, action)))
        return found

    o = objects()
    expected = run(*functions(o))
    fresh = objects()
    store = tutti.Store(**fresh)
    x, action, y = numbers(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.int64), numbers(ROWS)
    examples = (x, action), (x, action), (x, action, y, y)
    made = [
        tutti.function(f, *example, store=store, cluster="cpu:2", plan=plan)
        for f, example in zip(functions(fresh), examples, strict=True)
    ]
    torch.testing.assert_close(run(*made), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(store.state_dict("actor"), dict(o["actor"].state_dict()), rtol=1e-5, atol=1e-6)
    state = store.training_state()
    again = tutti.Store(**objects())
    other = tutti.function(functions(again.holdings.objects)[2], *examples[2], store=again, cluster="cpu:4", plan="tp")
    assert not [name for name in again.layouts if "reference" in name or "reward" in name]  # which it does not use
    again.load_training_state(state)
    torch.testing.assert_close(other(*examples[2]), made[2](*examples[2]), rtol=1e-5, atol=1e-6)


# -- what is refused ------------------------------------------------------------------------------------------------


def test_a_gradient_that_is_left_over_is_refused():
    model = mlp(1)

    def f(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with pytest.raises(ValueError, match="leaves a gradient in parameter"):
        tutti.function(f, numbers(ROWS, WIDTH), store=tutti.Store(model=model))
    assert all(p.grad is None for p in model.parameters())


def test_a_gradient_that_is_left_over_after_the_update_is_refused():
    model = mlp(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def f(x):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model(x).sum().backward()

    with pytest.raises(ValueError, match="leaves a gradient in parameter"):
        tutti.function(f, numbers(ROWS, WIDTH), store=tutti.Store(model=model, optimizer=optimizer))


def test_a_schedule_within_the_function_is_refused():
    model = mlp(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def f(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    with pytest.raises(ValueError, match="changes the learning rate"):
        tutti.function(f, numbers(ROWS, WIDTH), store=tutti.Store(model=model, optimizer=optimizer))
    assert optimizer.param_groups[0]["lr"] == 0.1 and "step" not in vars(optimizer)


def test_a_module_that_the_store_does_not_hold():
    with pytest.raises(ValueError, match="is a Sequential that is not in the store"):
        tutti.function(lambda m, x: m(x), mlp(1), numbers(ROWS, WIDTH))


def test_two_optimizers_of_one_parameter():
    model = mlp(1)
    a, b = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    with pytest.raises(ValueError, match="'a' and 'b' both update parameter"):
        tutti.Store(model=model, a=a, b=b)


def test_tensors_that_cannot_be_replaced():
    with pytest.raises(ValueError, match="tuple of tensors"):
        tutti.Store(state={"h": (torch.zeros(2), torch.zeros(2))})
    with pytest.raises(ValueError, match="is a tensor; put it in a list or dict"):
        tutti.Store(state=torch.zeros(2))


def test_functions_that_are_planned_together():
    """Stored layouts that suit both, and the numbers of plain PyTorch."""

    def objects() -> dict[str, Any]:
        model = mlp(1)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)}

    def made_of(o: dict[str, Any]) -> tuple[Callable, Callable]:
        def train(x):
            o["optimizer"].zero_grad()
            loss = o["model"](x).square().mean()
            loss.backward()
            o["optimizer"].step()
            return loss

        def decode(x):
            with torch.no_grad():
                return o["model"](x)

        return train, decode

    x, y = numbers(ROWS, WIDTH), numbers(2, WIDTH, seed=5)
    train, decode = made_of(objects())
    expected = [(train(x), decode(y)) for _ in range(STEPS)]
    o = objects()
    train, decode = made_of(o)
    members = {"train": (train, (x,), 1.0), "decode": (decode, (y,), 20.0)}
    fns = tutti.functions(members, store=tutti.Store(**o), cluster="cpu:4")
    assert fns["train"].plan.mesh == fns["decode"].plan.mesh
    found = [(fns["train"](x), fns["decode"](y)) for _ in range(STEPS)]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
