"""Boost: time to a target of each level against plain training, on one CPU thread, for three small tasks.

| task | model | data | measured on rows that are held out |
|---|---|---|---|
| resnet | ResNet of 6 basic blocks with batch norms, SGD | scikit-learn's digits, 8 x 8 pixels | accuracy |
| vit | Transformer of 6 layers over 8 patches, AdamW | the same | accuracy |
| lm | causal Transformer of 6 layers over 32 bytes, AdamW | source of Python's standard library | loss, nats a byte |

The target comes from plain training, before any level runs: 98 % of its final accuracy, or 102 % of its final loss, the
mean over all seeds. Then plain training and each contender begin with the same weights, see the same batches and take
turns, step for step at level O0 of compilation. A run has reached the target where the mean of the last three
measurements has. `times_faster` is plain's seconds to the target through the contender's, the median over seeds; a run
that does not reach it counts as 0. The learning rate is the one with which plain training is fastest, on other seeds.

Seconds are those of the CPU, so that other programs on the machine do not count. Steps that capture a graph take the
mean time of the others of their turn; the rest is in `capture_seconds`.
"""

from __future__ import annotations

import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import harness
from tutti.train.boost import Boost

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from resnets import BasicBlock, ResNet

ROWS = 1500  # of the digits, to train on
CONTEXT = 32  # bytes
HELD_OUT_BYTES = 200_000
CONTENDERS: dict[str, Any] = {
    "plain": "O0",
    "O1": "O1",
    "O2": "O2",
    "O3": "O3",
    "grad_freeze": ["grad_freeze"],
    "adasum": ["adasum"],
    "dim_reduce": {"dim_reduce": {"components": 8, "every": 5}},
}
Batch = tuple[Tensor, Tensor]


class Layer(nn.Module):
    """A pre-norm Transformer layer. (rows, places, width) -> the same."""

    def __init__(self, width: int, causal: bool):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        rows, places, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, places, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, places, width))
        return x + self.down(F.relu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """Classes of images of 8 x 8 pixels, in patches of 2 x 4."""

    def __init__(self, width: int = 32, layers: int = 6):
        super().__init__()
        self.embed, self.place = nn.Linear(8, width), nn.Parameter(torch.randn(8, width) / 10)
        self.layers = nn.ModuleList(Layer(width, causal=False) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.reshape(-1, 4, 2, 2, 4).transpose(2, 3).reshape(-1, 8, 8)) + self.place
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


class LanguageModel(nn.Module):
    """Logits of each next byte."""

    def __init__(self, width: int = 48, layers: int = 6):
        super().__init__()
        self.embed, self.place = nn.Embedding(128, width), nn.Parameter(torch.randn(CONTEXT, width) / 10)
        self.layers = nn.ModuleList(Layer(width, causal=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.place
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Digits:
    """Handwritten digits, in batches of 50 rows."""

    def __init__(self):
        digits = load_digits()
        order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
        self.x = (torch.tensor(digits.images, dtype=torch.float32) / 8 - 1)[order, None]
        self.y = torch.tensor(digits.target, dtype=torch.int64)[order]
        self.held_out: Batch = (self.x[ROWS:], self.y[ROWS:])

    def batch(self, seed: int, number: int) -> Batch:
        epoch, place = divmod(number, ROWS // 50)
        rows = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1000 * seed + epoch)).split(50)[place]
        return self.x[rows], self.y[rows]


class Source:
    """Bytes of the modules of the standard library, those above 127 as 127, in batches of 8 rows."""

    def __init__(self):
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        self.text = torch.tensor(list(b"".join(path.read_bytes() for path in files)[:2_000_000])).clamp(max=127)
        self.held_out: Batch = self._rows(len(self.text) - HELD_OUT_BYTES + 3000 * torch.arange(64))

    def batch(self, seed: int, number: int) -> Batch:
        generator = torch.Generator().manual_seed(100_000 * seed + number)
        return self._rows(torch.randint(len(self.text) - HELD_OUT_BYTES - CONTEXT, (8,), generator=generator))

    def _rows(self, starts: Tensor) -> Batch:
        rows = self.text[starts[:, None] + torch.arange(CONTEXT + 1)]
        return rows[:, :-1], rows[:, 1:]


@dataclass(frozen=True)
class Task:
    """rates: learning rates to choose from. steps: length of a run. every: steps of a turn, after which is measured.
    by: what is measured."""

    data: Any
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module, float], torch.optim.Optimizer]
    rates: tuple[float, ...]
    steps: int
    every: int
    by: str = "accuracy"

    def measure(self, model: nn.Module) -> float:
        x, y = self.data.held_out
        model.eval()
        with torch.no_grad():
            out = model(x)
        model.train()
        if self.by == "loss":
            return F.cross_entropy(out.flatten(0, -2), y.flatten()).item()
        return (out.argmax(-1) == y).double().mean().item()

    def target(self, finals: list[float]) -> float:
        return statistics.mean(finals) * (1.02 if self.by == "loss" else 0.98)

    def reached(self, curve: list[float], target: float) -> int | None:
        """The number of steps after which the mean of three measurements is as good as the target."""
        sign = -1 if self.by == "loss" else 1
        for i in range(2, len(curve)):
            if sign * statistics.mean(curve[i - 2 : i + 1]) >= sign * target:
                return (i + 1) * self.every
        return None


