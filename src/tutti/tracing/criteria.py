"""Modules of the loss function: a criterion with buffers or trained parameters is state of the step, like the model.

    criterion = ArcFace(...)                                    # in a variable, a list, a dict, an object
    optimizer = AdamW([*model.parameters(), *criterion.parameters()])
    step = tutti.parallelize(model, optimizer, batch, loss=lambda m, b: criterion(m(b["x"]), b["y"]))

Its tensors are called `loss.0.name`; those of the model keep their names.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from tutti.tracing.trace.snapshot import LARGEST, OPAQUE, is_library, is_of_the_system
from tutti.tracing.trace.watch import names_of_globals

DEEPEST = 4  # containers and objects between the loss and a module
PREFIX = "loss"


class WithCriteria(nn.Module):
    """A model and the criteria of its loss as one module. The model's tensors and modules keep their names."""

    def __init__(self, model: nn.Module, criteria: list[nn.Module]):
        super().__init__()
        self.__dict__["model"] = model  # not a submodule, which would rename its tensors
        self.loss = nn.ModuleList(criteria)

    def named_modules(self, memo: set | None = None, prefix: str = "", remove_duplicate: bool = True
                      ) -> Iterator[tuple[str, nn.Module]]:  # fmt: skip
        memo = set() if memo is None else memo
        yield from self.model.named_modules(memo, prefix, remove_duplicate)
        for i, criterion in enumerate(self.loss):
            place = f"{PREFIX}.{i}"
            yield from criterion.named_modules(memo, f"{prefix}.{place}" if prefix else place, remove_duplicate)

    def train(self, mode: bool = True) -> WithCriteria:
        """Set the mode of the model. Criteria keep theirs, as in a loop that calls `model.train()`."""
        self.model.train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["model"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def model_of(module: nn.Module) -> nn.Module:
    """The user's model."""
    return module.model if isinstance(module, WithCriteria) else module


def with_criteria(model: nn.Module, loss: Any, optimizer: torch.optim.Optimizer) -> nn.Module:
    """The model, with the modules of its loss that a step changes: those with buffers in training mode, or with
    parameters in the optimizer. Others, as a frozen teacher, are constants of the step."""
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    inside = {id(module) for module in model.modules()}
    names = {name.partition(".")[0] for name, _ in (*model.named_parameters(), *model.named_buffers())}

    def changes(module: nn.Module) -> bool:
        written = module.training and next(module.buffers(), None) is not None
        return written or any(id(p) in trained for p in module.parameters())

    criteria = [x for x in dict.fromkeys(_modules(loss, model, inside, set(), DEEPEST)) if changes(x)]
    if criteria and PREFIX in names:
        raise ValueError(
            f"the loss has modules with state, called {PREFIX}.N, but the model has {PREFIX!r} itself: give "
            "nn.ModuleList([model, criterion]) as the model, and a loss that takes it"
        )
    return WithCriteria(model, criteria) if criteria else model


def _modules(x: Any, model: nn.Module, inside: set[int], seen: set[int], depth: int) -> Iterator[nn.Module]:
    """The outermost modules that a function or an object refers to, other than the model and what is in it."""
    if id(x) in seen or id(x) in inside or depth < 0:
        return
    seen.add(id(x))
    if isinstance(x, nn.Module):
        if any(module is model for module in x.modules()):  # it holds the model too
            children: list[Any] = list(x.children())
        else:
            yield x
            return
    elif isinstance(x, FunctionType):
        cells = (cell.cell_contents for cell in x.__closure__ or () if _filled(cell))
        children = [*cells, *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
        if not is_library(str(x.__module__)):
            children += [x.__globals__[name] for name in names_of_globals(x.__code__) & x.__globals__.keys()]
    elif isinstance(x, MethodType):
        children = [x.__self__, x.__func__]
    elif isinstance(x, partial):
        children = [x.func, *x.args, *x.keywords.values()]
    elif isinstance(x, (list, tuple, set, dict)):
        children = list(x.values() if isinstance(x, dict) else x) if len(x) <= LARGEST else []
    elif isinstance(x, (*OPAQUE, torch.optim.Optimizer)) or is_of_the_system(x):
        children = []
    else:
        children = list(getattr(x, "__dict__", {}).values())
        children += [vars(base)["__call__"] for base in type(x).__mro__ if "__call__" in vars(base)][:1]
    for child in children:
        yield from _modules(child, model, inside, seen, depth - 1)


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # the variable is not assigned yet
        return False
