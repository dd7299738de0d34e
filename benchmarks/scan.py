"""A recurrent model on one CPU: `tutti.scan` at O0 and O2 against a plain Python loop, and start-up against length.

The model is a GRU cell over all steps, between two layers. "plain loop" is eager PyTorch; "plain loop, captured" is the
same loop through `tutti.parallelize`, which unrolls it. All use one thread: the operators are small.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import harness
import tutti

LR = 1e-3
WIDTH, BATCH, CLASSES = 64, 32, 8
FULL = {"steps": 256, "unrolled": 32, "rounds": 5, "turns": 4}
QUICK = {"steps": 64, "unrolled": 16, "rounds": 3, "turns": 3}


class Recurrent(nn.Module):
    def __init__(self, scans: bool):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.cell, self.down = nn.Linear(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.scans = scans

    def forward(self, x, y):
        xs, h = self.up(x).transpose(0, 1), x.new_zeros(len(x), WIDTH)
        if self.scans:
            h, ys = tutti.scan(lambda h, x: ((h := self.cell(x, h)), h), h, xs)
            total = ys.mean(0)
        else:
            total = torch.zeros_like(h)
            for x in xs:
                h = self.cell(x, h)
                total = total + h / len(xs)
        return F.cross_entropy(self.down(h + total), y)


def data(steps: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(BATCH, steps, WIDTH, generator=generator),
            "y": torch.randint(CLASSES, (BATCH,), generator=generator)}  # fmt: skip


def plain(turns: harness.Turns, steps: int) -> None:
    torch.set_num_threads(1)
    model, batch = Recurrent(scans=False), data(steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    _measure(turns, step, 0.0)


def ours(turns: harness.Turns, steps: int, scans: bool, level: str) -> None:
    torch.set_num_threads(1)
    model, batch = Recurrent(scans), data(steps)
    start = time.perf_counter()
    step = tutti.parallelize(model, torch.optim.AdamW(model.parameters(), lr=LR), batch, cluster="auto", level=level)
    step(batch)
    started = time.perf_counter() - start
    step.evaluate(batch)
    _measure(turns, lambda: step(batch), started, 1)


def _measure(turns: harness.Turns, step, started: float, done: int = 0) -> None:
    losses: list[float] = []
    while count := turns.wait():
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            loss = step()
            seconds.append(time.perf_counter() - start)
            losses.append(loss.item())
        turns.done(seconds, second_loss=losses[1 - done], started=started)


def compare(steps: int, contenders: list[harness.Process], case: dict[str, int]) -> dict[str, Any]:
    times = harness.take_turns(contenders, case["rounds"], case["turns"])
    for contender in contenders:
        contender.close()
    losses = {c.name: c.facts["second_loss"] for c in contenders}
    if max(losses.values()) - min(losses.values()) > 1e-4:
        raise RuntimeError(f"the contenders do not train the same model: {losses}")
    (peer,) = [c.name for c in contenders if c.name == "plain loop"]
    return {
        "steps": steps,
        "contenders": [
            {
                "name": c.name,
                "seconds_per_step": harness.summary(times[c.name])["median"],
                "times_faster_than_plain": harness.ratio(times, [c.name], [peer])["times_faster"],
                "started_seconds": c.facts["started"],
                "peak_rss_bytes": c.facts["peak_rss_bytes"],
            }
            for c in contenders
        ],
    }


def run(quick: bool) -> dict[str, Any]:
    case = QUICK if quick else FULL
    figures = {}
    for name, unrolls in (("steps", False), ("unrolled", True)):
        steps = case[name]
        contenders = [harness.Process("plain loop", plain, steps)]
        if unrolls:
            contenders.append(harness.Process("plain loop, captured O0", ours, steps, False, "O0"))
        contenders += [harness.Process(f"tutti.scan {level}", ours, steps, True, level) for level in ("O0", "O2")]
        figures[name] = compare(steps, contenders, case)
    return figures


if __name__ == "__main__":
    harness.main(run, __file__)
