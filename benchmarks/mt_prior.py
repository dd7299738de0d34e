"""Magnetotelluric inversion with a learned prior against the inversion of cells, over random truths.

    python benchmarks/mt_prior.py [--quick]

A basin of 10 km x 1 km, 25 sites, 16 frequencies from 1 Hz to 5 kHz, TE, 1 % noise of apparent resistivity and 0.286
degrees of phase. Each truth is inverted cell by cell and by codes of columns from a half-space of 100 ohm-m to the same
chi; model errors are taken in the region of 10 km x 1 km. Where the diagnostics suspect the prior, the result with the
prior is that of the cells; their threshold was set on other truths (seeds 11 and 7). Truths are drawn from the prior
and from outside of it; those of the prior also have three times the noise, or a third of the sites. It resumes: delete
OUT to start again.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import torch

import harness
from tutti.science.em.mt.figures import convergence, fits, pseudosections, sections
from tutti.science.em.mt.inverse.inversion import Inversion
from tutti.science.em.mt.inverse.mismatch import checked, mismatch
from tutti.science.em.mt.inverse.parameters import Coded, Pixel
from tutti.science.em.mt.inverse.quality import rms, sharpness, ssim
from tutti.science.em.mt.inverse.vae import VAE
from tutti.science.em.mt.response.forward import MT2D
from tutti.science.em.mt.surveys.data import Data
from tutti.science.em.mt.surveys.synthetic import Setting, basin_setting, outside_of_prior

OUT = Path.home() / ".cache" / "tutti" / "mt_prior"
GROUPS = {  # truths, noise of rho, sites
    "in the prior": (50, 0.01, 25),
    "outside of the prior": (20, 0.01, 25),
    "3 x the noise": (12, 0.03, 25),
    "9 sites": (12, 0.01, 9),
}
ARTICLE = 8  # Gauss-Newton steps: four of the article's iterations, each one on cells and one on codes


def scores_of(setting: Setting, inverted: Any, truth: torch.Tensor) -> dict[str, float]:
    inside = setting.region.rows, setting.region.columns
    model, wanted = inverted.model[inside], truth[inside]
    rises = (wanted[4:] - wanted[:-4]).amax(0).ge(0.5).any()
    z = setting.mesh.z[setting.region.rows]
    return {
        "rms": rms(model, wanted), "ssim": ssim(model, wanted),
        "sharpness": sharpness(model, wanted, z) if rises else float("nan"),
        "chi": inverted.chi, "misfit": inverted.misfit, "steps": len(inverted.history) - 1,
        "misfit_after_8": inverted.history[min(ARTICLE, len(inverted.history) - 1)].misfit,
        "seconds": sum(i.seconds for i in inverted.history),
    }  # fmt: skip


def one(setting: Setting, vae: VAE, truth: torch.Tensor, noise: float, seed: int) -> dict[str, Any]:
    problem = MT2D(setting.mesh, setting.frequencies, setting.sites, ("TE",), threads=1)
    data = Data.synthetic(problem, truth, rho=noise, phase=28.6 * noise, seed=seed)
    inversion = Inversion(problem, data, steps=20)
    pixel = inversion.run(Pixel(setting.mesh))
    coded = Coded(setting.mesh, vae, setting.region)
    inverted = inversion.run(coded)
    suspected = mismatch(inversion, inverted)
    return {"cells": scores_of(setting, pixel, truth), "codes": scores_of(setting, inverted, truth),
            "noise_misfit": data.misfit(problem(truth)), "suspected": list(suspected.reasons),
            "codes_over_expected": suspected.codes}  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    def mean(key: str, which: str) -> float:
        values = [row[which][key] for row in rows if row[which][key] == row[which][key]]
        return statistics.mean(values) if values else float("nan")

    chosen = [row["cells"] if row["suspected"] else row["codes"] for row in rows]
    ratios = [k["rms"] / row["cells"]["rms"] for k, row in zip(chosen, rows, strict=True)]
    out = {f"{key} {which}": mean(key, which) for which in ("cells", "codes")
           for key in ("rms", "ssim", "sharpness", "chi", "misfit", "misfit_after_8", "steps", "seconds")}  # fmt: skip
    by_codes = [row["codes_over_expected"] for row in rows]
    return out | {
        "codes_over_expected": [min(by_codes), max(by_codes)], "truths": len(rows),
        "suspected": sum(bool(row["suspected"]) for row in rows),
        "noise_misfit": statistics.mean(row["noise_misfit"] for row in rows),
        "rms codes / cells": mean("rms", "codes") / mean("rms", "cells"),
        "rms chosen / cells": statistics.mean(k["rms"] for k in chosen) / mean("rms", "cells"),
        "worst chosen / cells": max(ratios),
        "reached codes": sum(row["codes"]["chi"] <= 1.05 for row in rows),
        "reached cells": sum(row["cells"]["chi"] <= 1.05 for row in rows),
    }  # fmt: skip


def learned(setting: Setting) -> VAE:
    path = OUT / "vae.pt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        VAE(setting.columns.z.numel()).fit(setting.columns).save(path)
    return VAE.load(path)


def draw(setting: Setting, vae: VAE, truth: torch.Tensor) -> None:
    """One truth of the prior, and what both inversions make of it."""
    problem = MT2D(setting.mesh, setting.frequencies, setting.sites, ("TE",))
    data = Data.synthetic(problem, truth)
    inversion = Inversion(problem, data, steps=20)
    cells = inversion.run(Pixel(setting.mesh))
    codes = checked(inversion, Coded(setting.mesh, vae, setting.region)).result
    sections(harness.RESULTS / "mt_prior.svg", setting.mesh,
             {"truth": truth, f"cells, chi {cells.chi:.2f}": cells.model, f"codes, chi {codes.chi:.2f}": codes.model},
             sites=setting.sites, area=(0, 10_000, 1000))  # fmt: skip
    convergence(harness.RESULTS / "mt_prior-convergence.svg", {"cells": cells.history, "codes": codes.history})
    pseudosections(OUT / "pseudosections.png", data, codes.response)
    fits(OUT / "fits.png", data, codes.response)


def run(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    whole = basin_setting()
    vae = learned(whole)
    groups = {}
    for name, (count, noise, sites) in GROUPS.items():
        setting = basin_setting(sites)
        outside = name.startswith("outside")
        truths = outside_of_prior(setting, count, 107) if outside else setting.truths(count, 111)
        rows = []
        for i, truth in enumerate(truths[:2] if quick else truths):
            path = OUT / f"{name.replace(' ', '_')}-{i}.json"
            if not path.exists():
                path.write_text(json.dumps(one(setting, vae, truth, noise, i)))
            rows.append(json.loads(path.read_text()))
            harness.say(f"{name} {i}: cells {rows[-1]['cells']['rms']:.3f}, codes {rows[-1]['codes']['rms']:.3f},"
                        f" suspected: {rows[-1]['suspected']}")  # fmt: skip
        groups[name] = summary(rows)
    if not quick:
        draw(whole, vae, whole.truths(1, 111)[0])
    return {"groups": groups}


if __name__ == "__main__":
    harness.main(run, __file__)
