"""SchNet and PaiNN on CPUs: filters in tables and C++ kernels against SchNetPack 2.1.1 with the same weights.

Energies and forces of aspirin, 21 atoms, 128 features, 50 Gaussians (PaiNN 20), cutoff 5 angstrom; edges are given.
Contenders take turns, each with one thread and with all; ratios are of the fastest of each, medians over rounds.
`force_error`: relative, against SchNetPack in float64; SchNetPack's own is that of float32.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from typing import Any

import harness

PACKAGES = (
    "schnetpack==2.1.1", "pytorch-lightning==2.6.6", "lightning-utilities==0.15.3", "torchmetrics==1.9.0",
    "hydra-core==1.3.8", "omegaconf", "antlr4-python3-runtime==4.9.*", "matscipy==1.3.1", "dirsync", "torch-ema==0.3",
    "fasteners", "progressbar2", "python-utils", "rich", "hydra-colorlog==1.2.0", "colorlog", "tensorboardX",
    "protobuf",
)  # fmt: skip


@dataclass
class Case:
    """One library with one network, batch and number of threads."""

    name: str
    peer: harness.Peer
    kind: str
    interactions: int
    structures: int
    threads: int

    def turn(self, steps: int) -> list[float]:
        return self.peer.ask([self.kind, self.interactions, self.structures, self.threads, steps])

    def close(self) -> None: ...


def run(quick: bool) -> dict[str, Any]:
    cores = os.cpu_count() or 1
    rounds, calls = (2, {1: 20, 64: 2}) if quick else (7, {1: 80, 64: 4})
    cases: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        theirs = harness.Beside("schnetpack", PACKAGES, {}, "mol_schnet_peers.py", "schnetpack", folder)
        theirs.ask(["schnet", 3, 1, 1, 1])  # its weights are written then
        peers = {"schnetpack": theirs} | {
            name: harness.Peer(name, (), "mol_schnet_peers.py", name, folder) for name in ("tables", "plain")
        }
        for kind, interactions in (("schnet", 3), ("schnet", 6), ("painn", 3)):
            for structures in (1, 64):
                name = f"{kind}, n={interactions}, B={structures}"
                harness.say(name)
                contenders = [
                    Case(f"{library}, {threads} threads", peer, kind, interactions, structures, threads)
                    for library, peer in peers.items() for threads in sorted({1, cores})
                ]  # fmt: skip
                times = harness.take_turns(contenders, rounds, calls[structures], max(2, calls[structures] // 5))
                chosen = {library: [x for x in times if x.startswith(library)] for library in peers}
                errors = {library: peer.ask([kind, interactions, structures, 1, 0]) for library, peer in peers.items()}
                cases[name] = {
                    "ms": {x: harness.summary(turns)["median"] * 1e3 for x, turns in times.items()},
                    "times_schnetpack": harness.ratio(times, chosen["tables"], chosen["schnetpack"]),
                    "plain_times_schnetpack": harness.ratio(times, chosen["plain"], chosen["schnetpack"]),
                    "force_error": {library: error for library, (error, _) in errors.items()},
                    "edges": errors["tables"][1],
                }  # fmt: skip
        for peer in peers.values():
            peer.close()
    ratios = {name: x["times_schnetpack"]["times_faster"] for name, x in cases.items()}
    schnet, painn = ([x for name, x in ratios.items() if name.startswith(kind)] for kind in ("schnet", "painn"))
    return {"schnet_least_times_schnetpack": min(schnet), "schnet_most_times_schnetpack": max(schnet),
            "painn_least_times_schnetpack": min(painn), "painn_most_times_schnetpack": max(painn),
            "largest_force_error": max(x["force_error"]["tables"] for x in cases.values()), "cases": cases}  # fmt: skip


if __name__ == "__main__":
    harness.main(run, __file__)
