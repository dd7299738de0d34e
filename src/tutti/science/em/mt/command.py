"""The work of `tutti mt`: responses of a section, and inversion of data, as a config says."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from tutti.checkpoint.array_file import write_arrays
from tutti.science.em.mt import figures
from tutti.science.em.mt.config import MTConfig
from tutti.science.em.mt.inverse.columns import PRIORS
from tutti.science.em.mt.inverse.inversion import Inversion, Iteration, Result
from tutti.science.em.mt.inverse.mismatch import Mismatch, checked, mismatch
from tutti.science.em.mt.inverse.parameters import Coded, Pixel
from tutti.science.em.mt.inverse.posterior import COVERAGE, ensemble, posterior
from tutti.science.em.mt.inverse.quality import rms
from tutti.science.em.mt.inverse.vae import VAE
from tutti.science.em.mt.mesh import Mesh2D, skin_depth
from tutti.science.em.mt.painted import snapped
from tutti.science.em.mt.response.forward import MT2D
from tutti.science.em.mt.surveys.data import Data
from tutti.science.em.mt.tables import ModelTable

CONSOLE, ERRORS = Console(highlight=False, soft_wrap=True), Console(highlight=False, soft_wrap=True, stderr=True)


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = lambda message, *_, **__: ERRORS.print(f"warning: {message}", markup=False)
        yield


@warnings_as_lines()
def forward(config: Path, out: str = "") -> None:
    """Write and draw the responses of the config's section, with noise, in a folder; by default out/mt/NAME."""
    table = MTConfig.load(config)
    folder = _folder(table, config, out)
    mesh, problem, truth, data = _synthetic(table, table.observations())
    data.save(folder / "data.npz")
    data.save(folder / "data.csv")
    write_arrays(folder / "model.npz", log_rho=truth.numpy(), x_edges=mesh.x_edges, z_edges=mesh.z_edges)
    figures.sections(folder / "model.png", mesh, {"model": truth}, sites=problem.sites, area=_area(table, mesh, data))
    figures.pseudosections(folder / "data.png", data, name="computed, with noise" if _noisy(table) else "computed")
    size = f"{mesh.nz} x {mesh.nx} cells, {len(problem.frequencies)} frequencies, {len(problem.sites)} sites"
    CONSOLE.print(f"{size}, {', '.join(problem.modes)}: wrote {folder}/data.npz, data.csv, model.npz and pictures")


