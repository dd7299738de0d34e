"""Recordings that were never run: times of ranks that compute, meet in a collective and compute again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

CALLS = [
    {"label": "layers.*/forward/mm", "phase": "forward", "kind": "matmuls", "flops": 100, "nodes": 2},
    {"label": "layers.*/forward/add", "phase": "forward", "kind": "rest"},
    {"label": "layers.*/forward/mm", "phase": "forward", "kind": "all_reduce", "axis": "dp", "bytes": 64},
    {"label": "layers.*/backward/mm", "phase": "backward", "kind": "matmuls", "flops": 200, "nodes": 3},
]
SECONDS = np.array([4e-3, 1e-3, 2e-3, 8e-3])  # of the calls; of the collective on its way
MESSAGE = 1 << 20
LINK = 1e-3  # seconds of a message


def write(
    folder: Path,
    ranks: int,
    *,
    seed: int = 0,
    steps: int = 12,
    slower: Mapping[tuple[int, str], float] | None = None,
    links: Mapping[tuple[int, int], float] | None = None,
    ahead: Mapping[str, int] | None = None,
    busy: float = 0.0,
) -> None:
    """slower: how many times longer a rank takes for a kind of call. links: how many times longer a message takes from
    one rank to another. ahead: nanoseconds of the clocks of machines, to which ranks are dealt in turns. busy: share of
    calls that something else of the machine makes up to three times as long."""
    chance = np.random.default_rng(seed)
    hosts = list(ahead or {"one": 0})
    lines: list[list[dict]] = []
    for rank in range(ranks):
        head = {"rank": rank, "ranks": ranks, "host": hosts[rank % len(hosts)], "message": MESSAGE}
        head["groups"] = {"dp": list(range(ranks))}
        lines.append([head, {"program": "train", "nodes": 7, "calls": CALLS}])
    factors = np.array([[(slower or {}).get((rank, call["kind"]), 1.0) for call in CALLS] for rank in range(ranks)])
    for step in range(1, steps + 1):
        held_up = 1 + 2 * (chance.random((ranks, 4)) < busy) * chance.random((ranks, 4))
        took = SECONDS * factors * held_up * (1 + 0.05 * chance.random((ranks, 4)))
        came = took[:, :2].sum(1)
        over = came.max() + SECONDS[2]
        for rank in range(ranks):
            times = [0.0, took[rank, 0], came[rank], over, over + took[rank, 3]]
            zero = step * 10**9 + (ahead or {}).get(hosts[rank % len(hosts)], 0)
            marks = [zero + round(1e9 * t) for t in times]
            distances = {d % ranks for i in range(ranks.bit_length()) for d in (2**i, -(2**i))} - {0}
            sources = [(rank - d) % ranks for d in distances]
            heard = {s: LINK * (links or {}).get((s, rank), 1.0) * (1 + 0.4 * chance.random()) for s in sources}
            lines[rank].append({"step": step, "begin": zero, "end": marks[-1] + 10**6, "waits": [],
                                "runs": [["train", marks]], "links": heard})  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    for rank, entries in enumerate(lines):
        (folder / f"rank-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in entries))
