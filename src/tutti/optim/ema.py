"""Exponential moving averages of weights, kept with the optimizer's state."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from tutti.ir.kind import Kind, path_of
from tutti.optim.pure import PureOptimizer
from tutti.tracing.optimizers import check
from tutti.tracing.optimizers.marks import EMA, EMA_DECAY, check_marks, first_average
from tutti.tracing.optimizers.marks import averaged as average_of

T = TypeVar("T", bound=Optimizer)


def with_ema(optimizer: T, decay: float = 0.999) -> T:
    """Make an optimizer keep a moving average of each parameter that it updates, and return the optimizer.

        optimizer = tutti.optim.with_ema(torch.optim.AdamW(model.parameters()), decay=0.999)
        step = tutti.parallelize(model, optimizer, batch)
        ...
        model.load_state_dict(tutti.optim.ema_state_dict(step))

    The average is optimizer state with the name "ema": a <- decay a + (1 - decay) p after each update, starting with
    the parameter itself. It has the shape of the parameter and at least float32, is saved in checkpoints, and is
    sharded wherever the plan shards optimizer state. A skipped step does not change it. `step()` does the same as a
    captured step.

    decay: at least 0 and less than 1. An average over the last n updates has about 1 - 1 / n.

    To average some parameters only, set `"ema_decay"` in their group instead; plain `step()` of an optimizer of
    `torch.optim` ignores that key.

    Raises ValueError for another decay, and for an optimizer whose update cannot be captured.

    Polyak and Juditsky, "Acceleration of stochastic approximation by averaging" (1992).
    """
    check_marks({EMA_DECAY: decay})
    check(optimizer)
    for group in optimizer.param_groups:
        group[EMA_DECAY] = decay
    if not isinstance(optimizer, PureOptimizer):
        optimizer.register_step_pre_hook(_begin)
        optimizer.register_step_post_hook(_average)
    return optimizer


def ema_state_dict(step: Any) -> dict[str, Tensor]:
    """`step.state_dict()` with the averages in place of the parameters that have one: full CPU tensors.

    step: a `tutti.Step` of an optimizer with averages. An average has the dtype of its parameter here. Buffers are
    those of the last step. Every rank of a job must call it. Raises ValueError if there are no averages.
    """
    averages = _averages(step)
    names: dict[int, str] = {}
    tied = {name: names.setdefault(id(p), name) for name, p in step.model.named_parameters(remove_duplicate=False)}
    return {name: averages[tied[name]].to(value.dtype) if tied.get(name) in averages else value
            for name, value in step.state_dict().items()}  # fmt: skip


@contextmanager
def averaged(step: Any) -> Iterator[None]:
    """Within the block, a step has the averages as parameters: evaluate or export there, but do not train.

        with tutti.optim.averaged(step):
            loss = step.evaluate(batch)

    Every rank of a job must enter it. Raises ValueError if there are no averages, and RuntimeError for a step that was
    trained in the block.
    """
    averages, before = _averages(step), step.steps
    weights = {Kind.PARAM.at(name): step.store.whole(Kind.PARAM.at(name)) for name in averages}
    step.put({Kind.PARAM.at(name): value.to(weights[Kind.PARAM.at(name)].dtype) for name, value in averages.items()})
    try:
        yield
        if step.steps != before:
            raise RuntimeError("the step was trained while it had the averages as parameters; train outside of the "
                               "block of tutti.optim.averaged")  # fmt: skip
    finally:
        step.put(weights)


def restart_averages(step: Any) -> None:
    """Let averages go on from the parameters, after values without averages were loaded into a step."""
    averages = _averages(step)
    step.put({f"{EMA}:{name}": step.store.whole(Kind.PARAM.at(name)).to(x.dtype) for name, x in averages.items()})


def _averages(step: Any) -> dict[str, Tensor]:
    step.put({})  # what the user has written
    names = [path_of(name) for name in step.store.tensors if name.startswith(f"{EMA}:")]
    if not names:
        raise ValueError("the step keeps no averages: wrap its optimizer in tutti.optim.with_ema before "
                         "tutti.parallelize")  # fmt: skip
    return {name: step.store.whole(f"{EMA}:{name}") for name in names}


@torch.no_grad()
def _begin(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Remember parameters without an average. It must not be in `optimizer.state` yet: optimizers of torch.optim
    initialize the state of a parameter only while it is empty."""
    for group in optimizer.param_groups:
        for p in group["params"] if group.get(EMA_DECAY) is not None else ():
            if p.requires_grad and EMA not in optimizer.state.get(p, {}):
                _FIRST[id(p)] = first_average(p.detach())


@torch.no_grad()
def _average(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"] if group.get(EMA_DECAY) is not None else ():
            first = _FIRST.pop(id(p), None)
            if p.grad is not None:
                state = optimizer.state[p]
                state[EMA] = average_of(group[EMA_DECAY], state.get(EMA, first), p.detach())


_FIRST: dict[int, Tensor] = {}  # between the two hooks of a step
for _hook in (_begin, _average):
    _hook.captured = True
