"""Fused operators, forward and backward, against the same functions in plain PyTorch, eager and compiled, in turns.

Ours as O1 runs them: the forward and the backward formula of `tutti.nn.fused` each compiled once; the linear layer
with cross-entropy, which works in blocks and makes its gradients with the loss, with its own kernels; functions that
need no formula of ours (causal attention; a layer norm of a sum; bias and GELU; bias, dropout and a sum), with a
weighted sum as their loss, captured and compiled at O1. The peers are the functions as models write them, with
autograd, eagerly and under `torch.compile`. The update is AdamW behind clipping: theirs `clip_grad_norm_` and
PyTorch's fused AdamW, or, compiled, its multi-tensor one; the size is the number of layers. Each at three sizes, in
float32 and bfloat16. `saved_bytes` is what is kept from the forward to the backward pass, operands included, each
storage once, where that is known. `times_faster` is the median over rounds of the peer's time over ours. `load` is
how many processes wanted the machine before each case: with others at work, the smallest times tell more than
medians. `--quick` is the smallest size.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

import harness
import tutti.nn.loss.linear_cross_entropy  # noqa: F401  (registers the operators)
from tutti.exec.kernels.levels import prepare
from tutti.exec.runtimes.runtime import runtime_for
from tutti.ir.step_graph import StepGraph
from tutti.lower.shard import shard
from tutti.nn.fused import FUSED
from tutti.plan.plan import Plan
from tutti.tracing.capture import capture

ops = torch.ops.tutti
DTYPES = (torch.float32, torch.bfloat16)
EPS = 1e-6


def norm(x: Tensor, weight: Tensor) -> Tensor:
    full = x.float()
    return weight * (full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def attention(q: Tensor, k: Tensor, v: Tensor, cotangent: Tensor) -> Tensor:
    return (F.scaled_dot_product_attention(q, k, v, is_causal=True) * cotangent).sum()


def layer_norm_of_sum(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, cotangent: Tensor) -> Tensor:
    return (F.layer_norm(x + residual, weight.shape, weight, bias) * cotangent).sum()


def bias_gelu(x: Tensor, bias: Tensor, cotangent: Tensor) -> Tensor:
    return (F.gelu(x + bias) * cotangent).sum()


def bias_dropout_sum(x: Tensor, residual: Tensor, bias: Tensor, cotangent: Tensor) -> Tensor:
    return ((residual + F.dropout(x + bias, 0.1)) * cotangent).sum()


@dataclass(frozen=True)
class Case:
    """function: as models write it. make: its operands, of a size and dtype. learned: how many, the first, have
    gradients. ours: (forward, backward) of the operands; forward returns (result, what it keeps beside them). reads:
    the operands that the backward pass reads. Without `ours` a level makes it of the function."""

    function: Callable
    make: Callable[[int, torch.dtype], tuple[Tensor, ...]]
    learned: int
    sizes: tuple[int, int, int]
    ours: Callable[[], tuple[Callable, Callable]] | None = None
    reads: tuple[int, ...] = (0, 1, 2)

    def contenders(self, size: int, dtype: torch.dtype) -> list[Contender]:
        tensors = self.make(size, dtype)
        operands = tuple(x.requires_grad_() if i < self.learned else x for i, x in enumerate(tensors))
        eager, compiled = self.function, torch.compile(self.function, dynamic=False, fullgraph=True)
        ours = Ours(self, operands) if self.ours else at_level(self, operands)
        return [ours, Peer("eager", eager, self, operands), Peer("compiled", compiled, self, operands)]


def _compiled(name: str) -> tuple[Callable, Callable]:
    targets = getattr(ops, name).default, getattr(ops, f"{name}_backward").default
    forward, backward = (torch.compile(FUSED[target], dynamic=False, fullgraph=True) for target in targets)
    return forward, backward


def _norm() -> tuple[Callable, Callable]:
    forward, backward = _compiled("rms_norm")
    return (lambda x, w: forward(x, w, EPS, 0.0, False)), (
        lambda grad, saved, x, w: backward(grad, x, w, saved, 0.0, False, [True, True])
    )


def _rotary() -> tuple[Callable, Callable]:
    forward, backward = _compiled("rotary")
    return (lambda x, cos, sin: (forward(x, cos, sin), None)), (
        lambda grad, saved, x, cos, sin: (backward(grad, cos, sin),)
    )


def _swiglu() -> tuple[Callable, Callable]:
    forward, backward = _compiled("glu")
    return (lambda gate, up: (forward(gate, up, "silu"), None)), (
        lambda grad, saved, gate, up: backward(grad, gate, up, "silu")
    )


def _loss() -> tuple[Callable, Callable]:
    with_gradients = ops.linear_logsumexp_with_gradients

    def forward(hidden, weight, labels):
        share = torch.full(labels.shape, 1 / len(labels))
        operands = hidden, weight, None, labels
        lse, picked, *gradients, _ = with_gradients(share, -share, *operands, [True, True, False], compiled=True)
        return (lse - picked).mean(), gradients

    return forward, lambda grad, saved, *operands: saved


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


def _randoms(dtype: torch.dtype, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(_random(*shape, dtype=dtype) for shape in shapes)


CASES = {
    "rms_norm": Case(
        norm, lambda n, dtype: (_random(n, 1024, dtype=dtype), _random(1024, dtype=dtype)), 2, (512, 2048, 8192), _norm
    ),
    "rotary": Case(
        rotary,
        lambda n, dtype: (_random(4, 8, n, 64, dtype=dtype), *(_random(1, 1, n, 64, dtype=dtype) for _ in range(2))),
        1, (128, 512, 2048), _rotary, reads=(1, 2),
    ),
    "swiglu": Case(
        swiglu, lambda n, dtype: tuple(_random(n, 2048, dtype=dtype) for _ in range(2)), 2, (256, 1024, 4096), _swiglu
    ),
    "linear_cross_entropy": Case(
        loss,
        lambda n, dtype: (
            _random(n, 512, dtype=dtype), 0.05 * _random(16384, 512, dtype=dtype), torch.randint(0, 16384, (n,))
        ),
        2, (256, 1024, 2048), _loss, reads=(),
    ),
    "attention": Case(
        attention,
        lambda n, dtype: tuple(_random(4096 // n, n, 8, 64, dtype=dtype).transpose(1, 2) for _ in range(4)),
        3, (256, 1024, 4096)
    ),
    "layer_norm_of_sum": Case(
        layer_norm_of_sum, lambda n, dtype: _randoms(dtype, (n, 1024), (n, 1024), (1024,), (1024,), (n, 1024)),
        4, (512, 2048, 8192)
    ),
    "bias_gelu": Case(
        bias_gelu, lambda n, dtype: _randoms(dtype, (n, 2048), (2048,), (n, 2048)), 2, (256, 1024, 4096)
    ),
    "bias_dropout_sum": Case(
        bias_dropout_sum, lambda n, dtype: _randoms(dtype, (n, 1024), (n, 1024), (1024,), (n, 1024)),
        3, (512, 2048, 8192)
    ),
}  # fmt: skip


class Contender:
    """Does its work in turns."""

    name: str

    def step(self) -> None:
        raise NotImplementedError

    def saved(self) -> int | None:
        """Bytes kept for the backward pass, where they are known."""
        return None

    def turn(self, steps: int) -> list[float]:
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - start)
        return seconds

    def close(self) -> None:
        pass


class Peer(Contender):
    """The function with autograd."""

    def __init__(self, name: str, function: Callable, case: Case, operands: tuple[Tensor, ...]) -> None:
        self.name, self.function, self.learned = name, function, case.learned
        self.operands = operands
        with torch.no_grad():
            self.grad = torch.ones_like(case.function(*operands))

    def step(self) -> None:
        torch.autograd.grad(self.function(*self.operands), self.operands[: self.learned], self.grad)

    def saved(self) -> int:
        sizes: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            self.function(*self.operands)
        return sum(sizes.values())


class Ours(Peer):
    """The two formulas, called one after the other."""

    def __init__(self, case: Case, operands: tuple[Tensor, ...]) -> None:
        super().__init__("ours", case.function, case, operands)
        self.forward, self.backward = case.ours()
        self.reads = case.reads

    @torch.no_grad()
    def step(self) -> None:
        _, saved = self.forward(*self.operands)
        self.backward(self.grad, saved, *self.operands)

    @torch.no_grad()
    def saved(self) -> int:
        _, saved = self.forward(*self.operands)
        read = [x for i, x in enumerate(self.operands) if i in self.reads]
        return sum(x.nbytes for x in (*read, *(saved if isinstance(saved, list) else [saved])) if x is not None)


class AtLevel(Contender):
    """What is captured, compiled as a level does. named: its inputs, but for the numbers of a step."""

    name = "ours"

    def __init__(self, step: StepGraph, named: dict[str, Tensor]) -> None:
        program = shard(step, Plan({}), 0)
        numbers = {"seed": torch.tensor(0), "step": torch.tensor(1), "lr:0": torch.tensor(RATE, dtype=torch.float64)}
        self.inputs = [{**named, **numbers, **step.constants}[name] for name in program.inputs]
        self.runtime, self.run = runtime_for(program.mesh), prepare([program], "O1")[0].run

    @torch.no_grad()
    def step(self) -> None:
        self.runtime.run([self.run], [self.inputs])


class Model(torch.nn.Module):
    def __init__(self, function: Callable, learned: Sequence[Tensor]) -> None:
        super().__init__()
        self.function, self.learned = function, torch.nn.ParameterList(learned)

    def forward(self, *rest: Tensor) -> Tensor:
        return self.function(*self.learned, *rest)


def at_level(case: Case, operands: tuple[Tensor, ...]) -> AtLevel:
    """The function with its gradients."""
    learned, rest = operands[: case.learned], operands[case.learned :]
    named = {f"param:learned.{i}": x for i, x in enumerate(learned)} | {f"batch:{i}": x for i, x in enumerate(rest)}
    return AtLevel(capture(Model(case.function, learned), rest), named)


NORM, RATE = 1.0, 1e-3


class Update(Contender):
    """PyTorch's AdamW of all parameters, with their gradients clipped."""

    def __init__(self, name: str, params: Sequence[Tensor], fused: bool) -> None:
        optimizer = torch.optim.AdamW(params, RATE, fused=fused, foreach=not fused)

        @torch.no_grad()
        def step() -> None:
            torch.nn.utils.clip_grad_norm_(params, NORM)
            optimizer.step()

        self.name, self.step = name, step if fused else torch.compile(step, dynamic=False)


