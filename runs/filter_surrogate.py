"""A surrogate of a waveguide filter: from runs of the field solver to a design with an error bound.

1. The solver gives S-parameters of filters with three dielectric posts. Runs are kept, and resumed.
2. An ensemble learns them; active sampling chooses further runs where its members disagree.
3. Of many thousand filters the surrogate finds the one that passes 9.5 to 10.5 GHz best and stops the band's ends. The
   solver checks it: bounds hold for points that are drawn, less often for the best of thousands.

    python runs/filter_surrogate.py            # several minutes on two cores
    python runs/filter_surrogate.py --quick    # seconds; the surrogate is poor
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from support import Results, options, picture
from torch import Tensor

from tutti.science.em.surrogate import Surrogate, Training, relative_error
from tutti.science.em.surrogate.active import active
from tutti.science.em.surrogate.posts import FREQUENCIES, POSTS, solve

PASS = (FREQUENCIES >= 9.5e9) & (FREQUENCIES <= 10.5e9)
STOP = (FREQUENCIES <= 8.4e9) | (FREQUENCIES >= 12e9)


def merit(s: Tensor) -> Tensor:
    """Least |S21| in the passband minus the largest in the stopbands: (n,)."""
    through = s[:, 1].abs()
    return through[:, PASS].amin(1) - through[:, STOP].amax(1)


def best(surrogate: Surrogate, count: int) -> dict[str, Any]:
    """The trusted filter of the largest merit, and what the solver says of it."""
    points = surrogate.geometry.space.random(count, 7)
    begin = time.perf_counter()
    found = surrogate.predict(points)
    seconds = time.perf_counter() - begin
    row = int(torch.where(found.trusted, merit(found.s), -2.0).argmax())
    truth = surrogate.geometry(points[row])
    return {
        "parameters": dict(zip(surrogate.geometry.space.names, points[row].tolist(), strict=True)),
        "trusted": float(found.trusted.double().mean()), "seconds": seconds, "bound": float(found.bound[row]),
        "error": float(relative_error(found.s[row : row + 1], truth)),
        "merit": [float(merit(found.s[row : row + 1])), float(merit(truth))],
    }  # fmt: skip


def main(argv: list[str] | None = None) -> dict[str, Any]:
    run = options(__doc__, "out/filter_surrogate", argv, training=False)
    torch.set_num_threads(1)
    results, quick = Results(run.out), run.quick
    geometry = replace(POSTS, name="posts-24", solve=partial(solve, cells=24)) if quick else POSTS
    how = Training(width=32, blocks=1, steps=60) if quick else Training(blocks=3, steps=2500, rate=6e-3)
    start, each, rounds, tolerance = (24, 6, 1, 1.0) if quick else (130, 60, 3, 0.05)
    file = run.out / "surrogate.pt"
    bounds: list[tuple[int, float]] = []
    pool = geometry.space.random(1000, 5)

    def tell(runs: int, surrogate: Surrogate) -> None:
        bounds.append((runs, float(surrogate.predict(pool).bound.median())))
        print(f"{runs} solver runs: median bound of the relative error {bounds[-1][1]:.3f}", flush=True)

    def learn() -> dict[str, Any]:
        made, samples = active(geometry, start=start, per_round=each, rounds=rounds, folder=run.out / "samples",
                               training=how, tolerance=tolerance, after=tell)  # fmt: skip
        made.save(file)
        return {"solver runs": len(samples), "solver seconds": float(samples.seconds.sum()), "bounds": bounds}

    learned = results.get("learned", learn)
    print(f"{learned['solver runs']} solver runs took {learned['solver seconds']:.0f} s")
    surrogate = Surrogate.load(file, geometry)
    count = 500 if quick else 20000
    found = results.get("best filter", lambda: best(surrogate, count))
    sizes = ", ".join(f"{x.name} {found['parameters'][x.name]:.4g} {x.unit}".strip() for x in geometry.space.parameters)
    print(f"best of {count} filters, predicted in {found['seconds']:.1f} s: {sizes}")
    print(f"its error is {found['error']:.3f}, the bound says {found['bound']:.3f}")
    print("least |S21| of the passband minus the largest of the stopbands: "
          f"{found['merit'][0]:.2f} predicted, {found['merit'][1]:.2f} solved")  # fmt: skip
    print(f"{found['trusted']:.0%} of the filters have a bound within the tolerance of {tolerance}")

    def curves(axes: Any) -> None:
        s, truth = surrogate.predict(found["parameters"]).s[0], geometry(found["parameters"])[0]
        for i, trace in enumerate(geometry.traces):
            axes.plot(FREQUENCIES / 1e9, 20 * truth[i].abs().log10(), f"C{i}", lw=3, alpha=0.4, label=f"{trace} solver")
            axes.plot(FREQUENCIES / 1e9, 20 * s[i].abs().log10(), f"C{i}--", lw=1, label=f"{trace} surrogate")
        axes.set(xlabel="GHz", ylabel="dB", ylim=(-50, 2))
        axes.legend()

    def progress(axes: Any) -> None:
        axes.semilogy(*zip(*learned["bounds"], strict=True), marker="o")
        axes.set(xlabel="solver runs", ylabel="median bound of the error")

    picture(run.out, {"best filter": curves, "active sampling": progress},
            "quick run: a poor surrogate" if quick else "")  # fmt: skip
    return results.values


if __name__ == "__main__":
    main()
