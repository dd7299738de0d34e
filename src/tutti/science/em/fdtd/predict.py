"""How long a run on several devices takes, and what it sends and holds, before it runs.

A step of n planes (own ones and halos, the most of any slab) with c nodes each takes n c shots / rate. Every `halo`
steps a process sends `halo` planes to each neighbour, which its slowest link takes latency + bytes / bandwidth for.

    prediction = predict(Grid((400, 400, 400), 0.01), 1000, 4, cluster=names.cluster("cpu:4"), cpml=CPML(10))
    prediction.seconds, prediction.bytes_per_step, prediction.memory, prediction.slabs, prediction.pays

Gradients take two loops more, with as many messages in each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil

import torch

from tutti.hardware import Cluster
from tutti.science.em.fdtd.grid import Grid
from tutti.science.em.fdtd.media.cpml import CPML, Lines
from tutti.science.em.fdtd.problem import state_numbers
from tutti.science.em.fdtd.simulation import Simulation
from tutti.science.em.fdtd.stepping.slabs import divided

HALOS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Prediction:
    """`seconds`: time of all steps; alone: their time on one device, in seconds. slabs: planes of each device; halo:
    planes of a halo.

    sent: bytes per step by device, on average. messages: messages per step of the device that sends most. memory: bytes
    of a device: fields of the largest slab with its halos, and permittivities of the whole grid, which all processes
    hold.
    """

    seconds: float
    alone: float
    slabs: tuple[int, ...]
    halo: int
    sent: tuple[float, ...]
    messages: float
    memory: int

    @property
    def bytes_per_step(self) -> float:
        """The bytes that the busiest device sends in a step."""
        return max(self.sent)

    @property
    def pays(self) -> bool:
        return self.seconds < self.alone


def plane_bytes(grid: Grid, lines: Sequence[Sequence[Lines]], low: int, high: int, size: int, poles: int = 0) -> int:
    """The bytes of the state in planes [low, high): fields, psi, J and P. size: bytes of a number; poles: number of
    poles that fill the grid."""
    present = [i in {grid.component(name) for name in grid.components} for i in range(6)]
    of_poles = 2 * poles * sum(present[:3]) * (high - low) * grid.array[1] * grid.array[2]
    return (state_numbers(grid.array, present, lines, low, high) + of_poles) * size


def predict(grid: Grid, steps: int, devices: int, *, cluster: Cluster | str, cpml: CPML | None = None,
            rate: float | None = None, halo: int | None = None, slabs: Sequence[int] = (),
            dtype: torch.dtype = torch.float32, shots: int = 1, poles: int = 0) -> Prediction:  # fmt: skip
    """The prediction of `steps` steps on so many devices of a cluster, or of the one of this name, such as "h100:4".

    rate: cells per second and step of a device; by default its memory's bandwidth over what a step reads and writes of
    a cell, which is the most it could be. halo: planes; by default what is fastest. slabs: planes of each device.
    Raises ValueError for more devices than the cluster or the planes of axis 0 have room for, and for slabs that do not
    divide these planes.
    """
    cluster = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    if not 1 <= devices <= cluster.size:
        raise ValueError(f"devices: from 1 to the {cluster.size} of {cluster}, not {devices}")
    if steps < 1:
        raise ValueError(f"steps: at least 1, not {steps}")
    lines, planes = Simulation(grid, cpml).lines, grid.array[0]
    size, cross = dtype.itemsize, grid.array[1] * grid.array[2] * shots
    fields, materials = len(grid.components), sum(name[0] == "E" for name in grid.components)
    rate = rate or cluster.device.bandwidth / ((2 * fields + materials + 4 * poles * materials) * size)
    alone = steps * planes * cross / rate
    state_bytes = materials * planes * grid.array[1] * grid.array[2] * size
    if devices == 1:
        return Prediction(alone, alone, (planes,), halo or 1, (0.0,), 0.0,
                          state_bytes + shots * plane_bytes(grid, lines, 0, planes, size, poles))  # fmt: skip
    link = cluster.link(1, devices)
    predictions: list[Prediction] = []
    error = None
    for k in HALOS if halo is None else (halo,):
        try:
            own = divided(planes, devices, k, slabs)
        except ValueError as refused:
            error = refused
            continue
        edges = [0, *accumulate(own)]
        exchanges, sent, most, memory = ceil(steps / k), [], 0, 0
        for rank in range(devices):
            low, high, messages = edges[rank], edges[rank + 1], []
            if rank:
                messages.append(plane_bytes(grid, lines, low, low + k, size, poles) * shots)
            if rank < devices - 1:
                messages.append(plane_bytes(grid, lines, high - k, high, size, poles) * shots)
            first, last = max(0, low - k), min(planes, high + k + 1)
            sent.append(sum(messages))
            most = max(most, last - first)
            memory = max(memory, plane_bytes(grid, lines, first, last, size, poles) * shots)
        number = min(2, devices - 1)
        seconds = steps * most * cross / rate + exchanges * link.seconds(max(sent), number)
        predictions.append(Prediction(seconds, alone, own, k, tuple(x * exchanges / steps for x in sent),
                                number * exchanges / steps, state_bytes + memory))  # fmt: skip
    if not predictions:
        assert error is not None
        raise error
    return min(predictions, key=lambda x: x.seconds)
