"""Models of operators that torch treats specially train as plain PyTorch does, under any plan.

Loss, parameters and buffers after three steps of SGD with momentum are within 1e-5 of plain PyTorch: on one device,
under data and tensor parallelism, ZeRO-3 and a plan drawn at random from all that the rules allow.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import tutti
from cases import some
from tutti.ops import rule_of

TOLERANCE = 1e-5
HALF = 1e-3  # of float16 parameters, which are rounded at every step
STEPS, RATE = 3, 0.05
Case = tuple[nn.Module, dict[str, Tensor]]
CASES: dict[str, Callable[[], Case]] = {}
SLOW: set[str] = set()


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(*shape: int, below: int, low: int = 0) -> Tensor:
    return torch.randint(low, below, shape, generator=torch.Generator().manual_seed(3))


class Weighed(nn.Module):
    """A linear layer, a function of what it gives and of the rest of the batch, and a sum with unequal weights."""

    def __init__(self, function: Callable, module: nn.Module | None = None, width: int = 8):
        super().__init__()
        self.linear, self.module, self.function = nn.Linear(width, width), module, function

    def forward(self, x: Tensor, **rest: Tensor) -> Tensor:
        h = self.linear(x)
        y = self.function(h, **rest) if self.module is None else self.function(self.module, h, **rest)
        y = torch.view_as_real(y) if y.is_complex() else y
        weights = torch.linspace(-1, 1.3, y.numel(), dtype=y.dtype).view(y.shape)
        return (y * weights).sum() / y.numel() + 0.1 * y.square().mean()


def case(
    name: str, function: Callable, module: Callable[[], nn.Module] | None = None, shape=(4, 6, 8), **rest: Tensor
) -> None:
    def make() -> Case:
        torch.manual_seed(0)
        return Weighed(function, module and module(), shape[-1]), {"x": random(*shape), **rest}

    CASES[name] = make


def hugging_face(name: str, model: type, config: transformers.PretrainedConfig) -> None:
    def make() -> Case:
        torch.manual_seed(0)
        ids = integers(4, 8, below=32)
        return Output(model(config)), {"input_ids": ids, "labels": ids}

    CASES[name] = make
    SLOW.add(name)


class Output(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Tensor:
        return self.model(**batch).loss


TEXT = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, vocab_size=32, intermediate_size=16)
hugging_face("gpt-oss", transformers.GptOssForCausalLM, transformers.GptOssConfig(
    **TEXT, num_key_value_heads=2, head_dim=4, num_local_experts=4, num_experts_per_tok=2, sliding_window=4,
    max_position_embeddings=32, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}))  # fmt: skip
hugging_face("deepseek-v3", transformers.DeepseekV3ForCausalLM, transformers.DeepseekV3Config(
    **TEXT, num_key_value_heads=4, moe_intermediate_size=8, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
    topk_group=1, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4,
    qk_nope_head_dim=8, v_head_dim=8))  # fmt: skip
hugging_face("qwen3-moe", transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig(
    **TEXT, num_key_value_heads=2, head_dim=4, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2,
    decoder_sparse_step=1, norm_topk_prob=True))  # fmt: skip

ENDS = torch.tensor([[5], [11], [11], [24]], dtype=torch.int32)
case("grouped_mm", lambda m, h, ends: F.grouped_mm(h.flatten(0, 1), m.weight.view(4, 8, 8), offs=ends[:, 0]),
     lambda: nn.Linear(8, 32), ends=ENDS)  # fmt: skip

LENGTHS = {"of": torch.tensor([6, 6, 5, 4]), "to": torch.tensor([3, 2, 1, 3]), "t": integers(4, 3, low=1, below=8)}


def ctc_case(name: str, **options) -> None:
    def loss(h: Tensor, t: Tensor, of: Tensor, to: Tensor) -> Tensor:
        return F.ctc_loss(h.log_softmax(-1).transpose(0, 1), t, of, to, **options)

    case(name, loss, **LENGTHS)


ctc_case("ctc")
ctc_case("ctc, sum, infinite losses as zero", reduction="sum", zero_infinity=True)
case("ctc of tuples", lambda h, t: F.ctc_loss(h.log_softmax(-1).transpose(0, 1), t, (6, 6, 5, 4), (3, 2, 1, 3)),
     t=LENGTHS["t"])  # fmt: skip


class S4D(nn.Module):
    """The diagonal state space of Gu et al. 2022, with a convolution by FFT."""

    def __init__(self, channels: int = 8, states: int = 3):
        super().__init__()
        self.c = nn.Parameter(torch.view_as_real(torch.randn(channels, states, dtype=torch.complex64)))
        self.log_decay = nn.Parameter(torch.full((channels, states), math.log(0.5)))
        self.frequency = nn.Parameter(math.pi * torch.arange(states).repeat(channels, 1).float())
        self.log_step, self.skip = nn.Parameter(torch.rand(channels) - 2), nn.Parameter(torch.randn(channels))

    def forward(self, x: Tensor) -> Tensor:
        u, length, step = x.transpose(1, 2), x.shape[1], self.log_step.exp().unsqueeze(-1)
        a = -self.log_decay.exp() + 1j * self.frequency
        c = torch.view_as_complex(self.c) * (torch.exp(a * step) - 1.0) / a
        kernel = 2 * torch.einsum("hn,hnl->hl", c, ((a * step).unsqueeze(-1) * torch.arange(length)).exp()).real
        y = torch.fft.irfft(torch.fft.rfft(u, n=2 * length) * torch.fft.rfft(kernel, n=2 * length), n=2 * length)
        return F.gelu(y[..., :length] + u * self.skip.unsqueeze(-1))


case("s4d", lambda m, h: m(h), S4D)
case("conjugates", lambda h: torch.complex(h, h.flip(1)).conj() @ torch.complex(h, h.flip(2)).mT)
case("view_as_complex", lambda h: (torch.view_as_complex(h.unflatten(-1, (4, 2))) * (1 + 2j)).abs())

for reduce in ("prod", "mean", "amax", "amin"):
    for own in (True, False):
        case(f"scatter_reduce {reduce} {own}", lambda h, i, reduce=reduce, own=own: torch.ones(4, 5, 8).scatter_reduce(
            1, i, h, reduce, include_self=own), i=integers(4, 6, 8, below=5))  # fmt: skip
        case(f"index_reduce {reduce} {own}", lambda h, i, reduce=reduce, own=own: torch.ones(6, 5, 4, 8).index_reduce(
            1, i, h.transpose(0, 1).unsqueeze(1).expand(6, 4, 4, 8), reduce, include_self=own),
            i=integers(4, below=5))  # fmt: skip
        if own or reduce != "prod":
            SLOW |= {f"scatter_reduce {reduce} {own}", f"index_reduce {reduce} {own}"}


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = nn.BatchNorm1d(6, momentum=None)
        self.sync = nn.SyncBatchNorm(6)
        self.instance = nn.InstanceNorm1d(6, affine=True, track_running_stats=True)
        self.group = nn.GroupNorm(3, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.group(self.instance(self.sync(self.mean(x) + 1).exp()))


case("norms", lambda m, h: m(h), Normed)


class Empty(nn.Module):
    def __init__(self):
        super().__init__()
        self.none, self.scale = nn.Parameter(torch.empty(0)), nn.Parameter(torch.tensor(1.5))
        self.down, self.up = nn.Linear(8, 0), nn.Linear(0, 8)

    def forward(self, x: Tensor, extra: Tensor) -> Tensor:
        return x * self.scale + self.up(self.down(x)) + self.none.sum() + extra.sum()


case("empty and 0-d parameters", lambda m, h, extra: m(h, extra), Empty, extra=torch.empty(4, 0))


class Dtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(8, 8).double()
        self.register_buffer("steps", torch.arange(8, dtype=torch.int8))
        self.register_buffer("mask", torch.arange(8, dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return (self.wide(x.double()) * self.mask).float() + x * self.steps


case("float64, int8, uint8", lambda m, h: m(h), Dtypes)
case("float16", lambda m, h: m(h.half()).float(), lambda: nn.Linear(8, 8).half())
case("narrow values", lambda h: F.scaled_dot_product_attention(*(x.unsqueeze(1) for x in (h, h, h[..., :4])),
                                                               is_causal=True))  # fmt: skip
case("wide values", lambda h: F.scaled_dot_product_attention(*(x.unsqueeze(1) for x in (h[..., :4], h[..., 4:], h))))
case("bool masks", lambda h, m: h.masked_fill((m > 0).masked_fill(m > 1, False), -math.inf).exp(), m=random(4, 6, 8))
case("bincount", lambda h, i: h * torch.bincount(i.flatten(), minlength=8), i=integers(4, 3, below=8))
case("gaussian_nll", lambda h: F.gaussian_nll_loss(h, h.detach().flip(1), h.abs() + 0.1))
case("volumes", lambda h: F.interpolate(F.adaptive_avg_pool3d(F.pad(h.view(4, 2, 2, 2, 6), (1,) * 6, "replicate"), 2),
                                        scale_factor=1.5, mode="trilinear"))  # fmt: skip
case("unpooling", lambda h: F.max_unpool2d(*F.max_pool2d(h.view(4, 2, 4, 6), 2, return_indices=True), 2))
case("corrcoef", lambda h: torch.corrcoef(h[0]))

PLANS = {"single": 1, "dp": 2, "tp": 2, "zero3": 2}
FEW = some(CASES, [name for name in CASES if name not in SLOW][::2])


def parallelize(name: str, plan: str | tutti.Plan, devices: int, level: str = "O0") -> tuple[tutti.Step, dict]:
    model, batch = CASES[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    return tutti.parallelize(model, optimizer, batch, cluster=f"cpu:{devices}", plan=plan, level=level), batch


def plain(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, parameters and buffers of PyTorch."""
    model, batch = CASES[name]()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    tensors = {f"param:{k}": x.detach() for k, x in model.named_parameters()}
    return losses, tensors | {f"buffer:{k}": x for k, x in model.named_buffers()}


