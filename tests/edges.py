"""Small models at the edges of what can be captured, and what plain PyTorch makes of them.

A case is a function that returns (model, batch, loss). Batches have 12 rows, so that 2, 3 and 4 devices divide them.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tutti.tracing.batch import FlatBatch

ROWS, WIDTH, CLASSES = 12, 8, 4
Case = tuple[nn.Module, Any, Callable | None]
CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Any]) -> Callable[[], Any]:
    """Enter a case; what it returns may be a model alone, then with `points()` as its batch."""

    def whole() -> Case:
        parts = make()
        parts = parts if isinstance(parts, tuple) else (parts, points(), None)
        return parts if len(parts) == 3 else (*parts, None)

    CASES[make.__name__] = whole
    return make


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def labels(seed: int = 2) -> Tensor:
    return torch.randint(0, CLASSES, (ROWS,), generator=torch.Generator().manual_seed(seed))


def points() -> dict[str, Tensor]:
    return {"x": numbers(ROWS, WIDTH), "y": labels()}


class Net(nn.Module):
    """Two layers between which a subclass does something."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, CLASSES)

    def between(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.down(self.between(self.up(x))), y)


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def after_steps(make: Callable[[], Case], steps: int = 3, microbatches: int = 1) -> dict[str, Tensor]:
    """Losses, gradients of the last step, parameters and buffers that plain PyTorch has after some steps."""
    model, batch, loss = make()
    optimizer = optimizer_for(model)
    state: dict[str, Tensor] = {}
    for i in range(steps):
        optimizer.zero_grad()
        total = torch.zeros(())
        for k in range(microbatches):
            one = FlatBatch(batch).parts(microbatches)[k].batch
            if loss is not None:
                value = loss(model, one)
                value = value[0] if isinstance(value, tuple) else value
            else:
                value = model(**one) if isinstance(one, dict) else model(*one)
                value = value["loss"] if isinstance(value, dict) else getattr(value, "loss", value)
            (value / microbatches).backward()
            total = total + value.detach() / microbatches
        optimizer.step()
        state[f"loss {i}"] = total
    state |= {f"param:{n}": p.detach().clone() for n, p in model.named_parameters()}
    state |= {f"buffer:{n}": b.clone() for n, b in model.named_buffers()}
    return state


# -- weights reached in odd ways, recomputation, hooks ---------------------------------------------------------------


