"""SchNet learns the forces of Lennard-Jones argon from simulations with them; `tutti md` then simulates with SchNet.

    python runs/md_schnet.py            # two minutes: the network in out/md_schnet
    tutti md runs/md_schnet.toml        # the liquid with it, at constant energy

States that are hotter and denser than the liquid of interest show the network atoms that are close to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from support import options

from tutti.science.mol.config import MDConfig, RunTable, SystemTable
from tutti.science.mol.dynamics import Simulation
from tutti.science.mol.networks import Fit, Samples, SchNet, Structure, Training, fit, save

LIQUID = (94.4, 1.374)  # kelvin, g/cm^3, as Rahman (1964) simulated it
STATES = (LIQUID, LIQUID, (140.0, 1.2), (140.0, 1.5), (250.0, 1.374), (600.0, 1.5))
CUTOFF = 8.5125  # angstrom, that of `kind = "argon"`


def argon(state: tuple[float, float], atoms: int, seed: int) -> Simulation:
    """Argon with Lennard-Jones forces at constant temperature, not yet in equilibrium."""
    temperature, density = state
    run = RunTable(steps=1, dt=0.002, temperature=temperature, ensemble="nvt", seed=seed)
    config = MDConfig(SystemTable("argon", atoms=atoms, density=density), run)
    return config.simulation(*config.build(Path())).thermalize(2 * temperature)


def samples(states: Sequence[tuple[float, float]], frames: int, seed: int) -> list[Structure]:
    """So many configurations of each state, 0.2 ps apart."""
    callback = Samples(100, CUTOFF)
    for k, state in enumerate(states):
        argon(state, 32, seed + k).run(1000).run(100 * frames, [callback])
    return callback.structures


def train(frames: int, steps: int) -> tuple[SchNet, Fit]:
    """A network, and its errors on configurations of the liquid from other runs."""
    torch.manual_seed(0)
    network = SchNet(features=32, interactions=2, gaussians=40, cutoff=CUTOFF)
    how = Training(steps=steps, batch=4, rate=3e-3)
    return network, fit(network, samples(STATES, frames, 0), samples([LIQUID], 20, 100), how, level="O0")


def main(argv: list[str] | None = None) -> Fit:
    run = options(__doc__, "out/md_schnet", argv, training=False)
    torch.set_num_threads(1)
    network, found = train(4, 20) if run.quick else train(40, 2500)
    save(network, run.out)
    assert found.errors is not None
    print(f"forces of the liquid: RMS error {1e3 * found.errors.force_rmse:.2f} meV/angstrom; wrote {run.out}")
    return found


if __name__ == "__main__":
    main()
