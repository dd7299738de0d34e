"""A surrogate of a waveguide filter against the field solver that it learned from: error, bounds, speed, solver runs.

    python benchmarks/surrogate.py [--quick]

The filter has three dielectric posts in WR-90, five parameters, S11 and S21 at 85 frequencies from 8.2 to 12.4 GHz
(`tutti.science.em.surrogate.posts`). Errors are ||S - truth|| / ||truth|| over both curves, truth: the solver's curves
at points that neither training nor calibration has seen. Active sampling and uniform points start from the same samples
and are calibrated and tested on the same ones. One thread. Solver runs are kept in OUT; --quick has a grid of half the
cells, and few samples.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import harness
from tutti.science.em.surrogate import Geometry, Samples, Surrogate, Training, collect, relative_error
from tutti.science.em.surrogate.active import chosen
from tutti.science.em.surrogate.posts import POSTS, empty, solve

OUT = Path.home() / ".cache" / "tutti" / "surrogate"
TARGET = 0.02  # of the error


def measured(surrogate: Surrogate, held_out: Samples) -> dict[str, float]:
    output = surrogate.predict(held_out.points)
    error = relative_error(output.s, held_out.s)
    peak = (output.s - held_out.s).abs().flatten(1).amax(1)
    return {
        "error_mean": float(error.mean()), "error_median": float(error.median()),
        "error_p90": float(error.quantile(0.9)), "error_worst": float(error.max()),
        "largest_difference_median": float(peak.median()),
        "coverage": float((error <= output.bound).double().mean()), "bound_median": float(output.bound.median()),
        "trusted": float(output.trusted.double().mean()),
        "error_mean_of_trusted": float(error[output.trusted].mean()),
        "correlation_of_bound_and_error": float(torch.corrcoef(torch.stack([error.log(), output.bound.log()]))[0, 1]),
    }  # fmt: skip


def seconds(work: Callable[[], Any], rounds: int) -> float:
    work()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def speed(geometry: Geometry, surrogate: Surrogate) -> dict[str, float]:
    """Solver and surrogate in turns on this machine, now."""
    points = geometry.space.random(1000, 5)
    cells = 24 if "24" in geometry.name else 48
    empty(cells)  # the run of the empty guide, once for all samples
    solver = seconds(lambda: geometry(points[:1]), 9)
    one, many = seconds(lambda: surrogate.predict(points[:1]), 50), seconds(lambda: surrogate.predict(points), 5)
    return {"solver_seconds": solver, "one_seconds": one, "of_1000_seconds": many / 1000,
            "times_faster_one": solver / one, "times_faster_of_1000": solver / (many / 1000)}  # fmt: skip


def rounds(geometry: Geometry, how: Training, start: Samples, calibration: Samples, held_out: Samples, count: int,
           each: int, pick: Callable[[Surrogate, int, int], Tensor]) -> list[tuple[int, float]]:  # fmt: skip
    """(samples, mean error) of training on more and more samples."""
    samples, curve = start, []
    for i in range(count + 1):
        surrogate = Surrogate.fit(geometry, samples, replace(how, seed=i), calibration=calibration)
        curve.append((len(samples), measured(surrogate, held_out)["error_mean"]))
        harness.say(f"{curve[-1][0]} samples: mean error {curve[-1][1]:.4f}")
        if i < count:
            points = pick(surrogate, i, len(samples))
            samples = samples + collect(geometry, points, OUT / geometry.name)
    return curve


def reached(curve: list[tuple[int, float]], error: float) -> float | None:
    """How many samples a curve needs for an error, interpolated; None if it does not get there."""
    for (n0, e0), (n1, e1) in pairwise(curve):
        if e1 <= error <= e0:
            return n0 + (n1 - n0) * (e0 - error) / (e0 - e1)
    return None


def draw(surrogate: Surrogate, held_out: Samples, curves: dict[str, list[tuple[int, float]]], name: str) -> None:
    """Held-out curves in dB: the best, the median, and the worst; and errors over samples."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    predicted = surrogate.predict(held_out.points)
    error = relative_error(predicted.s, held_out.s)
    order = error.argsort().tolist()
    figure = Figure(figsize=(16, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 4)
    f = surrogate.geometry.frequencies / 1e9
    for ax, (title, row) in zip(axes, {"best": order[0], "median": order[len(order) // 2], "worst": order[-1]}.items(),
                                strict=False):  # fmt: skip
        for trace, color in enumerate(("tab:red", "tab:blue")):
            label = surrogate.geometry.traces[trace]
            ax.plot(f, 20 * held_out.s[row, trace].abs().log10(), color, lw=3, alpha=0.35, label=f"{label} solver")
            ax.plot(f, 20 * predicted.s[row, trace].abs().log10(), color, lw=1, ls="--", label=f"{label} surrogate")
        ax.set(title=f"{title}: error {float(error[row]):.4f}, bound {float(predicted.bound[row]):.4f}", xlabel="GHz",
               ylabel="dB", ylim=(-50, 2))  # fmt: skip
    axes[0].legend(fontsize=7)
    for label, curve in curves.items():
        axes[3].loglog(*zip(*curve, strict=True), marker="o", label=label)
    axes[3].set(title="held-out mean error", xlabel="solver runs for training")
    axes[3].legend()
    figure.savefig(harness.RESULTS / f"{name}.svg")


def run(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    geometry = replace(POSTS, name="posts-24", solve=partial(solve, cells=24)) if quick else POSTS
    space, folder = geometry.space, OUT / geometry.name
    how = Training(steps=500, rate=6e-3) if quick else Training(steps=6000, blocks=3, rate=6e-3)
    train, calibrate, test = (100, 30, 50) if quick else (500, 100, 150)
    samples = collect(geometry, space.sobol(train, 1), folder)
    calibration = collect(geometry, space.random(calibrate, 2), folder)
    held_out = collect(geometry, space.random(test, 3), folder)
    harness.say(f"{len(samples)} + {len(calibration)} + {len(held_out)} solver runs")
    begin = time.perf_counter()
    surrogate = Surrogate.fit(geometry, samples, how, calibration=calibration)
    training = time.perf_counter() - begin
    result: dict[str, Any] = {
        "samples": train, "calibration_samples": calibrate, "held_out_samples": test,
        "solver_seconds_of_samples": float(sum(x.seconds.sum() for x in (samples, calibration))),
        "training_seconds": training, "modes": len(surrogate.basis.scale),
        "held_out": measured(surrogate, held_out), "speed": speed(geometry, surrogate),
    }  # fmt: skip
    harness.say(f"held out {result['held_out']}, {result['speed']}")

    how = replace(how, steps=300 if quick else 2000)
    start, count, each = (50, 1, 25) if quick else (80, 4, 40)

    def active(surrogate: Surrogate, i: int, taken: int) -> Tensor:
        pool = space.random(4000, 100 + i)
        return pool[chosen(surrogate, pool, each, taken)]

    curves = {}
    for name, pick in (("active", active), ("uniform", lambda surrogate, i, taken: space.random(each, 200 + i)),
                       ("Sobol", lambda surrogate, i, taken: samples.points[taken : taken + each])):  # fmt: skip
        harness.say(name)
        curves[name] = rounds(geometry, how, samples[:start], calibration, held_out, count, each, pick)
    for rival in ("uniform", "Sobol"):
        error = max(curves["active"][-1][1], curves[rival][-1][1])
        runs = [reached(curves[x], error) for x in ("active", rival)]
        result[f"runs for the same error, active and {rival}"] = [error, *runs]
    result["rounds"] = curves
    draw(surrogate, held_out, curves, "surrogate-quick" if quick else "surrogate")
    return result


if __name__ == "__main__":
    harness.main(run, __file__)
