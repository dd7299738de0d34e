"""Each optimizer equals its reference: its own eager step, the library's, and under every plan."""

from __future__ import annotations

import functools
import math

import pytest
import pytorch_optimizer
import torch
from transformers import Trainer, TrainingArguments
from transformers.optimization import Adafactor

import tutti
from optim_cases import MLP, STEPS, assert_equal, batches, captured, eagerly
from tutti.optim.pure import PureOptimizer
from tutti.tracing.optimizers import NAMED, check, step_count
from tutti.tracing.optimizers.formulas.adam_8bit import block_of, decoded, encoded_positive, encoded_signed
from tutti.tracing.optimizers.lookup import find

PLANS = ("dp", "zero3", "tp2")


def muon_groups(model):
    matrices = {"params": [model.inner.weight], "use_muon": True}
    return [matrices, {"params": [model.inner.bias, *model.head.parameters()], "use_muon": False}]


class TwoOfTorch:
    """torch.optim.Muon for the hidden matrix and torch.optim.AdamW for the others."""

    def __init__(self, model):
        options = {"lr": 1e-2, "weight_decay": 0.1}
        matrices, others = (group["params"] for group in muon_groups(model))
        self.both = [torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **options),
                     torch.optim.AdamW(others, betas=(0.9, 0.95), **options)]  # fmt: skip

    def zero_grad(self):
        for optimizer in self.both:
            optimizer.zero_grad()

    def step(self):
        for optimizer in self.both:
            optimizer.step()


def groups_of(model, **options):
    """Biases in a group of their own, without weight decay."""
    vectors = [p for p in model.parameters() if p.ndim == 1]
    return [{"params": [p for p in model.parameters() if p.ndim > 1], **options}, {"params": vectors}]


