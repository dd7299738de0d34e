"""Fused operators, forward and backward, against the same functions in plain PyTorch, eager and compiled, in turns.

Ours as a level runs them: the forward and the backward formula of `tutti.nn.fused` each compiled once; the linear layer
with cross-entropy, which works in blocks and makes its gradients with the loss, as it is. The peers are the functions
as models write them, with autograd, eagerly and under `torch.compile`. Each operator at three sizes, in float32 and
bfloat16. `saved_bytes` is what is kept from the forward to the backward pass, operands included, each storage once.
`times_faster` is the median over rounds of the peer's time over ours. `load` is how many processes wanted the machine
before each case: with others at work, the smallest times tell more than medians. `--quick` is the smallest size.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

import harness
from tutti.nn import linear_cross_entropy  # noqa: F401  (registers the operators)
from tutti.nn.fused import FUSED

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


@dataclass(frozen=True)
class Case:
    """function: as models write it. make: its operands, of a size and dtype. learned: how many, the first, have
    gradients. ours: (forward, backward) of the operands; forward returns (result, what it keeps beside them). reads:
    the operands that the backward pass reads."""

    function: Callable
    make: Callable[[int, torch.dtype], tuple[Tensor, ...]]
    learned: int
    sizes: tuple[int, int, int]
    ours: Callable[[], tuple[Callable, Callable]]
    reads: tuple[int, ...] = (0, 1, 2)


def _compiled(name: str) -> tuple[Callable, Callable]:
    targets = getattr(ops, name).default, getattr(ops, f"{name}_backward").default
    forward, backward = (torch.compile(FUSED[target], dynamic=False, fullgraph=True) for target in targets)
    return forward, backward


def _norm() -> tuple[Callable, Callable]:
    forward, backward = _compiled("rms_norm")
    return (lambda x, w: forward(x, w, EPS, 0.0, False)), (
        lambda grad, kept, x, w: backward(grad, x, w, kept, 0.0, False, [True, True])
    )


def _rotary() -> tuple[Callable, Callable]:
    forward, backward = _compiled("rotary")
    return (lambda x, cos, sin: (forward(x, cos, sin), None)), (
        lambda grad, kept, x, cos, sin: (backward(grad, cos, sin),)
    )


def _swiglu() -> tuple[Callable, Callable]:
    forward, backward = _compiled("glu")
    return (lambda gate, up: (forward(gate, up, "silu"), None)), (
        lambda grad, kept, gate, up: backward(grad, gate, up, "silu")
    )


def _loss() -> tuple[Callable, Callable]:
    def forward(hidden, weight, labels):
        share = torch.full(labels.shape, 1 / len(labels))
        operands = hidden, weight, None, labels
        lse, picked, *gradients, _ = ops.linear_logsumexp_with_gradients(share, -share, *operands, [True, True, False])
        return (lse - picked).mean(), gradients

    return forward, lambda grad, kept, *operands: kept


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


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
}  # fmt: skip


class Peer:
    """The function with autograd."""

    def __init__(self, name: str, function: Callable, case: Case, operands: tuple[Tensor, ...]) -> None:
        self.name, self.function, self.learned = name, function, case.learned
        self.operands = operands
        with torch.no_grad():
            self.grad = torch.ones_like(case.function(*operands))

    def step(self) -> None:
        torch.autograd.grad(self.function(*self.operands), self.operands[: self.learned], self.grad)

    def saved(self) -> int:
        kept: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            self.function(*self.operands)
        return sum(kept.values())

    def turn(self, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            start = time.perf_counter()
            self.step()
            found.append(time.perf_counter() - start)
        return found

    def close(self) -> None:
        pass


class Ours(Peer):
    """The two formulas, called one after the other."""

    def __init__(self, case: Case, operands: tuple[Tensor, ...]) -> None:
        super().__init__("ours", case.function, case, operands)
        self.forward, self.backward = case.ours()
        self.reads = case.reads

    @torch.no_grad()
    def step(self) -> None:
        _, kept = self.forward(*self.operands)
        self.backward(self.grad, kept, *self.operands)

    @torch.no_grad()
    def saved(self) -> int:
        _, kept = self.forward(*self.operands)
        read = [x for i, x in enumerate(self.operands) if i in self.reads]
        return sum(x.nbytes for x in (*read, *(kept if isinstance(kept, list) else [kept])) if x is not None)


def measure(name: str, size: int, dtype: torch.dtype, rounds: int, steps: int) -> dict[str, Any]:
    case = CASES[name]
    torch.manual_seed(0)
    made = case.make(size, dtype)
    operands = tuple(x.requires_grad_() if i < case.learned else x for i, x in enumerate(made))
    compiled = torch.compile(case.function, dynamic=False, fullgraph=True)
    contenders = [
        Ours(case, operands), Peer("eager", case.function, case, operands), Peer("compiled", compiled, case, operands)
    ]  # fmt: skip
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
    for name, case in CASES.items():
        for size in case.sizes[:1] if quick else case.sizes:
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
