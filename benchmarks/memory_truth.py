"""Peak memory of a rank as it is predicted, and as it is: eight tiny models under three plans each, on four Gloo ranks.

`tensors` counts what operators returned and something still refers to, `allocated` also what operators allocate for
themselves; each is held against the prediction of just that, and each ratio is predicted over measured. Operator by
operator (O0) on four ranks, compiled (O2) on one device.
"""

from __future__ import annotations

import gc
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import harness
from gloo import Pool
from liveness import most_of_step

MODELS = ("gpt2", "llama", "bert", "t5", "vit", "mixtral", "unet2d", "lstm")
PLANS = ("dp", "zero3", "dp2xtp2")
COMPILED = ("llama", "gpt2", "vit")
QUICK = ("llama", "lstm")


def measure(name: str, plan: str, cluster: str, level: str) -> dict[str, int]:
    """Bytes of this rank at the peak of a step; of `tensors` at O0 alone."""
    import torch

    import models
    import tutti
    from tutti.analysis.memory import CPU, memory
    from tutti.sim.dryrun import dry_run
    from tutti.train.text.memory import PeakMemory, live_bytes

    model, batch, loss = models.case(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = tutti.parallelize(model, optimizer, batch, loss=loss, cluster=cluster, plan=plan, level=level)
    prediction = dry_run(step.graph, step.plan, step.cluster, level)
    played = prediction.parts[0].simulation.replays[0]
    input_bytes = sum(s.bytes for s in played.inputs.values())
    sizes = {"predicted": prediction.memory.peak, "predicted tensors": memory(played, replace(CPU, inside=False)).peak}
    peaks: list[int] = []
    peak, before = PeakMemory(peaks.append), 0
    for _ in range(4):
        gc.collect()  # what is dropped in a ring would else go while it is measured
        before = live_bytes()
        peak(step, batch)
    sizes["allocated"] = peaks[0] - before + input_bytes
    if level == "O0":
        sizes["tensors"] = most_of_step(step, batch)
    return sizes


def run(quick: bool) -> dict[str, Any]:
    rows = []
    pool = Pool()
    for name in QUICK if quick else MODELS:
        for plan in PLANS:
            ranks = pool.run(measure, name, plan, "cpu:4", "O0")
            rows.append(
                _row(name, plan, "O0", max(ranks, key=lambda r: abs(r["predicted tensors"] / r["tensors"] - 1)))
            )
    pool.close()
    for name in () if quick else COMPILED:
        rows.append(_row(name, "one device", "O2", measure(name, "dp", "cpu:1", "O2")))
    return {"rows": rows, "median": {key: _median(rows, key) for key in ("tensors", "allocated")}}


def _row(name: str, plan: str, level: str, sizes: dict[str, int]) -> dict[str, Any]:
    pairs = {"tensors": "predicted tensors", "allocated": "predicted"}
    ratios = {key: round(sizes[ours] / sizes[key], 4) for key, ours in pairs.items() if key in sizes}
    said = ", ".join(f"{ratio:.3f} of {key}" for key, ratio in ratios.items())
    harness.say(f"{name:8} {plan:10} {level} {sizes['predicted']:>10,} bytes: {said}")
    return {"model": name, "plan": plan, "level": level, "bytes": sizes, "ratio": ratios}


def _median(rows: list[dict[str, Any]], key: str) -> float:
    return statistics.median(r["ratio"][key] for r in rows if key in r["ratio"] and r["level"] == "O0")


if __name__ == "__main__":
    harness.main(run, __file__, packages=("transformers", "diffusers"))