@warnings_as_lines()
def invert(config: Path, out: str = "") -> int:
    """Invert data, or the synthetic data of the config's model; write and draw the result. Returns the exit code: 1 if
    the data are not fitted to the target."""
    table = MTConfig.load(config)
    folder = _folder(table, config, out)
    data, truth = table.observations(), None
    if data is None:
        if table.model is None:
            raise ValueError(f"{config} has neither data.path nor a [model] to make synthetic data of")
        mesh, problem, truth, data = _synthetic(table)
    else:
        mesh, _, _ = table.geometry(data)
        problem = data.problem(mesh, solver=table.solver)
    wanted = table.inversion
    inversion = Inversion(problem, data, shifts=wanted.shifts, target=wanted.target, steps=wanted.steps,
                          strategy=wanted.strategy, weight=wanted.weight, say=_say)  # fmt: skip
    CONSOLE.print(f"{data.count} data, {mesh.cells} cells")
    start = torch.log10(torch.tensor(wanted.start, dtype=torch.float64))
    result, found_mismatch, others = _run(table, inversion, mesh, start)
    report = _report(result, found_mismatch, data, truth)
    if wanted.uncertainty and result.beta > 0:
        CONSOLE.print(f"uncertainty: covariance of {len(result.p)} parameters")
        uncertainty = posterior(inversion, result)
        prior = f"with a prior of {uncertainty.strength:.2g} times the penalty"
        CONSOLE.print(f"standard deviations: linearised around the model, {prior}; {COVERAGE}")
        report["resolution"], report["prior_strength"] = uncertainty.resolution.mean().item(), uncertainty.strength
        extra = {"sd": uncertainty.sd.numpy(), "resolution": uncertainty.resolution.numpy()}
        area = _area(table, mesh, data)
        figures.sections(folder / "uncertainty.png", mesh, {"standard deviation": uncertainty.sd}, area=area,
                         label="decades", colours="YlOrRd", limits=(0, float(uncertainty.sd.max())))  # fmt: skip
    else:
        extra = {}
    if wanted.samples and result.beta > 0:
        CONSOLE.print(f"drawing {wanted.samples} models of the posterior")
        extra["samples"] = ensemble(inversion, result, wanted.samples).numpy()
    if not result.beta > 0 and (wanted.uncertainty or wanted.samples):
        CONSOLE.print("the inversion made no step: no uncertainty and no models of the posterior")
    write_arrays(folder / "result.npz", log_rho=result.model.numpy(), x_edges=mesh.x_edges, z_edges=mesh.z_edges,
                 response=result.response.view(problem.shape).numpy(), **extra)  # fmt: skip
    (folder / "report.json").write_text(json.dumps(report, indent=1))
    models = ({"truth": truth} if truth is not None else {}) | others | {f"model, chi {result.chi:.2f}": result.model}
    figures.sections(folder / "model.png", mesh, models, sites=problem.sites, area=_area(table, mesh, data))
    figures.pseudosections(folder / "data.png", data, result.response)
    figures.fits(folder / "fits.png", data, result.response)
    figures.convergence(folder / "convergence.png", {"inversion": result.history}, wanted.target)
    end = f"chi {result.chi:.3f}, relative misfit {result.misfit:.4f} after {len(result.history) - 1} steps"
    CONSOLE.print(f"{end}; wrote {folder}/model.png, fits.png, result.npz, report.json, ...")
    if not result.reached:
        CONSOLE.print(f"the target, chi {wanted.target}, was not reached: more steps, larger error floors or another"
                      " starting model may help")  # fmt: skip
    return 0 if result.reached else 1


def _run(table: MTConfig, inversion: Inversion, mesh: Mesh2D,
         start: Tensor) -> tuple[Result, Mismatch | None, dict[str, Tensor]]:  # fmt: skip
    """The result, what the diagnostics say of the prior, and other models to draw."""
    wanted, prior = table.inversion, table.prior
    if wanted.parameters == "cells":
        return inversion.run(Pixel(mesh, along=wanted.along, down=wanted.down), start), None, {}
    region = table.region(mesh)
    columns = PRIORS[table.columns()](mesh.z[region.rows])
    coded = Coded(mesh, _vae(table, columns), region, lateral=prior.lateral, deviation=prior.deviation)
    if wanted.parameters == "codes":
        result = inversion.run(coded, start)
        found_mismatch, others = mismatch(inversion, result), {}
        for reason in found_mismatch.reasons:
            CONSOLE.print(f"the prior may not suit these data: {reason}")
    else:
        outcome = checked(inversion, coded, start, tell=CONSOLE.print, along=wanted.along, down=wanted.down)
        result, found_mismatch = outcome.result, outcome.mismatch
        others = {} if outcome.result is outcome.coded else {f"codes, chi {outcome.coded.chi:.2f}": outcome.coded.model}
    return result, found_mismatch, others


def _vae(table: MTConfig, columns) -> VAE:
    prior, z = table.prior, columns.z
    kind = f"{prior.codes} codes, {prior.network}, {prior.samples} samples, {prior.epochs} epochs"
    source = f"{table.columns()}, {len(z)} rows from {z[0]:.6g} to {z[-1]:.6g} m, {kind}"
    if prior.file and Path(prior.file).exists():
        vae = VAE.load(prior.file)
        if vae.source != source:
            raise ValueError(f"{prior.file} was learned from {vae.source or 'something else'}, and this config asks for"
                             f" {source}: delete it, or name another prior.file")  # fmt: skip
        CONSOLE.print(f"the prior is that of {prior.file}")
        return vae
    vae = VAE(len(columns.z), prior.codes, prior.network)
    CONSOLE.print(f"learning the prior: {source}")
    vae.fit(columns, samples=prior.samples, epochs=prior.epochs)
    vae.source = source
    if prior.file:
        Path(prior.file).parent.mkdir(parents=True, exist_ok=True)
        vae.save(prior.file)
    return vae


