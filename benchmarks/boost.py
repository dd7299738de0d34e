"""Boost: time and accuracy of each algorithm and level against plain training, on one CPU.

A ResNet and a small Transformer learn the 8 x 8 images of handwritten digits (scikit-learn: 1500 to train on, 297 held
out), operator by operator (level O0). All contenders of a network begin with the same weights, see the same batches,
and take turns epoch by epoch, so that each ratio compares epochs next to each other in time. Steps in which a graph is
captured are not timed. Accuracy is that on the held-out images after the last epoch, for each seed.

`times_faster` is the median over epochs of plain seconds per step through those of the contender. dim_reduce has
`components` and `every` of the case, so that it switches to its subspace early, and its time is that of all steps.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
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

ROWS = 1500  # to train on


@dataclass(frozen=True)
class Case:
    epochs: int
    seeds: int
    batch: int = 50
    components: int = 8
    every: int = 5


FULL = Case(epochs=5, seeds=3)
QUICK = Case(epochs=1, seeds=1, components=2, every=2)


class Transformer(nn.Module):
    """Four pre-norm layers over the 64 pixels of an image."""

    def __init__(self, width: int = 32, layers: int = 4):
        super().__init__()
        self.pixel, self.place = nn.Linear(1, width), nn.Parameter(torch.randn(64, width) / 10)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pixel(x.flatten(1)[..., None]) + self.place
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


def resnet() -> tuple[nn.Module, Callable[[nn.Module], torch.optim.Optimizer]]:
    model = ResNet(BasicBlock, (2, 2, 2), width=16, classes=10, channels=1)
    return model, lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


def transformer() -> tuple[nn.Module, Callable[[nn.Module], torch.optim.Optimizer]]:
    return Transformer(), lambda m: torch.optim.AdamW(m.parameters(), lr=2e-3)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def contenders(case: Case, network: str) -> dict[str, dict[str, dict[str, Any]]]:
    """The algorithms of each contender, with their options."""
    reduce = {"components": case.components, "every": case.every}
    single: dict[str, dict[str, Any]] = {"less_bn": {}, "grad_freeze": {}, "adasum": {}, "layer_skip": {},
                                         "loss_scale_group": {}, "dim_reduce": reduce}  # fmt: skip
    without = ("layer_skip", "loss_scale_group") if network == "resnet" else ("less_bn",)
    made = {"O0": {}, **{name: {name: options} for name, options in single.items() if name not in without}}
    made["dim_reduce, without reset"] = {"dim_reduce": {**reduce, "reset": False}}
    if network == "resnet":
        made["less_bn, multiplier 10"] = {"less_bn": {"multiplier": 10.0}}
        names = {"O1": ("less_bn", "grad_freeze"), "O2": ("less_bn", "grad_freeze", "adasum"),
                 "O3": ("less_bn", "grad_freeze", "adasum", "dim_reduce")}  # fmt: skip
        made |= {level: {name: single[name] for name in chosen} for level, chosen in names.items()}
    return made


@dataclass
class Contender:
    """One training run."""

    name: str
    step: Any
    model: nn.Module
    captures: int = 0
    seconds: list[float] = field(default_factory=list)  # a step, by epoch

    def epoch(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        timed = []
        for batch in batches:
            before, start = self._graphs(), time.perf_counter()
            self.step(batch)
            took = time.perf_counter() - start
            if self._graphs() == before and self.step.steps > 2:
                timed.append(took)
            else:
                self.captures += 1
        self.seconds.append(statistics.mean(timed) if timed else float("nan"))

    def _graphs(self) -> int:
        """Number of graphs so far, or -1 after dim_reduce has switched."""
        return -1 if getattr(self.step, "step", self.step) is None else len(self.step.recaptures)

    def accuracy(self, held_out: tuple[Tensor, Tensor]) -> float:
        self.model.load_state_dict(self.step.state_dict(), strict=False)
        self.model.eval()
        with torch.no_grad():
            right = self.model(held_out[0]).argmax(1) == held_out[1]
        self.model.train()
        return right.double().mean().item()


def race(case: Case, network: str, make: Callable, seed: int, data: tuple[Tensor, Tensor]) -> list[Contender]:
    """Train all contenders of a network, in turns."""
    x, y = data
    runs = []
    for name, chosen in contenders(case, network).items():
        torch.manual_seed(seed)
        model, optimizer = make()
        boost, example = Boost.parse(chosen), (x[: case.batch], y[: case.batch])
        boost.prepare_model(model, example, loss)
        step = boost.make_step(model, optimizer(model), example, loss=loss, cluster="cpu:1", plan="single", level="O0",
                               seed=seed)  # fmt: skip
        runs.append(Contender(name, step, model))
    for epoch in range(case.epochs):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1000 * seed + epoch)).split(case.batch)
        first = epoch % len(runs)
        for contender in [*runs[first:], *runs[:first]]:
            contender.epoch([(x[rows], y[rows]) for rows in order])
        harness.say(f"{network}, seed {seed}, epoch {epoch + 1} of {case.epochs}")
    return runs


def run(quick: bool) -> dict[str, Any]:
    case = QUICK if quick else FULL
    torch.set_num_threads(1)
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    x = (torch.tensor(digits.images, dtype=torch.float32) / 8 - 1)[order, None]
    y = torch.tensor(digits.target, dtype=torch.int64)[order]
    found: dict[str, Any] = {"case": vars(case)}
    for network, make in {"resnet": resnet, "transformer": transformer}.items():
        races = [race(case, network, make, seed, (x, y)) for seed in range(case.seeds)]
        plain = [seconds for runs in races for seconds in runs[0].seconds]
        found[network] = {}
        for same in zip(*races, strict=True):
            seconds = [value for contender in same for value in contender.seconds]
            pairs = [(p, s) for p, s in zip(plain, seconds, strict=True) if s == s]
            found[network][same[0].name] = {
                "seconds_per_step": statistics.median(s for _, s in pairs),
                "times_faster": statistics.median(p / s for p, s in pairs),
                "accuracy": [contender.accuracy((x[ROWS:], y[ROWS:])) for contender in same],
                "steps_with_a_capture": [contender.captures for contender in same],
            }
            told = found[network][same[0].name]
            accuracies = ", ".join(f"{value:.1%}" for value in told["accuracy"])
            harness.say(f"{network} {same[0].name}: x{told['times_faster']:.2f}, accuracy {accuracies}")
    return found


if __name__ == "__main__":
    harness.main(run, __file__, ("scikit-learn",))
