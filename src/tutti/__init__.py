"""Lift a PyTorch model written for one device to any number of devices with one line."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from tutti.extras import extra

if TYPE_CHECKING:
    from tutti import optim as optim
    from tutti.api.builders import decode as decode
    from tutti.api.builders import forward as forward
    from tutti.api.builders import prefill as prefill
    from tutti.api.builders import train_step as train_step
    from tutti.api.function import Function as Function
    from tutti.api.function import function as function
    from tutti.api.function import functions as functions
    from tutti.api.jit import jit as jit
    from tutti.api.parallelize import parallelize as parallelize
    from tutti.api.step import Step as Step
    from tutti.api.store import Store as Store
    from tutti.check.user import rule as rule
    from tutti.checkpoint.checkpoints import Checkpoints as Checkpoints
    from tutti.compress import compress as compress
    from tutti.hardware import Cluster as Cluster
    from tutti.hardware import register_device as register_device
    from tutti.ir.step_graph import StepGraph as StepGraph
    from tutti.launch.watchdog import Watchdog as Watchdog
    from tutti.plan.layouts.layout import Layout as Layout
    from tutti.plan.layouts.pin import pin as pin
    from tutti.plan.pipeline.schedule import register_schedule as register_schedule
    from tutti.plan.pipeline.slots import Slot as Slot
    from tutti.plan.plan import Plan as Plan
    from tutti.plan.random import random_plan as random_plan
    from tutti.tracing.capture import capture as capture
    from tutti.tracing.optimizers import register_optimizer as register_optimizer
    from tutti.tracing.rewrite.pattern_table import register_pattern as register_pattern
    from tutti.tracing.rewrite.patterns import Pattern as Pattern
    from tutti.tracing.trace.loop_capture import cond as cond
    from tutti.tracing.trace.loop_capture import scan as scan
    from tutti.tracing.trace.loop_capture import while_loop as while_loop
    from tutti.train.pipeline import pipeline as pipeline
    from tutti.train.trainer.arguments import TrainingArguments as TrainingArguments
    from tutti.train.trainer.trainer import Trainer as Trainer

# Public name -> its module, imported on first use: `tutti --help` need not wait for torch.
NAMES = {
    "Checkpoints": "tutti.checkpoint.checkpoints",
    "Cluster": "tutti.hardware",
    "Function": "tutti.api.function",
    "Layout": "tutti.plan.layouts.layout",
    "Pattern": "tutti.tracing.rewrite.patterns",
    "Plan": "tutti.plan.plan",
    "Slot": "tutti.plan.pipeline.slots",
    "Step": "tutti.api.step",
    "Store": "tutti.api.store",
    "StepGraph": "tutti.ir.step_graph",
    "Trainer": "tutti.train.trainer.trainer",
    "TrainingArguments": "tutti.train.trainer.arguments",
    "Watchdog": "tutti.launch.watchdog",
    "capture": "tutti.tracing.capture",
    "cond": "tutti.tracing.trace.loop_capture",
    "decode": "tutti.api.builders",
    "forward": "tutti.api.builders",
    "function": "tutti.api.function",
    "functions": "tutti.api.function",
    "jit": "tutti.api.jit",
    "parallelize": "tutti.api.parallelize",
    "pin": "tutti.plan.layouts.pin",
    "pipeline": "tutti.train.pipeline",
    "prefill": "tutti.api.builders",
    "random_plan": "tutti.plan.random",
    "register_device": "tutti.hardware",
    "register_optimizer": "tutti.tracing.optimizers",
    "register_pattern": "tutti.tracing.rewrite.pattern_table",
    "register_schedule": "tutti.plan.pipeline.schedule",
    "rule": "tutti.check.user",
    "scan": "tutti.tracing.trace.loop_capture",
    "train_step": "tutti.api.builders",
    "while_loop": "tutti.tracing.trace.loop_capture",
}


PACKAGES = ("compress", "optim")  # public packages, imported on first use


__all__ = [*NAMES, *PACKAGES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("tutti")
    if name in PACKAGES:
        return import_module(f"tutti.{name}")
    if name not in NAMES:
        raise AttributeError(f"module 'tutti' has no attribute {name!r}")
    with extra("train"):
        value = getattr(import_module(NAMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted((*NAMES, *PACKAGES))
