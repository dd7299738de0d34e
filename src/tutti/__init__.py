"""Lift a PyTorch model written for one device to any number of devices with one line."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tutti.check.user import rule as rule
    from tutti.cluster import Cluster as Cluster
    from tutti.cluster import register_device as register_device
    from tutti.graph.capture import capture as capture
    from tutti.graph.loop_capture import cond as cond
    from tutti.graph.loop_capture import scan as scan
    from tutti.graph.loop_capture import while_loop as while_loop
    from tutti.graph.optimizers import register_optimizer as register_optimizer
    from tutti.graph.pattern_table import register_pattern as register_pattern
    from tutti.graph.patterns import Pattern as Pattern
    from tutti.graph.step_graph import StepGraph as StepGraph
    from tutti.plan.layout import Layout as Layout
    from tutti.plan.pin import pin as pin
    from tutti.plan.plan import Plan as Plan
    from tutti.plan.random import random_plan as random_plan
    from tutti.plan.schedule import register_schedule as register_schedule
    from tutti.plan.slots import Slot as Slot
    from tutti.run.checkpoint.checkpoints import Checkpoints as Checkpoints
    from tutti.run.function import Function as Function
    from tutti.run.function import function as function
    from tutti.run.function import functions as functions
    from tutti.run.jit import jit as jit
    from tutti.run.step import Step as Step
    from tutti.run.step import parallelize as parallelize
    from tutti.run.store import Store as Store
    from tutti.run.watchdog import Watchdog as Watchdog

# Public name -> its module, imported on first use: `tutti --help` need not wait for torch.
NAMES = {
    "Checkpoints": "tutti.run.checkpoint.checkpoints",
    "Cluster": "tutti.cluster",
    "Function": "tutti.run.function",
    "Layout": "tutti.plan.layout",
    "Pattern": "tutti.graph.patterns",
    "Plan": "tutti.plan.plan",
    "Slot": "tutti.plan.slots",
    "Step": "tutti.run.step",
    "Store": "tutti.run.store",
    "StepGraph": "tutti.graph.step_graph",
    "Watchdog": "tutti.run.watchdog",
    "capture": "tutti.graph.capture",
    "cond": "tutti.graph.loop_capture",
    "function": "tutti.run.function",
    "functions": "tutti.run.function",
    "jit": "tutti.run.jit",
    "parallelize": "tutti.run.step",
    "pin": "tutti.plan.pin",
    "random_plan": "tutti.plan.random",
    "register_device": "tutti.cluster",
    "register_optimizer": "tutti.graph.optimizers",
    "register_pattern": "tutti.graph.pattern_table",
    "register_schedule": "tutti.plan.schedule",
    "rule": "tutti.check.user",
    "scan": "tutti.graph.loop_capture",
    "while_loop": "tutti.graph.loop_capture",
}


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module 'tutti' has no attribute {name!r}")
    value = getattr(import_module(NAMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(NAMES)
