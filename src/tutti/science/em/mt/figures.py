"""Pictures of sections, pseudo-sections, fits and convergence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from tutti.science.em.mt.data import Data
from tutti.science.em.mt.inversion import Iteration
from tutti.science.em.mt.mesh import Mesh2D

QUANTITIES = {"apparent": ("log10 apparent resistivity", "phase (degrees)"), "impedance": ("Re Z (ohm)", "Im Z (ohm)")}


def section(axes: Axes, mesh: Mesh2D, model: Tensor, *, title: str = "", sites: Sequence[float] = (),
            area: tuple[float, float, float] | None = None, limits: tuple[float, float] | None = None,
            label: str = "log10 resistivity (ohm-m)") -> None:  # fmt: skip
    """A model (nz, nx) in kilometres. area: left, right and depth in metres."""
    left, right, depth = area or (mesh.x_edges[0], mesh.x_edges[-1], mesh.z_edges[-1])
    low, high = limits or (float(model.min()), float(model.max()))
    image = axes.pcolormesh(np.array(mesh.x_edges) / 1e3, np.array(mesh.z_edges) / 1e3, model.numpy(), cmap="turbo_r",
                            vmin=low, vmax=high, rasterized=True)  # fmt: skip
    shown = np.array([x for x in sites if left <= x <= right]) / 1e3
    axes.plot(shown, np.zeros(len(shown)), "kv", markersize=3, clip_on=False)
    axes.set(title=title, xlabel="x (km)", ylabel="depth (km)", xlim=(left / 1e3, right / 1e3), ylim=(depth / 1e3, 0))
    assert axes.figure is not None
    axes.figure.colorbar(image, ax=axes, label=label)


def sections(path: str | Path, mesh: Mesh2D, models: Mapping[str, Tensor], **options) -> None:
    """Models below each other, with one scale. options: of `section`."""
    figure = Figure((9, 2.8 * len(models)), layout="constrained")
    limits = min(float(m.min()) for m in models.values()), max(float(m.max()) for m in models.values())
    for axes, (title, model) in zip(figure.subplots(len(models), 1, squeeze=False)[:, 0], models.items(), strict=True):
        section(axes, mesh, model, title=title, **{"limits": limits, **options})
    figure.savefig(path)


def pseudosections(path: str | Path, data: Data, response: Tensor | None = None) -> None:
    """Data over sites and periods; with a response, that and the weighted residuals beside them."""
    shown = [("data", data.values)]
    if response is not None:
        response = response.view(data.shape)
        shown += [("response", response), ("residual / error", (data.values - response) / data.errors)]
    rows = [(i, k) for i in range(len(data.modes)) for k in range(2)]
    down = np.argsort(data.frequencies)[::-1]  # low frequencies see deep
    figure = Figure((4.2 * len(shown), 2.4 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), len(shown), squeeze=False)
    for (i, k), line in zip(rows, grid, strict=True):
        name = "tipper (real, imaginary)" if data.modes[i] == "tipper" else QUANTITIES[data.outputs][k]
        used = data.mask[i, :, :, k] > 0
        known = data.values[i, :, :, k][used]
        limits = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
        for axes, (title, values) in zip(line, shown, strict=True):
            is_data = not title.startswith("residual")
            low, high = limits if is_data else (-3, 3)
            shown_values = values[i, :, :, k].where(used, float("nan")).numpy()[down]
            image = axes.imshow(shown_values, aspect="auto", vmin=low, vmax=high, cmap="turbo_r" if is_data else "RdBu")
            ticks = np.unique(np.linspace(0, len(data.frequencies) - 1, 5).astype(int))
            axes.set(title=f"{data.modes[i]}: {name if is_data else title}", xlabel="site", ylabel="frequency (Hz)")
            axes.set_yticks(ticks, [f"{data.frequencies[down[t]]:.3g}" for t in ticks])
            figure.colorbar(image, ax=axes)
    figure.savefig(path)


def fits(path: str | Path, data: Data, response: Tensor, most: int = 6) -> None:
    """Curves of some sites: data with error bars, and the response."""
    response = response.view(data.shape)
    places = np.unique(np.linspace(0, len(data.sites) - 1, min(most, len(data.sites))).astype(int))
    figure = Figure((2.6 * len(places), 5), layout="constrained")
    grid = figure.subplots(2, len(places), squeeze=False, sharex=True)
    periods = 1 / np.array(data.frequencies)
    for column, site in enumerate(places):
        for k, axes in enumerate(grid[:, column]):
            for i, mode in enumerate(data.modes):
                used = (data.mask[i, :, site, k] > 0).numpy()
                values, errors = data.values[i, :, site, k].numpy(), data.errors[i, :, site, k].numpy()
                axes.errorbar(periods[used], values[used], errors[used], fmt=".", color=f"C{i}", label=mode)
                axes.plot(periods, response[i, :, site, k].numpy(), color=f"C{i}")
            axes.set(xscale="log", ylabel=QUANTITIES[data.outputs][k] if column == 0 else "")
        grid[0, column].set_title(f"x = {data.sites[site] / 1e3:.3g} km")
        grid[1, column].set_xlabel("period (s)")
    grid[0, 0].legend()
    figure.savefig(path)


def convergence(path: str | Path, histories: Mapping[str, Sequence[Iteration]], target: float = 1.0) -> None:
    """chi and relative misfit over Gauss-Newton steps."""
    figure = Figure((9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, history in histories.items():
        left.semilogy([i.chi for i in history], "o-", label=name)
        right.semilogy([i.misfit for i in history], "o-", label=name)
    left.axhline(target, color="gray", linewidth=0.8)
    left.set(xlabel="Gauss-Newton step", ylabel="chi")
    right.set(xlabel="Gauss-Newton step", ylabel="relative misfit")
    left.legend()
    figure.savefig(path)