class Checkpointed(Net):
    def __init__(self, reentrant: bool, dropout: float = 0.0):
        super().__init__()
        self.reentrant = reentrant
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH))

    def between(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@case
def checkpoint_without_reentrance():
    return Checkpointed(False)


@case
def checkpoint_with_reentrance():
    return Checkpointed(True)


@case
def checkpoint_in_checkpoint():
    class Nested(Checkpointed):
        def between(self, x):
            return checkpoint(lambda x: checkpoint(self.inner, x, use_reentrant=False).sin(), x, use_reentrant=False)

    return Nested(False)


@case
def checkpoint_of_a_sequence():
    class Sequence(Checkpointed):
        def between(self, x):
            return checkpoint_sequential(self.inner, 2, x, use_reentrant=False)

    return Sequence(False)


@case
def weights_in_a_list():
    class Listed(Net):
        def __init__(self):
            super().__init__()
            self.weights = [self.up.weight, self.down.weight]

        def between(self, x):
            return torch.tanh(x) * self.weights[0].sum() + sum(w.square().mean() for w in self.weights)

    return Listed()


@case
def weights_in_a_closure():
    model = Net()
    penalize = [p for p in model.parameters()]

    def loss(model, batch):
        return model(**batch) + 1e-2 * sum(p.abs().sum() for p in penalize)

    return model, points(), loss


@case
def weights_of_param_groups():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def loss(model, batch):
        return model(**batch) + 0.1 * sum(p.square().sum() for g in optimizer.param_groups for p in g["params"])

    return model, points(), loss


@case
def weights_in_a_view_made_before():
    class Viewed(Net):
        def __init__(self):
            super().__init__()
            self.views = {"t": self.up.weight.detach().t()}

        def between(self, x):
            return x @ self.views["t"]

    return Viewed()


@case
def weights_in_a_tuple_and_an_object():
    class Holder:
        def __init__(self, w):
            self.w = w

    class WithState(Net):
        def __init__(self):
            super().__init__()
            self.holder, self.pair = Holder(self.up.weight), (self.down.weight, 1)

        def between(self, x):
            return x @ self.holder.w + self.pair[0].mean()

    return WithState()


@case
def hook_on_a_parameter():
    model = Net()
    model.up.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
    model.down.bias.register_hook(lambda g: 2 * g)
    return model


@case
def hook_after_accumulation():
    model = Net()

    def halve(p):
        p.grad.mul_(0.5)

    model.up.weight.register_post_accumulate_grad_hook(halve)
    return model


@case
def hooks_of_modules():
    model = Net()
    model.up.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    model.up.register_forward_hook(lambda m, args, out: out + 1)
    model.down.register_full_backward_hook(lambda m, g_in, g_out: tuple(3 * g for g in g_in))
    model.down.register_full_backward_pre_hook(lambda m, g: (g[0] * 0.5,))
    return model


@case
def hook_on_an_activation():
    class Hooked(Net):
        def between(self, x):
            x = torch.tanh(x)
            x.register_hook(lambda g: g * 0.1)
            return x

    return Hooked()


@case
def module_under_two_names():
    class Twice(Net):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(WIDTH, WIDTH)
            self.b = self.a
            self.same = nn.ModuleList([self.a, self.a])

        def between(self, x):
            return self.b(torch.tanh(self.a(x))) + self.same[1](x)

    return Twice()


@case
def parameter_under_two_names():
    class Tied(Net):
        def __init__(self):
            super().__init__()
            self.other = nn.Linear(WIDTH, WIDTH)
            self.other.weight = self.up.weight
            self.alias = self.up.bias

        def between(self, x):
            return self.other(torch.tanh(x)) + self.alias

    return Tied()


@case
def frozen_part_and_unused_parameter():
    model = Net()
    model.up.weight.requires_grad_(False)
    model.unused = nn.Parameter(torch.ones(3))
    return model


@case
def parametrized_weights():
    model = Net()
    nn.utils.parametrizations.weight_norm(model.up)
    nn.utils.parametrizations.orthogonal(model.down, orthogonal_map="cayley")
    return model


@case
def spectral_norm():
    model = Net()
    nn.utils.parametrizations.spectral_norm(model.up)
    return model


@case
def old_weight_norm_sets_an_attribute():
    model = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(model.up)
    return model


@case
def gradients_inside_forward():
    class Force(Net):
        """The gradient of an energy is a part of the loss, as in potentials of molecules."""

        def forward(self, x, y):
            x = x.detach().requires_grad_()
            energy = self.down(torch.tanh(self.up(x))).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return force.square().mean() + energy.square() * 1e-3

    return Force()


@case
def custom_autograd_function():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g * w, (g * x).sum(0)

    class Custom(Net):
        def between(self, x):
            return Square.apply(x, self.up.bias)

    return Custom()


# -- state -----------------------------------------------------------------------------------------------------------


class Stateful(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))


@case
def buffer_written_in_place():
    class M(Stateful):
        def between(self, x):
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * x.mean(0))
                self.count += 1
            return torch.tanh(x - self.mean)

    return M()


@case
def buffer_rebound():
    class M(Stateful):
        def between(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.count = self.count + 1
            return torch.tanh(x - self.mean / self.count)

    return M()


@case
def buffer_copied():
    class M(Stateful):
        def between(self, x):
            y = torch.tanh(x - self.mean)
            self.mean.copy_(x.detach().amax(0))
            self.mean[:2] = 0.5
            self.mean.data.clamp_(max=1.0)
            return y

    return M()


@case
def buffer_read_in_backward():
    class M(Stateful):
        def between(self, x):
            y = x + x * self.mean  # whose backward reads the old values
            self.mean = self.mean + x.detach().mean(0)
            return torch.tanh(y)

    return M()


@case
def plain_tensor_attribute_as_state():
    class M(Net):
        def __init__(self):
            super().__init__()
            self.running = torch.zeros(WIDTH)

        def between(self, x):
            self.running = 0.9 * self.running + 0.1 * x.detach().mean(0)
            return torch.tanh(x - self.running)

    return M()


@case
def plain_tensor_attribute_written_in_place():
    class M(Net):
        def __init__(self):
            super().__init__()
            self.running = torch.zeros(WIDTH)

        def between(self, x):
            self.running.lerp_(x.detach().mean(0), 0.1)
            return torch.tanh(x - self.running)

    return M()


@case
def attributes_left_behind():
    class M(Net):
        def __init__(self):
            super().__init__()
            self.seen, self.calls, self.last = [], 0, None

        def between(self, x):
            self.seen.append(x)
            self.calls += 1
            self.last = torch.tanh(x)
            return self.last

    return M()


@case
def batch_norm():
    model = Net()
    model.between = nn.BatchNorm1d(WIDTH)
    return model


@case
def batch_norm_cumulative():
    model = Net()
    model.between = nn.BatchNorm1d(WIDTH, momentum=None)
    return model


@case
def batch_norm_partly_frozen():
    model = Net()
    model.between = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH).eval(), nn.LayerNorm(WIDTH))
    return model


