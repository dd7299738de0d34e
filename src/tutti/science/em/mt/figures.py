"""Pictures of sections, pseudo-sections, fits and convergence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from tutti.science.em.mt.inverse.inversion import Iteration
from tutti.science.em.mt.mesh import Mesh2D
from tutti.science.em.mt.surveys.data import Data

RESISTIVITY = "log10 resistivity (ohm-m)"
QUANTITIES = {  # labels, and the smallest range of colours: noise is not stretched over all of them
    "apparent": ((r"log10 $\rho_a$ (ohm-m)", 0.2), ("phase (degrees)", 5.0)),
    "impedance": (("Re Z (ohm)", 0.0), ("Im Z (ohm)", 0.0)),
    "tipper": (("Re Hz/Hy", 0.1), ("Im Hz/Hy", 0.1)),
}


def section(axes: Axes, mesh: Mesh2D, model: Tensor, *, title: str = "", sites: Sequence[float] = (),
            area: tuple[float, float, float] | None = None, limits: tuple[float, float] | None = None,
            label: str = RESISTIVITY, colours: str = "turbo_r") -> None:  # fmt: skip
    """A model (nz, nx) in kilometres. area: left, right and depth in metres."""
    left, right, depth = area or (mesh.x_edges[0], mesh.x_edges[-1], mesh.z_edges[-1])
    low, high = limits or _limits(model, 0.2)
    image = axes.pcolormesh(np.array(mesh.x_edges) / 1e3, np.array(mesh.z_edges) / 1e3, model.numpy(), cmap=colours,
                            vmin=low, vmax=high, rasterized=True)  # fmt: skip
    shown = np.array([x for x in sites if left <= x <= right]) / 1e3
    axes.plot(shown, np.zeros(len(shown)), "kv", markersize=3, clip_on=False)
    axes.set(title=title, xlabel="x (km)", ylabel="depth (km)", xlim=(left / 1e3, right / 1e3), ylim=(depth / 1e3, 0))
    assert axes.figure is not None
    axes.figure.colorbar(image, ax=axes, label=label)


def sections(path: str | Path, mesh: Mesh2D, models: Mapping[str, Tensor], **options) -> None:
    """Save a figure of models below each other, with one scale. options: options of `section`."""
    figure = Figure((9, 2.8 * len(models)), layout="constrained")
    ranges = [_limits(model, 0.2) for model in models.values()]
    limits = min(low for low, _ in ranges), max(high for _, high in ranges)
    grid = figure.subplots(len(models), 1, squeeze=False)[:, 0]
    for axes, (title, model) in zip(grid, models.items(), strict=True):
        section(axes, mesh, model, title=title, **{"limits": limits, **options})
    figure.draw_without_rendering()  # makes the layout
    for axes in grid:
        axes.set_xlabel(f"x (km); vertical exaggeration {exaggeration(axes):.2g}")
    figure.savefig(path)


def exaggeration(axes: Axes) -> float:
    """How many times longer a kilometre of depth is drawn than one of the profile."""
    box, (left, right), (bottom, top) = axes.get_window_extent(), axes.get_xlim(), axes.get_ylim()
    return (box.height / abs(bottom - top)) / (box.width / (right - left))


def pseudosections(path: str | Path, data: Data, response: Tensor | None = None, name: str = "observed") -> None:
    """Data over the profile and frequencies, under a name; with a response, that, as computed, and the weighted
    residuals beside them."""
    shown = [(name, data.values)]
    if response is not None:
        response = response.view(data.shape)
        shown += [("computed", response), ("residual / error", (data.values - response) / data.errors)]
    rows = [(i, k) for i in range(len(data.modes)) for k in range(2)]
    order, upwards = np.argsort(data.sites), np.argsort(data.frequencies)  # low frequencies see deep
    x = _edges(np.array(data.sites)[order] / 1e3, 1.0)
    y = 10 ** _edges(np.log10(np.array(data.frequencies)[upwards]), 1.0)
    figure = Figure((4.2 * len(shown), 2.4 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), len(shown), squeeze=False, sharex=True, sharey=True)
    for (i, k), line in zip(rows, grid, strict=True):
        label, least = QUANTITIES["tipper" if data.modes[i] == "tipper" else data.outputs][k]
        used = data.mask[i, :, :, k] > 0
        limits = _limits(data.values[i, :, :, k][used], least)
        for axes, (title, values) in zip(line, shown, strict=True):
            is_data = not title.startswith("residual")
            low, high = limits if is_data else (-3, 3)
            cells = values[i, :, :, k].where(used, float("nan")).numpy()[upwards][:, order]
            image = axes.pcolormesh(x, y, cells, vmin=low, vmax=high, cmap="turbo_r" if is_data and k == 0 else "turbo"
                                    if is_data else "RdBu", rasterized=True)  # fmt: skip
            axes.set(title=f"{data.modes[i]}, {title}", xlabel="x (km)", ylabel="frequency (Hz)", yscale="log")
            axes.label_outer()
            figure.colorbar(image, ax=axes, label=label if is_data else title)
    figure.savefig(path)


def _edges(centres: np.ndarray, alone: float) -> np.ndarray:
    """Half-way between centres, in order; the outer cells are as wide as their neighbours. alone: width of one."""
    if len(centres) == 1:
        return centres[0] + alone * np.array([-0.5, 0.5])
    between = (centres[1:] + centres[:-1]) / 2
    return np.concatenate([[2 * centres[0] - between[0]], between, [2 * centres[-1] - between[-1]]])


def _limits(values: Tensor, least: float) -> tuple[float, float]:
    """From the lowest to the highest, `least` apart or more."""
    if not values.numel():
        return 0.0, least or 1.0
    low, high = float(values.min()), float(values.max())
    more = max(least - (high - low), 0.0) / 2
    return low - more, high + more


def fits(path: str | Path, data: Data, response: Tensor, most: int = 6) -> None:
    """Curves of some sites: data with error bars, and the response; tippers on axes of their own."""
    response = response.view(data.shape)
    places = np.unique(np.linspace(0, len(data.sites) - 1, min(most, len(data.sites))).astype(int))
    electric = [i for i, mode in enumerate(data.modes) if mode != "tipper"]
    tippers = [i for i, mode in enumerate(data.modes) if mode == "tipper"]
    kinds = [(name, modes) for name, modes in ((data.outputs, electric), ("tipper", tippers)) if modes]
    rows = [(QUANTITIES[name][k][0], k, modes) for name, modes in kinds for k in range(2)]
    figure = Figure((2.6 * len(places), 2.5 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), len(places), squeeze=False, sharex=True)
    periods = 1 / np.array(data.frequencies)
    for column, site in enumerate(places):
        for (label, k, modes), axes in zip(rows, grid[:, column], strict=True):
            for i in modes:
                used = (data.mask[i, :, site, k] > 0).numpy()
                values, errors = data.values[i, :, site, k].numpy(), data.errors[i, :, site, k].numpy()
                axes.errorbar(periods[used], values[used], errors[used], fmt=".", color=f"C{i}", label=data.modes[i])
                axes.plot(periods, response[i, :, site, k].numpy(), color=f"C{i}")
            axes.set(xscale="log", ylabel=label if column == 0 else "")
        grid[0, column].set_title(f"x = {data.sites[site] / 1e3:.3g} km")
        grid[-1, column].set_xlabel("period (s)")
    for axes in grid[::2, 0]:
        axes.legend()
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