def sgd(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4)


def adamw(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=rate)


def tasks(quick: bool) -> dict[str, Task]:
    resnet = lambda: ResNet(BasicBlock, (2, 2, 2), width=16, classes=10, channels=1)  # noqa: E731
    digits, source, part = Digits(), Source(), 10 if quick else 1
    return {
        "resnet": Task(digits, resnet, sgd, (0.02, 0.05, 0.1), 150 // part, 5),
        "vit": Task(digits, ViT, adamw, (5e-4, 1e-3, 2e-3, 4e-3), 300 // part, 10),
        "lm": Task(source, LanguageModel, adamw, (2e-3, 4e-3, 8e-3), 240 // part, 8, by="loss"),
    }


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


@dataclass
class Run:
    """One training run. curve: a measurement after each turn. seconds: all steps until then, without captures."""

    task: Task
    rate: float
    seed: int
    chosen: Any
    curve: list[float] = field(default_factory=list)
    turns: list[float] = field(default_factory=list)
    capture_seconds: float = 0.0
    captures: int = 0

    def __post_init__(self):
        torch.manual_seed(self.seed)
        self.model, example = self.task.model(), self.task.data.batch(self.seed, 0)
        boost = Boost.parse(self.chosen)
        boost.prepare_model(self.model, example, loss, self.task.steps)
        self.step: Any = boost.make_step(self.model, self.task.optimizer(self.model, self.rate), example, loss=loss,
                                         cluster="cpu:1", plan="single", level="O0", seed=self.seed)  # fmt: skip

    def turn(self) -> None:
        timed, captured, first = [], [], len(self.curve) * self.task.every
        for number in range(first, first + self.task.every):
            batch, before, start = self.task.data.batch(self.seed, number), self._graphs(), time.process_time()
            self.step(batch)
            took = time.process_time() - start
            (timed if self._graphs() == before and number > 1 else captured).append(took)
        mean = statistics.mean(timed)
        self.turns.append(mean * self.task.every)
        self.captures += len(captured)
        self.capture_seconds += sum(captured) - mean * len(captured)
        self.model.load_state_dict(self.step.state_dict(), strict=False)
        self.curve.append(self.task.measure(self.model))

    def _graphs(self) -> int:
        """Number of graphs so far, or -1 after dim_reduce has switched."""
        return -1 if getattr(self.step, "step", self.step) is None else len(self.step.recaptures)

    @property
    def final(self) -> float:
        return statistics.mean(self.curve[-3:])

    def seconds_to(self, target: float) -> float | None:
        steps = self.task.reached(self.curve, target)
        return None if steps is None else [*accumulate(self.turns)][steps // self.task.every - 1]


def plainly(task: Task, rate: float, seed: int) -> Run:
    """A whole run of plain training."""
    run = Run(task, rate, seed, "O0")
    for _ in range(task.steps // task.every):
        run.turn()
    return run


def fastest_rate(task: Task, seeds: Iterable[int]) -> float:
    """The learning rate with which plain training needs the fewest steps to the target of the one that ends best."""
    runs = {rate: [plainly(task, rate, seed) for seed in seeds] for rate in task.rates}
    finals = {rate: statistics.mean(run.final for run in runs[rate]) for rate in runs}
    best = min(finals, key=lambda rate: finals[rate] if task.by == "loss" else -finals[rate])
    target = task.target([run.final for run in runs[best]])
    steps = {
        rate: statistics.mean(task.reached(x.curve, target) or 2 * task.steps for x in runs[rate]) for rate in runs
    }
    harness.say(f"plain training at each learning rate ends at {finals} and needs {steps} steps")
    return min(steps, key=lambda rate: steps[rate])


def race(task: Task, rate: float, seed: int, contenders: dict[str, Any]) -> dict[str, Run]:
    """All contenders in turns."""
    runs = {name: Run(task, rate, seed, chosen) for name, chosen in contenders.items()}
    for i in range(task.steps // task.every):
        order = list(runs.values())
        first = i % len(order)
        for run in [*order[first:], *order[:first]]:
            run.turn()
    return runs


def row(task: Task, plain: list[Run], runs: list[Run], target: float) -> dict[str, Any]:
    """The figures of one contender."""
    steps = [task.reached(run.curve, target) for run in runs]
    pairs = [(p.seconds_to(target), s.seconds_to(target)) for p, s in zip(plain, runs, strict=True)]
    ratios = [p / s if s else 0.0 for p, s in pairs if p]
    finals = [round(run.final, 4) for run in runs]
    return {
        "times_faster": statistics.median(ratios) if ratios else None,
        "lowest": min(ratios, default=None),
        "highest": max(ratios, default=None),
        "reached": f"{sum(x is not None for x in steps)} of {len(runs)}",
        "steps_to_target": statistics.median(x or task.steps for x in steps),
        "step_times_faster": statistics.median(sum(p.turns) / sum(r.turns) for p, r in zip(plain, runs, strict=True)),
        f"final_{task.by}": statistics.mean(finals),
        f"worst_final_{task.by}": (max if task.by == "loss" else min)(finals),
        "seconds_to_target": statistics.median(s or sum(run.turns) for (_, s), run in zip(pairs, runs, strict=True)),
        "captures": runs[0].captures,
        "capture_seconds": statistics.median(run.capture_seconds for run in runs),
        "by_seed": {"times_faster": ratios, "steps_to_target": steps, f"final_{task.by}": finals},
    }


def run(quick: bool) -> dict[str, Any]:
    seeds = 1 if quick else 5
    contenders = {name: CONTENDERS[name] for name in (("plain", "O1") if quick else CONTENDERS)}
    torch.set_num_threads(1)
    result: dict[str, Any] = {"seeds": seeds, "tasks": {}}
    for name, task in tasks(quick).items():
        rate = task.rates[1] if quick else fastest_rate(task, (100, 101))  # seeds of their own
        target = task.target([plainly(task, rate, seed).final for seed in range(seeds)])
        harness.say(f"{name}: learning rate {rate}, the target is a {task.by} of {target:.4f}")
        races = []
        for seed in range(seeds):
            races.append(race(task, rate, seed, contenders))
            harness.say(f"{name}, seed {seed + 1} of {seeds}")
        facts = {"learning_rate": rate, "steps": task.steps, "every": task.every, "by": task.by, "target": target}
        result["tasks"][name], result[name] = facts, {}
        for contender in contenders:
            plain, runs = ([runs[x] for runs in races] for x in ("plain", contender))
            result[name][contender] = row(task, plain, runs, target)
            harness.say(f"{name} {contender}: {result[name][contender]}")
    return result


if __name__ == "__main__":
    harness.main(run, __file__, ("scikit-learn",))
