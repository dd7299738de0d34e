"""FDTD on CPUs: Mcell-steps/s in 3-D against fdtdx (JAX), and gradients against autograd through plain PyTorch.

`3-D`: 96^3 cells, float32, layers of 10 cells. `fraction`: share of the memory ceiling of a loop that goes through
memory once a step, at 60 bytes a cell (six fields read and written, b of three) over the bandwidth of `torch.add`;
above 1, steps that follow each other in the cache save it. `gradients`: those of the inverse-scattering example (four
shots of 350 steps of 100 x 100 cells). Contenders take turns; ratios are medians over rounds.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import torch

import harness

JAX = ("fdtdx==0.6.3",)
BYTES = 4 * (12 + 3)


def bandwidth() -> float:
    x, y = torch.zeros(2**25), torch.ones(2**25)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        torch.add(x, y, out=x)
        times.append(time.perf_counter() - begin)
    return 3 * 4 * x.numel() / min(times)


def rounds(contenders: dict[str, tuple[harness.Peer, int]], count: int) -> dict[str, list[float]]:
    """Work per second by round. contenders: with the steps of a turn."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for peer, steps in contenders.values():
        peer.ask(steps)
    for i in range(count):
        names = list(contenders)
        for name in names[i % len(names) :] + names[: i % len(names)]:
            peer, steps = contenders[name]
            done, seconds = peer.ask(steps)
            rates[name].append(done / seconds)
        harness.say(", ".join(f"{name} {x[-1]:.4g}/s" for name, x in rates.items()))
    for peer, _ in contenders.values():
        peer.close()
    return rates


def ratio(rates: dict[str, list[float]], ours: str, peer: str) -> float:
    return statistics.median(a / b for a, b in zip(rates[ours], rates[peer], strict=True))


def run(quick: bool) -> dict[str, Any]:
    cells, count, threads = (48, 2, os.cpu_count() or 1) if quick else (96, 5, os.cpu_count() or 1)
    peers = {
        f"ours, {threads} threads": (
            harness.Peer("ours", (), "fdtd_peers.py", "ours", str(cells), "10", str(threads)),
            40,
        ),
        "ours, no layers": (harness.Peer("ours", (), "fdtd_peers.py", "ours", str(cells), "0", str(threads)), 40),
        "fdtdx": (harness.Peer("fdtdx", JAX, "fdtd_peers.py", "fdtdx", str(cells), "10", str(threads)), 20),
    }
    rates = rounds(peers, count)
    speed = bandwidth()
    best = max(rates["ours, no layers"])
    gradients = rounds({
        "adjoint": (harness.Peer("adjoint", (), "fdtd_peers.py", "adjoint", "0", "0", str(threads)), 4),
        "autograd": (harness.Peer("autograd", (), "fdtd_peers.py", "autograd", "0", "0", "1"), 1),
    }, 2 if quick else 5)  # fmt: skip
    return {
        "cells": cells, "Mcells_per_s": {name: statistics.median(x) / 1e6 for name, x in rates.items()},
        "times_fdtdx": ratio(rates, f"ours, {threads} threads", "fdtdx"),
        "bytes_per_second": speed, "fraction": best * BYTES / speed,
        "gradients_per_s": {name: statistics.median(x) for name, x in gradients.items()},
        "times_autograd": ratio(gradients, "adjoint", "autograd"),
    }  # fmt: skip


if __name__ == "__main__":
    harness.main(run, __file__)