def _synthetic(table: MTConfig, like: Data | None = None) -> tuple[Mesh2D, MT2D, Tensor, Data]:
    """Mesh, problem, true model and synthetic data of the config's survey, or of that of other data."""
    mesh, frequencies, sites = table.geometry(like, table.model)
    modes = like.modes if like else table.survey.modes or ("TE", "TM")
    problem = MT2D(mesh, frequencies, sites, modes, solver=table.solver)
    truth = table.truth(mesh)
    for line in snapped(table.model or ModelTable(), mesh):
        warnings.warn(line, stacklevel=2)
    noise = table.noise
    data = Data.synthetic(problem, truth, rho=noise.rho, phase=noise.phase, tipper=noise.tipper, seed=noise.seed)
    return mesh, problem, truth, data


def _report(result: Result, found_mismatch: Mismatch | None, data: Data, truth: Tensor | None) -> dict:
    report = {"chi": result.chi, "misfit": result.misfit, "reached": result.reached, "data": data.count,
              "shift": _shifts(result, data), "iterations": [asdict(i) for i in result.history]}  # fmt: skip
    if found_mismatch is not None:
        report["prior"] = {"codes": found_mismatch.codes, "suspected": list(found_mismatch.reasons)}
    if truth is not None:
        report["model_rms"] = rms(result.model, truth)
    return report


def _shifts(result: Result, data: Data) -> dict[str, dict[float, float]]:
    """Static shifts in decades, {mode: {site: shift}}."""
    if not len(result.shift):
        return {}
    of_modes = zip(data.modes, result.shift.view(len(data.modes), -1).tolist(), strict=True)
    return {mode: dict(zip(data.sites, shifts, strict=True)) for mode, shifts in of_modes if mode != "tipper"}


def _say(number: int, it: Iteration) -> None:
    if number == 0:
        CONSOLE.print(" step     chi   misfit      beta  seconds")
    CONSOLE.print(f"{number:5d} {it.chi:7.3f} {it.misfit:8.4f} {it.beta:9.2e} {it.seconds:8.1f}")


def _noisy(table: MTConfig) -> bool:
    return any((table.noise.rho, table.noise.phase, table.noise.tipper))


def _area(table: MTConfig, mesh: Mesh2D, data: Data) -> tuple[float, float, float]:
    """Left, right and depth to draw: the region of the setting, or sites and bodies with a tenth more, down to below
    the deepest boundary of the model, or to the largest skin depth of the data; at most half the width below it."""
    figure_depth = table.figure.depth
    if setting := table.setting():
        columns, bottom = setting.region.columns, setting.region.rows.stop
        return mesh.x_edges[columns.start], mesh.x_edges[columns.stop], figure_depth or mesh.z_edges[bottom]
    model = table.model or ModelTable()
    ends = [*data.sites, *(x for body in model.bodies for x in body.x)]
    left, right = min(ends), max(ends)
    more = max(0.1 * (right - left), 500.0)
    boundaries = [z for each in model.layers for z in (each.top, each.bottom)] + [body.z[1] for body in model.bodies]
    deepest = max([0.0, *(z for z in boundaries if z < mesh.z_edges[-1])])
    half = max((right - left) / 2, 1000.0)
    depth = max(1.5 * deepest, half) if deepest else deepest_seen(data)
    depth = min(depth, deepest + half)  # deeper, sections would be drawn narrow
    return (
        max(left - more, mesh.x_edges[0]),
        min(right + more, mesh.x_edges[-1]),
        figure_depth or min(depth, mesh.z_edges[-1]),
    )


def deepest_seen(data: Data) -> float:
    """The largest skin depth of median apparent resistivities, in metres."""
    depths = [1000.0]
    for i, frequency in enumerate(data.frequencies):
        modes = [k for k, mode in enumerate(data.modes) if mode != "tipper"]
        rho = data.values[modes, i, :, 0][data.mask[modes, i, :, 0] > 0]
        if data.outputs == "apparent" and len(rho):
            depths.append(skin_depth(10 ** rho.median().item(), frequency))
    return max(depths)


def _folder(table: MTConfig, config: Path, out: str) -> Path:
    folder = Path(out or table.out or f"out/mt/{config.stem}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
