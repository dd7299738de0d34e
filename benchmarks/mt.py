"""Magnetotelluric responses and Jacobians of a section: ours against SimPEG.

One case for all: the mesh of the released SAMTEX example (100 x 64 cells, 750 km x 84 km; TE with layers of air over
it), 20 frequencies, 36 sites, TE and TM, apparent resistivity and phase. Every contender runs in a process of its own
and they take turns (`mt_peers.py`). `tutti` solves by SuperLU in two threads, `tutti-block` by block elimination in
PyTorch in one. `simpeg` is SimPEG as it installs, `simpeg-mmd` with the ordering of unknowns that ours has, too;
both with one thread of OpenBLAS, which is faster: more spin while they wait.

- `forward`: seconds of a response in both modes.
- `jacobian`: seconds of a response and its 2880 x 6400 derivatives. SimPEG's getJ raises ValueError for TE (its
  Simulation2DMagneticField): there its time is fields and 1440 times the mean of two products with the transposed
  Jacobian; `jacobian TM` compares what both can.
- `layers`: largest errors over layers of 100, 10 and 1000 ohm-m against Wait's recursion. At 1 Hz the mesh is five skin
  depths deep; below, SimPEG asks for a deeper one: it has no impedance condition at the bottom.

The peer is installed in ~/.cache/tutti/peers.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from typing import Any

import torch

import harness
from tutti.science.em.mt import Mesh2D, layered
from tutti.science.em.mt.response.te import air_layers

SIMPEG = ("simpeg==0.25.2",)
OURS, PEERS = ("tutti", "tutti-block"), ("simpeg", "simpeg-mmd")
MODES = ("TE", "TM")
ROUNDS = 3
LAYERS, INTERFACES = (100.0, 10.0, 1000.0), (500.0, 2000.0)


def case(quick: bool) -> dict[str, Any]:
    mesh = Mesh2D.geometric(750e3) if not quick else Mesh2D.geometric(750e3, columns=40, rows=40, growth=1.25)
    count, sites = (20, 36) if not quick else (4, 8)
    interfaces = [min(mesh.z_edges, key=lambda z: abs(z - x)) for x in INTERFACES]
    rows = torch.bucketize(mesh.z, torch.tensor(interfaces, dtype=torch.float64))
    layers = torch.tensor(LAYERS, dtype=torch.float64)[rows].log10()[:, None].expand(mesh.shape)
    section = layers + 0.3 * torch.randn(mesh.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return {
        "x_edges": mesh.x_edges, "z_edges": mesh.z_edges, "air": air_layers(float(mesh.dz[0]), 1e5).tolist(),
        "frequencies": torch.logspace(-3, 2, count, dtype=torch.float64).tolist(), "interfaces": interfaces,
        "sites": torch.linspace(0, 750e3, sites, dtype=torch.float64).tolist(),
        "sections": {"layers": layers.tolist(), "section": section.tolist()},
    }  # fmt: skip


def errors(response: list[float], case: dict[str, Any]) -> dict[str, float]:
    """Errors of a response over layers: the largest, and at which frequency."""
    first, second = case["interfaces"]
    rho, phase = layered(LAYERS, [first, second - first], case["frequencies"])
    d = torch.tensor(response, dtype=torch.float64).view(len(rho), -1, 2)
    relative = (d[..., 0] / rho[:, None] - 1).abs().amax(1)
    return {
        "rho_percent": 100 * relative.max().item(),
        "phase_degrees": (d[..., 1] - phase[:, None]).abs().max().item(),
        "worst_frequency_hz": case["frequencies"][int(relative.argmax())],
        "rho_percent_from_1_hz": 100 * relative[torch.tensor(case["frequencies"]) >= 1].max().item(),
    }


def run(quick: bool) -> dict[str, Any]:
    of = case(quick)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(of, file)
        file.flush()
        running = {
            name: harness.Peer(name.partition("-")[0], SIMPEG if name in PEERS else (), "mt_peers.py", name, file.name)
            for name in (*OURS, *PEERS)
        }  # fmt: skip
        accuracy = {}
        for name, x in running.items():
            accuracy[name] = {mode: errors(x.ask(["response", mode, "layers"]), of) for mode in MODES}
            harness.say(f"{name}: {accuracy[name]}")
    seconds: dict[str, dict[str, list[float]]] = {}
    for i in range(2 if quick else ROUNDS):
        names = list(running)
        for name in names[i % len(names) :] + names[: i % len(names)]:
            ask = running[name].ask
            now = {f"forward {mode}": ask(["forward", mode, "section"])[0] for mode in MODES}
            now["jacobian TM"] = ask(["jacobian", "TM", "section"])[0]
            now["jacobian TE"] = ask(["rows" if name in PEERS else "jacobian", "TE", "section"])[0]
            now["forward"], now["jacobian"] = (
                sum(now[f"{what} {m}"] for m in MODES) for what in ("forward", "jacobian")
            )
            for what, took in now.items():
                seconds.setdefault(what, {}).setdefault(name, []).append(took)
            harness.say(f"round {i + 1}: {name} " + ", ".join(f"{what} {took:.2f} s" for what, took in now.items()))
    for x in running.values():
        x.close()
    medians = {what: {name: statistics.median(x) for name, x in by.items()} for what, by in seconds.items()}
    times = {
        what: {
            f"{ours} than {peer}": statistics.median(b / a for a, b in zip(by[ours], by[peer], strict=True))
            for ours in OURS
            for peer in PEERS
        }
        for what, by in seconds.items()
    }
    harness.say(f"times faster: {times}")
    shape = {"cells": [len(of["z_edges"]) - 1, len(of["x_edges"]) - 1], "air": len(of["air"]),
             "frequencies": len(of["frequencies"]), "sites": len(of["sites"])}  # fmt: skip
    notes = {"simpeg's jacobian TE": "fields and products by rows, extrapolated from two"}
    return {
        "case": shape,
        "seconds": medians,
        "times_faster": times,
        "layers": accuracy,
        "notes": notes,
    }


if __name__ == "__main__":
    harness.main(run, sys.argv[0])
