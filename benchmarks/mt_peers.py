"""Contenders of `mt.py`: one library models one case, in a virtual environment of its own (`harness.Peer`).

    python mt_peers.py LIBRARY CASE

CASE is a file of JSON: x_edges, z_edges (m, downwards), air (thicknesses upwards), frequencies, sites, sections (log10
ohm-m by name). Reads [what, mode, section], a line of JSON, and answers with numbers: of "response" the apparent
resistivities and phases (frequency, site, 2), of "forward" and "jacobian" [seconds], of "rows" the seconds that a
Jacobian would take by products with its transpose, from some of them.
"""

import json
import os
import sys
import time
import warnings
from pathlib import Path

if sys.argv[1:2] and sys.argv[1].startswith("simpeg"):
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # its fastest: products are small, and more threads wait by spinning

import numpy as np

ROWS = 2  # products that are measured


def main(library: str, case: dict) -> None:
    answers = os.fdopen(os.dup(1), "w")  # libraries print to stdout
    os.dup2(2, 1)
    ask = LIBRARIES[library](case)
    for line in sys.stdin:
        print(json.dumps(ask(*json.loads(line))), file=answers, flush=True)


def tutti(case: dict, solver: str = "splu"):
    import torch

    from tutti.science.em.mt import MT2D, Mesh2D

    if solver == "block":
        torch.set_num_threads(1)  # on a busy machine threads of small products wait for one another
    mesh = Mesh2D(case["x_edges"], case["z_edges"])
    problems = {
        mode: MT2D(mesh, case["frequencies"], case["sites"], mode, solver=solver, threads=os.cpu_count())
        for mode in ("TE", "TM")
    }
    sections = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in case["sections"].items()}

    def ask(what: str, mode: str, section: str) -> list[float]:
        problem, log_rho = problems[mode], sections[section]
        if what == "response":
            d = problem(log_rho).view(problem.shape)[0]
            return torch.stack([10 ** d[..., 0], d[..., 1]], -1).flatten().tolist()
        begin = time.perf_counter()
        if what == "forward":
            problem(log_rho)
        else:
            problem.jacobian(log_rho)
        return [time.perf_counter() - begin]

    return ask


# The ordering that is fastest here; SimPEG's default is SuperLU's own, COLAMD.
MMD = {"permc_spec": "MMD_AT_PLUS_A", "diag_pivot_thresh": 0.0, "options": {"SymmetricMode": True}}


def simpeg(case: dict, options: dict):
    """TM is its `Simulation2DElectricField` (E in the plane), TE its `Simulation2DMagneticField`."""
    warnings.simplefilter("ignore")
    import discretize
    from simpeg import maps
    from simpeg.electromagnetics import natural_source as nsem

    dx, dz = np.diff(case["x_edges"]), np.diff(case["z_edges"])
    # y of its meshes is upwards
    earth = discretize.TensorMesh([dx, dz[::-1]], origin=[case["x_edges"][0], -dz.sum()])
    both = discretize.TensorMesh([dx, np.r_[dz[::-1], case["air"]]], origin=[case["x_edges"][0], -dz.sum()])
    below = both.cell_centers[:, 1] < 0
    at = np.c_[case["sites"], np.zeros(len(case["sites"]))]
    sections = {name: np.array(rows)[::-1].ravel() * np.log(10) for name, rows in case["sections"].items()}  # ln rho

    def survey(orientation: str):
        sources = [
            nsem.sources.Planewave([
                nsem.receivers.Impedance(at, orientation=orientation, component=component)
                for component in ("apparent_resistivity", "phase")
            ], f)
            for f in case["frequencies"]
        ]  # fmt: skip
        return nsem.survey.Survey(sources)

    def simulation(mode: str, solver_opts: dict):
        if mode == "TM":
            sigma = maps.ExpMap(nP=earth.n_cells)
            return nsem.Simulation2DElectricField(earth, survey=survey("xy"), sigmaMap=sigma, solver_opts=solver_opts)
        air = maps.InjectActiveCells(both, below, np.log(1e9))
        return nsem.Simulation2DMagneticField(
            both, survey=survey("yx"), rhoMap=maps.ExpMap(nP=both.n_cells) * air, solver_opts=solver_opts
        )

    def model(mode: str, section: str) -> np.ndarray:
        return -sections[section] if mode == "TM" else sections[section]

    def ask(what: str, mode: str, section: str) -> list[float]:
        m = model(mode, section)
        sim = simulation(mode, options)
        if what == "response":
            d = np.asarray(sim.dpred(m)).reshape(len(case["frequencies"]), 2, len(at))
            return (np.stack([d[:, 0], np.abs((d[:, 1] + 180) % 180)], -1)).ravel().tolist()
        begin = time.perf_counter()
        if what == "forward":
            sim.dpred(m)
            return [time.perf_counter() - begin]
        fields = sim.fields(m)
        if what == "jacobian":
            sim.getJ(m, f=fields)
            return [time.perf_counter() - begin]
        prepared = time.perf_counter() - begin
        begin = time.perf_counter()
        for row in np.random.default_rng(0).choice(sim.survey.nD, ROWS, replace=False):
            sim.Jtvec(m, np.eye(1, sim.survey.nD, row)[0], f=fields)
        each = (time.perf_counter() - begin) / ROWS
        return [prepared + each * sim.survey.nD]

    return ask


LIBRARIES = {
    "tutti": tutti,
    "tutti-block": lambda case: tutti(case, "block"),
    "simpeg": lambda case: simpeg(case, {}),
    "simpeg-mmd": lambda case: simpeg(case, MMD),
}

if __name__ == "__main__":
    main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))
