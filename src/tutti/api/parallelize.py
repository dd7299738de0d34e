"""`step = tutti.parallelize(model, optimizer, batch)`: lift a training step to a cluster."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from tutti.api.step import Step
from tutti.exec.parallel_config import ParallelConfig
from tutti.hardware import Cluster
from tutti.keywords import names_nearest
from tutti.launch.heartbeat import HEARTBEAT
from tutti.launch.progress import progress
from tutti.plan.layouts.layout import Mesh
from tutti.plan.layouts.pin import Pin
from tutti.plan.plan import Plan
from tutti.plan.search.search import BUDGET
from tutti.tracing.batch import Batch
from tutti.tracing.capture import Loss


@names_nearest
def parallelize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    loss: Loss | None = None,
    cluster: Cluster | str = "auto",
    plan: Plan | str | Path = "auto",
    level: str = "auto",
    clip_norm: float | None = None,
    accumulate: int | Literal["auto"] = 1,
    fp32_master_weights: bool = False,
    stochastic_rounding: bool = False,
    pins: Iterable[Pin] | None = (),
    mesh: Mesh | None = None,
    budget: float = BUDGET,
    recompute: Collection[str] = (),
    seed: int = 0,
    memory: float | str | None = None,
    folder: str | Path | None = None,
    max_nonfinite_steps: int | None = None,
    metrics: Mapping[str, str] | Iterable[str] = (),
) -> Step:
    """Lift a model written for one device to a cluster.

    The model and the optimizer stay the user's and are live: after any number of steps their parameters, buffers and
    state have the trained values, and what is written into them between steps takes effect. Tensors that the plan keeps
    whole on a rank are the user's own; others hold no memory until they are used (docs/concepts/live.md).

    model: any module on the CPU or one GPU, with initialized parameters.
    optimizer: a `torch.optim` instance over them. Learning rates are read at every step, so schedulers work.
    batch: an example of the *global* batch: a dict (keyword arguments of the model) or a tuple of tensors, arbitrarily
        nested. An entry whose dim 0 is not the batch size is shared by all rows. Entries that are not tensors, and
        values that the model's Python code reads from the batch, are constants of the captured step: a batch with other
        values triggers a recapture.
    loss: `loss(model, batch)` returns a 0-d tensor, or `(loss, metrics)`. By default the model's output has a `.loss`
        or is the loss.
    cluster: "auto" (the processes of this job, or one device), a `Cluster`, or its name ("cpu:4", "h100:16x8"). If it
        has more devices than the job has processes, they are virtual devices in this process.
    plan: "auto", a `Plan`, the path of one, or a textbook name ("dp", "tp", "zero3", "dp2xtp2").
    level: "O0" runs operator by operator, "O1" compiles fused kernels, "O2" compiles whole layers before the first
        step. "auto" begins with O0, compiles in another process after half a minute of steps, and goes on with O2 if
        it is faster; on a GPU, and with `memory`, it is O2. Levels round differently: give one of the others to compare
        runs bit for bit.
    clip_norm: maximum global gradient norm.
    accumulate: number of microbatches (equal parts of the batch) per update; "auto" uses as few as fit in memory.
    fp32_master_weights: keep and update float32 copies of low-precision parameters.
    stochastic_rounding: update bfloat16 parameters and their optimizer state in float32 and round at random, unbiased.
        It needs less memory than masters.
    pins: layouts of parameters that are fixed by hand (`tutti.pin`).
    mesh: the mesh, if it is fixed, outermost axis first: `{"dp": 2, "tp": 4}`. With `"experts": 8`, an axis `ep` of
        that part of dp that lets experts be spread over 8 of the devices of dp x tp.
    budget: nominal seconds of work, not wall time, after which the search returns the best plan so far.
    recompute: with a plan's name, what the backward pass recomputes: "layers" (activations inside layers), "attention",
        names of operators ("silu", "*norm*") or labels of a plan.
    seed: seed of all random numbers.
    memory: memory of each device, in bytes or as in "2GiB". A step that would exceed it raises MemoryError.
    folder: folder for files of tensors that the plan keeps on disk. The files are deleted with the step.
    max_nonfinite_steps: how many steps in a row may be skipped if their loss or gradients are not finite. One more
        raises an error that names the operator. None: do not check. The check costs the norm of the gradients, unless
        they are clipped anyway.
    metrics: entries of the model's output to keep in `step.metrics`. A mapping says how the values of microbatches are
        combined: "mean", "sum" or "gather" (along dim 0).

    Raises ValueError if arguments do not fit together (a batch that does not divide, a plan for another model or
    number of devices, an optimizer that is not supported), and MemoryError if `memory` is too small.

    If something that the forward pass reads changes later (modes, attributes, the set of trained parameters), the step
    captures the model again.
    """
    options = {name: value for name, value in locals().items() if name not in ("model", "optimizer", "batch")}
    _check_optimizer(optimizer)
    with HEARTBEAT.working("captures and plans the step"), progress("capturing the step"):
        return Step(model, optimizer, batch, ParallelConfig(**options))


def _check_optimizer(optimizer: Any) -> None:
    """Raise ValueError for what is no optimizer of torch."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        several = isinstance(optimizer, list | tuple | dict)
        instead = (
            "for several optimizers write the step as a function, tutti.function(f, *batch, store=tutti.Store("
            "model=..., a=..., b=...)) (docs/guide/functions.md), or use one optimizer with parameter groups"
        ) if several else "its update is captured"  # fmt: skip
        raise ValueError(f"the optimizer is a {kind}; it must be one of torch.optim: {instead}")
