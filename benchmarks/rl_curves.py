"""Learning curves of all presets with three seeds: returns of evaluations until the threshold is reached.

    python benchmarks/rl_curves.py [PRESET ...] [--seeds 0 1 2]

An evaluation is the mean return of 20 new episodes, with the most likely actions. A run ends when one reaches the
preset's threshold; the proofs (`tests/proofs/test_reinforcement.py`) do the same. What is in `results/rl_curves.json`
already is kept, so an interrupted run can be resumed; delete it, or name presets, to measure again. Draws
`results/rl_curves.svg`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

import harness
from tutti.rl.algorithms import algorithm
from tutti.rl.core.callbacks import EvalCallback
from tutti.rl.presets import PRESETS

RESULT = harness.RESULTS / "rl_curves.json"
EPISODES, POINTS = 20, 20


def curve(name: str, seed: int) -> dict[str, Any]:
    """One run of a preset: steps and returns of its evaluations, and what it took."""
    p = PRESETS[name]
    options = {**p.options, **({"data": p.data} if p.data else {})}
    begin = time.process_time()
    agent = algorithm(p.algorithm)(p.env, seed=seed, level="eager", **options)
    scores = EvalCallback(every=max(p.steps // POINTS, 1), episodes=EPISODES, threshold=p.threshold)
    agent.learn(p.steps, scores)
    points = [(steps, round(score.mean, 2)) for steps, score in scores.evaluations]
    best = max(x for _, x in points)
    return {"reached": best >= p.threshold, "best": best, "steps": agent.num_timesteps,
            "cpu seconds": round(time.process_time() - begin, 1), "points": points}  # fmt: skip


def save(runs: dict[str, dict[str, Any]]) -> None:
    """The table of presets, and each run's points as text: they are drawn, not listed."""
    rows = {}
    for name in sorted(runs):
        p, own = PRESETS[name], list(runs[name].values())
        rows[name] = {"algorithm": p.algorithm, "threshold": p.threshold, "reached": sum(x["reached"] for x in own),
                      "seeds": len(own), "most steps": max(x["steps"] for x in own),
                      "best": [x["best"] for x in own], "cpu seconds": sum(x["cpu seconds"] for x in own)}  # fmt: skip
    result = {"benchmark": "rl_curves", "quick": False, **harness.environment(), "presets": rows,
              "runs": json.dumps(runs)}  # fmt: skip
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


def draw(runs: dict[str, dict[str, Any]], to: Path) -> None:
    from matplotlib.figure import Figure

    names, columns = sorted(runs), 6
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(2.3 * columns, 1.8 * rows), layout="constrained")
    for i, name in enumerate(names):
        axes = figure.add_subplot(rows, columns, i + 1)
        for run in runs[name].values():
            axes.plot(*zip(*run["points"], strict=True), marker=".", linewidth=1)
        axes.axhline(PRESETS[name].threshold, color="gray", linestyle=":", linewidth=1)
        axes.set_title(name, fontsize=7)
        axes.tick_params(labelsize=6)
        axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 3))
        axes.xaxis.get_offset_text().set_fontsize(6)
    figure.savefig(to, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", help="by default all that are not in the results yet")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    asked = parser.parse_args()
    if unknown := [x for x in asked.presets if x not in PRESETS]:
        parser.error(f"there is no preset {unknown[0]!r}; presets are {', '.join(PRESETS)}")
    torch.set_num_threads(1)
    runs = json.loads(json.loads(RESULT.read_text())["runs"]) if RESULT.exists() else {}
    for name in asked.presets or PRESETS:
        for seed in asked.seeds:
            own = runs.setdefault(name, {})
            if str(seed) in own and not asked.presets:
                continue
            own[str(seed)] = figures = curve(name, seed)
            summary = f"best {figures['best']} of {PRESETS[name].threshold:g} in {figures['steps']:,} steps"
            harness.say(f"{name}, seed {seed}: {'' if figures['reached'] else 'NOT '}reached, {summary}")
            save(runs)
    draw(runs, RESULT.with_suffix(".svg"))


if __name__ == "__main__":
    main()