def assert_trains(name: str, step: tutti.Step, batch: dict, expected: tuple[list[float], dict[str, Tensor]]) -> None:
    tolerance = HALF if name == "float16" else TOLERANCE
    assert [step(batch).item() for _ in range(STEPS)] == pytest.approx(
        expected[0], rel=tolerance, abs=tolerance * max(map(abs, expected[0]))
    )
    state, tensors = step.training_state(), expected[1]
    largest = max(x.double().norm() for x in tensors.values())
    for key, x in tensors.items():
        scale = max(x.double().norm(), 1e-2 * largest)
        assert (state[key].double() - x.double()).norm() <= tolerance * scale, f"{key} of {name} under {step.plan.name}"


@pytest.mark.filterwarnings("ignore:.*(in beta|zero-element tensors)")
@pytest.mark.parametrize("name", FEW)
def test_it_trains_as_plain_pytorch_does(name):
    expected = plain(name)
    for plan, devices in PLANS.items():
        step, batch = parallelize(name, plan, devices)
        assert_trains(name, step, batch, expected)
    drawn = tutti.random_plan(step.graph, 4, len(name))
    assert_trains(name, *parallelize(name, drawn, 4), expected)


@pytest.mark.parametrize(
    "plan", ["dp2xtp2xexperts4", *(pytest.param(plan, marks=pytest.mark.slow) for plan in ("ep4", "tp2", "ep2xtp2"))]
)
def test_experts_with_biases_are_split_over_devices(plan):
    """gpt-oss: the biases are added once, whatever is split."""
    step, batch = parallelize("gpt-oss", plan, 2 if plan == "tp2" else 4)
    assert torch.ops.tutti.experts.default in [n.target for n in step.graph.calls]
    assert_trains("gpt-oss", step, batch, plain("gpt-oss"))


