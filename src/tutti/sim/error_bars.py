"""How far predictions are from what was measured: shares of the predicted time and memory.

The residuals of benchmarks/published.py, published training runs on the GPUs of `tutti.hardware.presets`: two thirds of
the runs lie within. They hold for these presets; a calibrated cluster has none.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

from tutti.hardware import Cluster
from tutti.hardware.reached import SOURCE
from tutti.ir.step_graph import StepGraph
from tutti.sim.step import DryRun

DENSE, EXPERTS, MEMORY = "dense", "mixture of experts", "memory"
ERROR_BARS = {DENSE: 0.14, EXPERTS: 0.22, MEMORY: 0.21}
ROUTED = ("tutti::experts", "tutti::grouped_mm")
SHARE = 2 / 3  # of the runs


def error_bar(what: str, cluster: Cluster) -> float | None:
    """The share that a prediction of this kind may be off, or None if nothing is known of these devices."""
    return ERROR_BARS[what] if SOURCE in cluster.device.source else None


def spread(what: str, cluster: Cluster) -> str:
    """The error bar as text behind a figure: " ± 18 %", or nothing."""
    return plus_minus(error_bar(what, cluster))


def plus_minus(error: float | None) -> str:
    """An error bar as text behind a figure: " ± 18 %", or nothing."""
    return f" ± {100 * error:.0f} %" if error else ""


def kind_of(step: DryRun | StepGraph) -> str:
    """Whether a step routes tokens to experts."""
    graphs = [part.program.graph for part in step.parts] if isinstance(step, DryRun) else [step.graph]
    schemas = (getattr(node.target, "_schema", None) for graph in graphs for node in graph.nodes)
    return EXPERTS if any(schema and schema.name.startswith(ROUTED) for schema in schemas) else DENSE


def within(errors: Iterable[float]) -> float:
    """The smallest error that `SHARE` of the errors stay within."""
    ordered = sorted(errors)
    return ordered[ceil(SHARE * len(ordered)) - 1]
