"""What steps and functions have in common: a plan that runs on a cluster, and what one can ask of it."""

from __future__ import annotations

import torch

from tutti import compat
from tutti.analysis.passes import check_level
from tutti.exec.executor import Executor
from tutti.exec.kernels.gradual import AUTO, COMPILED, planned
from tutti.hardware import Cluster
from tutti.ir.step_graph import StepGraph
from tutti.lower.program import Collective, Program
from tutti.plan.layouts.layout import devices
from tutti.plan.plan import Plan
from tutti.sim.planning import Simulator


class Planned:
    """A graph and its plan on a cluster, for the example arguments."""

    cluster: Cluster
    level: str
    _plan: Plan
    _planned_graph: StepGraph

    @property
    def _executor(self) -> Executor:
        raise NotImplementedError

    def _settle(self, level: str, device: torch.device, compiles: bool = False) -> None:
        """Set the level of optimization. compiles: whether level "auto" is the compiled one, as on a GPU."""
        check_level(level, AUTO)
        self.level = COMPILED if level == AUTO and (device.type != "cpu" or compiles) else level
        if self.level not in ("O0", AUTO):
            compat.get_compiler_ready(device)

    def _check_size(self, plan: Plan) -> None:
        """Raise ValueError for a plan for another number of devices."""
        if devices(plan.mesh) != self.cluster.size:
            raise ValueError(f"the plan is for {devices(plan.mesh)} devices, {self.cluster} has {self.cluster.size}")

    @property
    def plan(self) -> Plan:
        """The plan for the example arguments, with its prediction. A plan that was not searched for this cluster is
        simulated now."""
        if self._plan.prediction is None or self._plan.cluster != str(self.cluster):
            prediction = Simulator(planned(self.level))(self._planned_graph, self._plan, self.cluster)
            self._plan = self._plan.replace(prediction=prediction, cluster=str(self.cluster))
        return self._plan

    @property
    def program(self) -> Program:
        """The Program of this rank for the example arguments (with accumulation: for one microbatch).

        Raises ValueError for a pipeline, which has one for each part.
        """
        if self._plan.stages:
            raise ValueError("a pipeline runs a Program for each part of its stages, and so has no single one")
        return self._executor.first.programs[0]

    def collectives(self) -> list[Collective]:
        """The collectives of this rank in one run of each of its programs, for the example arguments: (kind, axis,
        bytes sent, label).

        With accumulation, the program of a microbatch counts once. In a pipeline, messages to other stages count, too.
        """
        return self._executor.collectives()