@case
def codebook():
    class VQ(Net):
        """VQ-VAE's quantizer with a codebook that follows the data (van den Oord et al. 2017, appendix A)."""

        def __init__(self, codes: int = 6):
            super().__init__()
            self.register_buffer("codes", numbers(codes, WIDTH, seed=5))
            self.register_buffer("sizes", torch.ones(codes))
            self.register_buffer("sums", self.codes.clone())

        def between(self, x):
            distances = (x[:, None] - self.codes).square().sum(-1)
            onehot = F.one_hot(distances.argmin(-1), len(self.codes)).to(x.dtype)
            chosen = onehot @ self.codes
            with torch.no_grad():
                self.sizes.mul_(0.9).add_(onehot.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(onehot.T @ x, alpha=0.1)
                n = self.sizes.sum()
                smoothed = (self.sizes + 1e-5) / (n + 6e-5) * n
                self.codes.copy_(self.sums / smoothed[:, None])
            return x + (chosen - x).detach() + 0.25 * (x - chosen.detach()).square().mean()

    return VQ()


@case
def ema_teacher_in_buffers():
    class M(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("teacher", self.up.weight.detach().clone())

        def between(self, x):
            with torch.no_grad():
                self.teacher.mul_(0.9).add_(self.up.weight, alpha=0.1)
            return torch.tanh(x) + 0.1 * (x @ self.teacher)

    return M()


@case
def momentum_encoder():
    class MoCo(Net):
        """Keys come from an encoder that follows the other one (He et al. 2020); the queue is a buffer."""

        def __init__(self):
            super().__init__()
            self.key = copy.deepcopy(self.up).requires_grad_(False)
            self.register_buffer("queue", F.normalize(numbers(24, WIDTH, seed=7), dim=1))
            self.register_buffer("at", torch.zeros((), dtype=torch.long))

        def forward(self, x, y):
            with torch.no_grad():
                for k, q in zip(self.key.parameters(), self.up.parameters(), strict=True):
                    k.mul_(0.9).add_(q, alpha=0.1)
                keys = F.normalize(self.key(x + 0.1), dim=1)
            q = F.normalize(self.up(x), dim=1)
            logits = torch.cat([(q * keys).sum(1, keepdim=True), q @ self.queue.clone().T], 1) / 0.5
            with torch.no_grad():
                where = (self.at + torch.arange(len(x))) % len(self.queue)
                self.queue.index_copy_(0, where, keys)
                self.at += len(x)
            return F.cross_entropy(logits, torch.zeros_like(y)) + F.cross_entropy(self.down(q), y)

    return MoCo()


@case
def weights_clamped_in_forward():
    class M(Net):
        def between(self, x):
            with torch.no_grad():
                self.down.weight.clamp_(-0.2, 0.2)
            return torch.tanh(x)

    return M()


@case
def weights_clamped_through_data():
    class M(Net):
        def between(self, x):
            self.down.weight.data.clamp_(-0.2, 0.2)
            return torch.tanh(x)

    return M()


@case
def embedding_with_a_largest_norm():
    class M(Net):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(CLASSES, WIDTH, max_norm=1.0)

        def forward(self, x, y):
            return F.cross_entropy(self.down(self.up(x) + self.embed(y)), y)

    return M()


# -- values ----------------------------------------------------------------------------------------------------------


@case
def finite_or_raise():
    class M(Net):
        def between(self, x):
            if not torch.isfinite(x).all():
                raise ValueError("not finite")
            assert (x < 1e6).all(), "too large"
            return torch.tanh(x)

    return M()


@case
def finite_or_warn():
    class M(Net):
        def between(self, x):
            if torch.isnan(x).any():
                print("NaN")
            return torch.tanh(x)

    return M()


@case
def clamp_where_not_finite():
    class M(Net):
        def between(self, x):
            if torch.isinf(x).any() or torch.isnan(x).any():
                x = torch.clamp(x, min=-100.0, max=100.0)
            return torch.tanh(x)

    return M()


@case
def labels_in_range():
    class M(Net):
        def forward(self, x, y):
            if y.max() >= CLASSES or y.min().item() < 0:
                raise IndexError("label out of range")
            weights = torch.bincount(y, minlength=CLASSES).float() + 1
            return F.cross_entropy(self.down(self.up(x)), y, weight=weights / weights.sum())

    return M()


@case
def mask_that_is_all_ones():
    class M(Net):
        def forward(self, x, y, mask):
            if not mask.all():
                x = x * mask
            return super().forward(x, y)

    return M(), {**points(), "mask": torch.ones(ROWS, 1)}


@case
def rows_selected_by_labels():
    class M(Net):
        def forward(self, x, y):
            logits = self.down(torch.tanh(self.up(x)))
            return F.cross_entropy(logits[y > 0], y[y > 0]) + logits.masked_select((y == 0)[:, None]).mean()

    return M()


@case
def distribution_with_checks():
    class M(Net):
        def forward(self, x, y):
            logits = self.down(torch.tanh(self.up(x)))
            normal = torch.distributions.Normal(logits, F.softplus(logits) + 0.1, validate_args=True)
            categorical = torch.distributions.Categorical(logits=logits, validate_args=True)
            return -categorical.log_prob(y).mean() - 0.01 * normal.log_prob(torch.ones(CLASSES)).mean()

    return M()


@case
def binary_cross_entropy():
    class M(Net):
        def forward(self, x, y):
            p = torch.sigmoid(self.down(torch.tanh(self.up(x))))
            return F.binary_cross_entropy(p, F.one_hot(y, CLASSES).float())

    return M()


@case
def checks_of_torch():
    class M(Net):
        def between(self, x):
            torch._check(x.shape[1] == WIDTH)
            torch._assert_async((x < 1e6).all())
            torch._assert(x.dim() == 2, "two dims")
            return torch.tanh(x)

    return M()


@case
def lengths_as_a_list():
    class M(Net):
        def forward(self, x, y, lengths):
            parts = self.down(torch.tanh(self.up(x))).split((lengths * len(x) // lengths.sum()).tolist())
            return sum(p.square().mean() for p in parts) + F.cross_entropy(torch.cat(parts), y)

    return M(), {**points(), "lengths": torch.tensor([1, 2, 3])}


# -- batches ---------------------------------------------------------------------------------------------------------


class Targets(NamedTuple):
    y: Tensor
    weight: Tensor


@dataclass
class Sample:
    x: Tensor
    scale: float


@case
def nested_batch():
    batch = {
        "inputs": Sample(numbers(ROWS, WIDTH), 0.5),
        "targets": Targets(labels(), numbers(ROWS, seed=4).abs()),
        "more": {"shift": torch.ones(WIDTH), "mode": "tanh", "nothing": None},
    }

    def loss(model, b):
        x = b["inputs"].x * b["inputs"].scale + b["more"]["shift"]
        x = getattr(torch, b["more"]["mode"])(model.up(x))
        each = F.cross_entropy(model.down(x), b["targets"].y, reduction="none")
        return (each * b["targets"].weight).mean()

    return Net(), batch, loss


@case
def lists_of_samples():
    """As detection has them: each sample has its own number of boxes."""
    counts = [1 + i % 3 for i in range(ROWS)]
    batch = {"x": numbers(ROWS, WIDTH), "boxes": [{"b": numbers(n, CLASSES, seed=i)} for i, n in enumerate(counts)]}

    def loss(model, b):
        out = model.down(torch.tanh(model.up(b["x"])))
        return sum((o - t["b"]).square().mean() for o, t in zip(out, b["boxes"], strict=True)) / len(out)

    return Net(), batch, loss


@case
def batch_as_a_list_of_tensors():
    def loss(model, b):
        return model(b[0], b[1])

    return Net(), [numbers(ROWS, WIDTH), labels()], loss


@case
def branch_by_a_conditional_expression():
    class M(Net):
        def between(self, x):
            scale = 2.0 * x.mean() if x.abs().max() > 1 and not torch.isnan(x).any() else x.std()
            return torch.tanh(x) * scale

    return M()


@case
def branches_in_several_layers():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            y = self.linear(x)
            if y.mean() > 0:
                y = y * 0.5
                bias = y.mean(0)
            else:
                bias = torch.zeros(WIDTH)
            return x + torch.tanh(y) + bias

    class M(Net):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(Block(), Block(), Block())

        def between(self, x):
            return self.blocks(x)

    return M()


@case
def loss_that_returns_metrics():
    def loss(model, b):
        logits = model.down(torch.tanh(model.up(b["x"])))
        value = F.cross_entropy(logits, b["y"])
        return value, {"accuracy": (logits.argmax(1) == b["y"]).float().mean(), "logits": logits}

    return Net(), points(), loss


@case
def entries_without_rows():
    batch = {**points(), "scale": torch.tensor(0.5), "shift": numbers(WIDTH), "matrix": numbers(3, WIDTH, seed=9)}

    class M(Net):
        def forward(self, x, y, scale, shift, matrix):
            return super().forward(x * scale + shift + matrix.mean(0), y)

    return M(), batch


@case
def weights_read_while_gradients_are_off():
    class M(Net):
        def between(self, x):
            with torch.no_grad():
                norm = self.up.weight.norm() + sum(p.abs().sum() for p in self.parameters())
            with torch.inference_mode():
                size = self.down.weight.detach().norm()
            return torch.tanh(x / norm) * size.clone()

    return M()


@case
def inner_gradient_step():
    class Maml(Net):
        """A gradient step inside forward, through which the outer gradient goes (Finn et al. 2017)."""

        def forward(self, x, y):
            inner = F.cross_entropy(x @ self.up.weight.T @ self.down.weight.T, y)
            (g,) = torch.autograd.grad(inner, self.up.weight, create_graph=True)
            return F.cross_entropy(x @ (self.up.weight - 0.1 * g).T @ self.down.weight.T, y)

    return Maml()


@case
def functional_call_of_a_submodule():
    class M(Net):
        def between(self, x):
            halved = {name: p / 2 for name, p in self.up.named_parameters()}
            return torch.tanh(torch.func.functional_call(self.up, halved, (x,)))

    return M()


@case
def vmapped_module():
    class M(Net):
        def between(self, x):
            return torch.vmap(lambda row: torch.tanh(row) * self.up.bias)(x)

    return M()


@case
def branch_that_returns():
    class M(Net):
        def between(self, x):
            scale = 0.5
            if torch.isfinite(x).all():
                y = x * scale
                return torch.tanh(y)
            x = torch.nan_to_num(x)
            return torch.sin(x)

    return M()


@case
def complex_parameters():
    class S4D(Net):
        """A diagonal state space (Gu et al. 2022) with complex parameters, as a convolution by FFT."""

        def __init__(self, states: int = 4):
            super().__init__()
            self.a = nn.Parameter(torch.complex(-numbers(WIDTH, states).abs(), numbers(WIDTH, states, seed=2)))
            self.c = nn.Parameter(torch.complex(numbers(WIDTH, states, seed=3), numbers(WIDTH, states, seed=4)))

        def between(self, x):
            x = x.unsqueeze(-1) * torch.linspace(0, 1, 6)  # (rows, width, length)
            kernel = (self.c.unsqueeze(-1) * torch.exp(self.a.unsqueeze(-1) * torch.arange(6))).sum(1).real
            filtered = torch.fft.irfft(torch.fft.rfft(x, n=12) * torch.fft.rfft(kernel, n=12), n=12)[..., :6]
            return torch.tanh(filtered).mean(-1)

    return S4D()


@case
def tensor_of_tensors():
    class M(Net):
        def forward(self, x, y, grid):
            matrix = torch.tensor([[grid[0], grid[1]], [1, grid.prod()]])
            return super().forward(x * matrix[:, 1].float().mean(), y)

    return M(), {**points(), "grid": torch.tensor([2, 3])}


TABLE: dict[str, Tensor] = {}


@case
def caches_filled_in_the_first_call():
    """Masks and position tables kept in an attribute, a container, a class, a global variable, and caches."""

    class M(Net):
        cache: ClassVar[dict[int, Tensor]] = {}
        calls = 0

        def __init__(self):
            super().__init__()
            self.mask, self.ready, self.angles = None, False, {}

        @staticmethod
        @functools.lru_cache(maxsize=2)
        def table(width):
            return torch.arange(width).float().cos(), [torch.ones(width)]

        def between(self, x):
            type(self).calls += 1
            if not self.ready:
                self.mask, self.ready = torch.ones(WIDTH), True
                self.mask[: WIDTH // 2] = 0.5
            if "angles" not in self.angles:
                self.angles["angles"] = (torch.linspace(0, 1, WIDTH),)
            if WIDTH not in self.cache:
                self.cache[WIDTH] = torch.full((WIDTH,), 0.5)
            if "bias" not in TABLE:
                TABLE["bias"] = torch.eye(WIDTH)
            if not hasattr(self, "steps"):
                self.steps = torch.arange(WIDTH) / WIDTH
            cosines, (ones,) = self.table(WIDTH)
            return torch.tanh(x @ TABLE["bias"] * self.mask + self.angles["angles"][0] + self.cache[WIDTH]) + (
                cosines + ones + self.steps
            )

    TABLE.clear()
    return M()


@case
def packed_sequences_of_a_recurrent_network():
    class Packed(Net):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRU(2, WIDTH, batch_first=True)

        def forward(self, x, lengths, y):
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            outputs, lengths = nn.utils.rnn.pad_packed_sequence(self.cell(packed)[0], batch_first=True)
            return super().forward(outputs.sum(1) / lengths[:, None], y)

    lengths = torch.tensor([2, 3, 1] * (ROWS // 3))
    return Packed(), {"x": numbers(ROWS, 3, 2), "lengths": lengths, "y": labels()}


@case
def shapes_changed_in_place():
    """Views are written into afterwards, and the tensor under its old shape."""

    class Reshaped(Net):
        def between(self, x):
            y = x * 2
            flat = y.view(-1)
            y.unsqueeze_(1).transpose_(0, 2)
            y.mul_(0.5)
            flat.add_(0.1)
            return torch.tanh(y.swapaxes_(0, 2).squeeze_(1).t_().t())

    return Reshaped()


@case
def checkpointed_layers_under_a_linear_head():
    """The head reads the last layer's norm through a reshape."""

    class Layers(Net):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True) for _ in range(2)
            )
            self.head = nn.Linear(4, 4)

        def between(self, x):
            x = x.view(-1, 2, 4)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return self.head(x).flatten(1)

    return Layers()


@case
def laplacian_by_hessians():
    class Laplacian(Net):
        def field(self, q):
            return torch.tanh(self.up(q)).square().sum()

        def between(self, x):
            hessians = torch.vmap(torch.func.hessian(self.field))(x)
            return x + hessians.diagonal(dim1=1, dim2=2).sum(1, keepdim=True)

    return Laplacian()


@case
def second_derivative_of_a_group_norm():
    """The penalty on a critic's gradient."""

    class Critic(Net):
        def __init__(self):
            super().__init__()
            self.norm = nn.GroupNorm(2, WIDTH)

        def between(self, x):
            with torch.enable_grad():
                x = x if x.requires_grad else x.requires_grad_()
                (slope,) = torch.autograd.grad(self.norm(x).sin().sum(), x, create_graph=True)
            return torch.tanh(slope) + x

    return Critic()


@case
def parameters_without_elements():
    class Empty(Net):
        def __init__(self):
            super().__init__()
            self.none = nn.Parameter(torch.zeros(0, WIDTH))

        def between(self, x):
            return torch.cat([torch.tanh(x), self.none]) + self.none.reshape(-1).sum()

    return Empty()


@case
def a_comparison_of_tensors_that_checks():
    class Compared(Net):
        def between(self, x):
            if torch.equal(x, torch.zeros_like(x)):
                raise ValueError("the activations are zero")
            return torch.tanh(x)

    return Compared()