@pytest.mark.parametrize("name", ["ctc", "s4d", "norms", "bool masks", "float64, int8, uint8"])
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*code generation for complex operators")
def test_it_trains_compiled(name):
    assert_trains(name, *parallelize(name, "tp", 2, "O2"), plain(name))


@pytest.mark.parametrize("name", ["grouped_mm", "ctc", "s4d", "norms", "volumes", "unpooling", "narrow values"])
def test_every_operator_has_a_rule(name):
    graph = parallelize(name, "single", 1)[0].graph
    assert {str(n.target) for n in graph.calls if "getitem" not in str(n.target) and rule_of(n) is None} == set()


@pytest.mark.parametrize("name", ["narrow values", "wide values"])
def test_attention_stays_one_operator_where_values_have_another_width(name):
    targets = [str(n.target) for n in parallelize(name, "single", 1)[0].graph.calls]
    assert sum("attention" in x for x in targets) == 2 and not any("softmax" in x for x in targets)


class Encoder(nn.Module):
    def __init__(self, first: bool = False):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True, norm_first=first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.attention = nn.MultiheadAttention(8, 2, 0.1, batch_first=True)

    def forward(self, x: Tensor, blocked: Tensor) -> Tensor:
        h = self.encoder(x, src_key_padding_mask=blocked)
        y, weights = self.attention(h, h, h)
        return y.square().mean() + weights.square().mean() + self.attention(h, h, h, need_weights=False)[0].mean()