# name -> ours, and the reference
PAIRS = {
    "Lion": (
        lambda m: tutti.optim.Lion(groups_of(m, weight_decay=0.3), lr=1e-3),
        lambda m: pytorch_optimizer.Lion(groups_of(m, weight_decay=0.3), lr=1e-3),
    ),
    "Lamb": (
        lambda m: tutti.optim.Lamb(m.parameters(), lr=1e-2, weight_decay=0.1),
        lambda m: pytorch_optimizer.Lamb(m.parameters(), lr=1e-2, weight_decay=0.1),
    ),
    "Muon": (lambda m: tutti.optim.Muon(m, lr=1e-2), TwoOfTorch),
    "8bit, all parameters small": (
        lambda m: tutti.optim.AdamW8bit(m.parameters(), lr=1e-2, smallest=10_000),
        lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_eager_step_equals_the_reference(name):
    ours, reference = PAIRS[name]
    assert_equal(eagerly(ours), eagerly(reference))


# name -> an optimizer that both steps in plain PyTorch and is captured
CAPTURED = {
    "Lion": PAIRS["Lion"][0],
    "Lamb": PAIRS["Lamb"][0],
    "Muon": lambda m: tutti.optim.Muon(m, lr=1e-2, ns_dtype=torch.float32),
    "AdamW8bit": lambda m: tutti.optim.AdamW8bit(m.parameters(), lr=1e-2, smallest=0, block_size=8),
    "pytorch_optimizer.Lion": lambda m: pytorch_optimizer.Lion(m.parameters(), lr=1e-3, weight_decay=0.1),
    "pytorch_optimizer.Lion, L2": lambda m: pytorch_optimizer.Lion(
        m.parameters(), lr=1e-3, weight_decay=0.1, weight_decouple=False, foreach=False
    ),
    "pytorch_optimizer.Lion, fixed decay": lambda m: pytorch_optimizer.Lion(
        m.parameters(), lr=1e-3, weight_decay=1e-3, fixed_decay=True
    ),
    "pytorch_optimizer.Lamb": lambda m: pytorch_optimizer.Lamb(
        m.parameters(), lr=1e-2, weight_decay=0.1, weight_decouple=False, grad_averaging=False
    ),
    "transformers.Adafactor": lambda m: Adafactor(
        m.parameters(), lr=1e-2, scale_parameter=False, relative_step=False, weight_decay=0.1
    ),
    "transformers.Adafactor, relative": lambda m: Adafactor(m.parameters(), beta1=0.9, warmup_init=True),
}
QUICK = {name: PLANS[i % 3] for i, name in enumerate(CAPTURED)} | {"Muon": "tp2"}
CASES = [
    pytest.param(name, plan, marks=[] if plan == QUICK[name] or (name, plan) == ("Muon", "zero3") else
                 [pytest.mark.slow])
    for name in CAPTURED for plan in PLANS
]  # fmt: skip


def test_every_optimizer_of_the_package_is_captured():
    classes = {name: kind for name, kind in vars(tutti.optim).items() if isinstance(kind, type)}
    optimizers = {name for name, kind in classes.items() if issubclass(kind, torch.optim.Optimizer)}
    assert optimizers - {"Adam8bit"} <= set(CAPTURED)  # AdamW8bit's base class, with the same update


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_plans_equal_the_eager_step(name, plan):
    _, state = captured(CAPTURED[name], plan)
    assert_equal(state, eagerly(CAPTURED[name]))


@pytest.mark.parametrize("plan", ["zero3", "tp2"])
def test_muon_in_bfloat16_drifts_little(plan):
    """Orthogonalization turns last-bit differences of gradients into some of bfloat16's."""
    _, state = captured(PAIRS["Muon"][0], plan)
    assert_equal(state, eagerly(TwoOfTorch), tolerance=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Lion", "Lamb", "Muon", "AdamW8bit", "transformers.Adafactor"])
def test_compiled(name):
    model, data = MLP(), batches()[:5]
    step = tutti.parallelize(model, CAPTURED[name](model), data[0], cluster="cpu:2", plan="zero3", level="O2")
    for batch in data:
        step(batch)
    assert_equal(step.state_dict(), eagerly(CAPTURED[name], data))


def test_zero_shards_the_state():
    """Half of each moment, and of the momentum that is orthogonalized, is on each device."""
    for name, kinds in {"AdamW8bit": ("exp_avg", "exp_avg_scale", "exp_avg_sq"), "Muon": ("momentum_buffer",)}.items():
        step, _ = captured(CAPTURED[name], "zero3", batches()[:1])
        for kind in kinds:
            key = f"{kind}:inner.weight"
            assert step.store.parts[0][key].numel() * 2 == step.store.whole(key).numel()


@pytest.mark.parametrize("name", ["Muon", "AdamW8bit", "pytorch_optimizer.Lamb"])
def test_goes_on_from_eager_steps(name):
    model = MLP()
    optimizer = CAPTURED[name](model)
    for batch in batches()[:5]:
        optimizer.zero_grad()
        model(**batch).backward()
        optimizer.step()
    assert step_count(optimizer) == 5
    step = tutti.parallelize(model, optimizer, batches()[0], cluster="cpu:1", plan="single", level="O0")
    for batch in batches()[5:10]:
        step(batch)
    assert_equal(step.state_dict(), eagerly(CAPTURED[name], batches()[:10]))


@pytest.mark.parametrize("name", ["Lion", "Muon", "AdamW8bit"])
def test_masters_of_bfloat16_parameters_are_the_float32_update(name):
    """Gradients are those of the rounded parameters; the update, and its state, are those of float32."""
    model, exact = MLP().bfloat16(), MLP()
    data = [{key: x.bfloat16() for key, x in batch.items()} for batch in batches()[:4]]
    step = tutti.parallelize(model, CAPTURED[name](model), data[0], cluster="cpu:2", plan="zero3", level="O0",
                             fp32_master_weights=True)  # fmt: skip
    exact.load_state_dict({key: x.float() for key, x in model.state_dict().items()})
    optimizer = CAPTURED[name](exact)
    for batch in data:
        gradients = step.gradients(batch)
        for key, p in exact.named_parameters():
            p.grad = gradients[key].float()
        optimizer.step()
        step(batch)
    masters = {key: step.store.whole(f"master:{key}") for key, _ in exact.named_parameters()}
    assert_equal(masters, {key: p.detach() for key, p in exact.named_parameters()})


def test_8bit_state_survives_a_state_dict():
    model = MLP()
    optimizer = tutti.optim.AdamW8bit(model.parameters(), smallest=0)
    model(**batches()[0]).backward()
    optimizer.step()
    again = tutti.optim.AdamW8bit(model.parameters(), smallest=0)
    again.load_state_dict(optimizer.state_dict())
    loaded, old = again.state[model.inner.weight], optimizer.state[model.inner.weight]
    assert (loaded["exp_avg"].dtype, loaded["exp_avg_sq"].dtype) == (torch.int8, torch.uint8)
    assert all(torch.equal(loaded[key], x) for key, x in old.items())


def reference_8bit(values, block, signed):
    """Encoding and decoding of a row, by the definition."""
    row = []
    for i in range(0, len(values), block):
        part = values[i : i + block]
        scale = max(abs(x) for x in part)
        for x in part:
            if signed:
                q = math.copysign(round(127 * math.sqrt(abs(x) / scale)), x)
                row.append(scale * math.copysign((q / 127) ** 2, x))
            else:
                row.append(scale * (round(255 * (x / scale) ** 0.25) / 255) ** 4)
    return row


@pytest.mark.parametrize("signed", [True, False])
def test_8bit_encoding(signed):
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)) ** 3
    x = x if signed else x.abs()
    code, scale = (encoded_signed if signed else encoded_positive)(x, 32)
    assert code.shape == x.shape and scale.shape == (3, 2)
    restored = decoded(code, scale, torch.float32)
    wanted = torch.tensor([reference_8bit(row, 32, signed) for row in x.tolist()])
    torch.testing.assert_close(restored, wanted, rtol=1e-5, atol=1e-7)
    assert (restored - x).norm() < (0.01 if signed else 0.02) * x.norm()
    assert torch.equal(decoded(*encoded_signed(torch.zeros(2, 32), 32), torch.float32), torch.zeros(2, 32))


def test_8bit_blocks():
    assert [block_of(row, 256) for row in (4096, 320, 100, 16, 509, 1)] == [256, 160, 100, 16, 509, 1]


def test_8bit_trains_like_adamw():
    """50 steps end within 2 % of the loss that float32 moments reach."""

    def final(make):
        model = MLP()
        optimizer = make(model.parameters(), lr=1e-2)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model(**batches()[0])
            loss.backward()
            optimizer.step()
        return loss.item()

    ours, exact = final(functools.partial(tutti.optim.AdamW8bit, smallest=0)), final(torch.optim.AdamW)
    assert ours == pytest.approx(exact, rel=0.02)


class Language(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.attn_multihead = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 4)
        self.lm_head = torch.nn.Linear(4, 5, bias=False)


def test_muon_chooses_hidden_matrices():
    model = Language()
    matrices, others = tutti.optim.Muon(model).param_groups
    assert matrices["use_muon"] and matrices["param_names"] == ["attn_multihead.weight"]
    assert others["param_names"] == ["table.weight", "attn_multihead.bias", "lm_head.weight"]
    by_name = tutti.optim.Muon(model.named_parameters()).param_groups[0]["param_names"]
    assert by_name == ["table.weight", "attn_multihead.weight"]  # the name does not say that it is an embedding
    [whole, rest] = tutti.optim.Muon([{"params": list(model.parameters()), "lr": 0.5}]).param_groups
    assert (len(whole["params"]), len(rest["params"])) == (3, 1) and whole["lr"] == rest["lr"] == 0.5


def test_muon_refuses_vectors():
    group = {"params": [torch.nn.Parameter(torch.zeros(3))], "use_muon": True}
    with pytest.raises(ValueError, match=r"parameter of shape \(3,\); Muon updates matrices: put it into a group with"):
        tutti.optim.Muon([group])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: tutti.optim.Lion(p, lr=-1), "lr is -1; it must be at least 0"),
        (lambda p: tutti.optim.Lamb(p, betas=(0.9, 1.0)), r"betas\[1\] is 1.0; it must be at least 0 and less than 1"),
        (lambda p: tutti.optim.AdamW8bit(p, block_size=0), "block_size is 0; it must be at least 1"),
        (lambda p: tutti.optim.Muon(p, adjust_lr_fn="x"), "adjust_lr_fn is 'x'; it may be None, 'original'"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(ValueError, match=message):
        make([torch.nn.Parameter(torch.zeros(2, 2))])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: pytorch_optimizer.Lion(p, maximize=True), r"Lion\(maximize=True\) is not supported; only maxim"),
        (lambda p: pytorch_optimizer.Lion(p, cautious=True), "option cautious of Lion is not supported"),
        (lambda p: pytorch_optimizer.Lamb(p, pre_norm=True), r"Lamb\(pre_norm=True\) is not supported"),
        (lambda p: pytorch_optimizer.Lamb(p, rectify=True), r"Lamb\(rectify=True\) is not supported"),
    ],
)
def test_options_of_others_that_the_rule_does_not_honour(make, message):
    with pytest.raises(ValueError, match=message):
        check(make([torch.nn.Parameter(torch.zeros(2, 2))]))


@pytest.mark.parametrize("name", ["adafactor", "adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"])
def test_what_training_arguments_name(name, tmp_path):
    """`optim=` of transformers.TrainingArguments, where it needs no further package."""
    arguments = TrainingArguments(output_dir=str(tmp_path), optim=name, use_cpu=True)
    cls, options = Trainer.get_optimizer_cls_and_kwargs(arguments)
    step, state = captured(lambda model: cls(model.parameters(), **options), "zero3", batches()[:3])
    assert_equal(state, eagerly(lambda model: cls(model.parameters(), **options), batches()[:3]))
    assert step.steps == 3


def test_every_class_has_a_rule_with_all_its_options():
    for cls in (tutti.optim.Lion, tutti.optim.Lamb, tutti.optim.Muon, tutti.optim.Adam8bit, tutti.optim.AdamW8bit):
        optimizer = cls([torch.nn.Parameter(torch.zeros(2, 2))])
        check(optimizer)
        matched, rule = find(optimizer)
        assert matched is cls and NAMED[f"tutti.{cls.__name__}"] is rule
        assert issubclass(cls, PureOptimizer) and optimizer.defaults.keys() - {"lr"} <= rule.options