def updates(layers: int, dtype: torch.dtype) -> list[Contender]:
    shapes = ((512, 512),) * 4 + ((1408, 512),) * 2 + ((512, 1408), (512,), (512,))
    params = [torch.nn.Parameter(x) for _ in range(layers) for x in _randoms(dtype, *shapes)]
    model = Model(lambda *tensors: torch.stack([x.sum() for x in tensors]).sum(), params)
    _, update = capture(model, (), torch.optim.AdamW(params, RATE), clip_norm=NORM).at_gradients()
    named = {}
    for i, x in enumerate(params):
        x.grad = torch.randn_like(x)
        tensors = {"param": x.detach(), "grad": x.grad, "exp_avg": x.detach() * 0, "exp_avg_sq": x.detach() * 0}
        named |= {f"{kind}:learned.{i}": tensor for kind, tensor in tensors.items()}
    return [AtLevel(update, named), Update("eager", params, fused=True), Update("compiled", params, fused=False)]


CONTENDERS = {name: (case.sizes, case.contenders) for name, case in CASES.items()}
CONTENDERS["clipping and AdamW"] = (2, 8, 32), updates


def measure(name: str, size: int, dtype: torch.dtype, rounds: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    contenders = CONTENDERS[name][1](size, dtype)
    load = os.getloadavg()[0]
    times = harness.take_turns(contenders, rounds, steps)
    ratios = {
        peer: statistics.median(
            statistics.median(theirs) / statistics.median(own)
            for own, theirs in zip(times["ours"], times[peer], strict=True)
        )
        for peer in ("eager", "compiled")
    }
    return {
        "operator": name, "size": size, "dtype": str(dtype).removeprefix("torch."), "load": load,
        "times_faster": ratios,
        "seconds": {c.name: harness.summary(times[c.name]) for c in contenders},
        "saved_bytes": {c.name: c.saved() for c in contenders},
    }  # fmt: skip


def run(quick: bool) -> dict[str, Any]:
    rounds, steps = (3, 3) if quick else (5, 3)
    rows = []
    for name, (sizes, _) in CONTENDERS.items():
        for size in sizes[:1] if quick else sizes:
            for dtype in DTYPES:
                torch.compiler.reset()
                rows.append(row := measure(name, size, dtype, rounds, steps))
                harness.say(f"{name} {size} {row['dtype']}: {row['times_faster']}, saved {row['saved_bytes']}")
    if not quick:
        draw(rows)
    return {"cases": rows}


def draw(rows: list[dict[str, Any]]) -> None:
    axes = (figure := Figure((8, 6), layout="constrained")).subplots()
    rows = rows[::-1]
    for shift, peer in ((0.2, "eager"), (-0.2, "compiled")):
        axes.barh([i + shift for i in range(len(rows))], [row["times_faster"][peer] for row in rows], 0.4, label=peer)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [f"{row['operator']} {row['size']} {row['dtype']}" for row in rows])
    axes.set(xlabel="times faster, forward and backward", xscale="log")
    axes.legend()
    figure.savefig(harness.RESULTS / "fused_ops.svg")


if __name__ == "__main__":
    harness.main(run, __file__)