@pytest.mark.parametrize("first", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_inference_kernels_are_captured_as_attention(first):
    torch.manual_seed(0)
    model, blocked = Encoder(first), torch.zeros(4, 6, dtype=torch.bool)
    blocked[:, 4:] = True
    batch = {"x": random(4, 6, 8), "blocked": blocked}
    with torch.no_grad():
        expected = model.eval()(**batch)
    graph = tutti.capture(model, batch, gradients=False)
    targets = {str(n.target) for n in graph.calls}
    assert any("scaled_dot_product" in x for x in targets)
    assert not any("_fwd" in x or "native_multi_head" in x for x in targets)
    model.train()
    for plan in ("single", "tp", "dp"):
        step = tutti.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), batch, plan=plan, level="O0",
                                 cluster=f"cpu:{PLANS[plan]}")  # fmt: skip
        torch.testing.assert_close(step.evaluate(batch), expected, rtol=TOLERANCE, atol=0)


@pytest.mark.parametrize("make", [
    lambda: Weighed(lambda m, h, i: m(i) + h[:, 0], nn.Embedding(10, 8, sparse=True)),
    lambda: Weighed(lambda m, h, i: m(i[:, None]) + h[:, 0], nn.EmbeddingBag(10, 8, mode="sum", sparse=True)),
    lambda: Weighed(lambda h, i: torch.sparse.mm(torch.sparse_coo_tensor(i[None].repeat(2, 1), torch.ones(4), (10, 4)),
                                                 h[:, 0])),
], ids=["embedding", "bag", "coo"])  # fmt: skip
def test_a_sparse_tensor_is_refused_with_what_to_write(make):
    model = make()
    batch = {"x": random(4, 6, 8), "i": integers(4, below=4)}
    with pytest.raises(ValueError, match=r"creates a sparse tensor.*sparse=False"):
        tutti.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), batch, level="O0", cluster="cpu:1")


def test_rrelu_draws_slopes_between_its_bounds():
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Weighed(lambda m, h: m(h) / h, nn.RReLU(0.2, 0.4))

    losses = set()
    for plan, devices in PLANS.items():
        model, batch = make(), {"x": random(4, 6, 8)}
        step = tutti.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), batch, plan=plan, level="O0",
                                 cluster=f"cpu:{devices}")  # fmt: skip
        losses.add(round(step(batch).item(), 5))
    assert len(losses) == 1, "the same slopes under any plan"


def test_ctc_refuses_what_its_kernels_would_write_beyond_memory_for():
    log_probs, targets = torch.randn(6, 2, 5).log_softmax(-1), torch.tensor([[1, 2], [3, 5]])
    lengths = torch.tensor([6, 6]), torch.tensor([2, 2])
    with pytest.raises(IndexError, match="labels are from 1 to 5, but must be from 0 to 4"):
        torch.ops.tutti.ctc_loss(log_probs, targets, *lengths, 0, False)
    with pytest.raises(IndexError, match="lengths beyond 6 steps or 2 labels"):
        torch.ops.tutti.ctc_loss(log_probs, targets, lengths[0], torch.tensor([2, 3]), 0, False)
