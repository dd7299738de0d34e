"""The objects that functions share (modules, optimizers, plain tensors), and the names of their tensors.

| object | inputs of a graph |
|---|---|
| module `g` | `param:g.path`, `buffer:g.path` |
| optimizer | `exp_avg:g.path` and the like, by the names of its parameters |
| any other `c` | `cache:c.path` for each tensor in it, through lists, dicts and attributes of objects |
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tutti.ir.kind import Kind, kind_of
from tutti.tracing import optimizers
from tutti.tracing.trace.slots import Slots, attribute
from tutti.tracing.trace.snapshot import OPAQUE, is_of_the_system

DEEPEST = 8  # containers within containers


@dataclass(frozen=True)
class TensorPlace:
    """The place of a plain tensor: `container[key]`, or the attribute `key` of an object's `__dict__`."""

    container: Any
    key: Any
    name: str

    @property
    def tensor(self) -> Any:
        return self.container[self.key]


class Holdings:
    """The objects that functions share, by name.

    Raises ValueError for a parameter that two optimizers update or that is in no module, and for a tensor in a tuple.
    """

    def __init__(self, objects: Mapping[str, Any], fp32_master_weights: bool = False):
        self.objects, self.fp32_master_weights = dict(objects), fp32_master_weights
        self.modules = {name: x for name, x in objects.items() if isinstance(x, nn.Module)}
        self.optimizers = {name: x for name, x in objects.items() if isinstance(x, torch.optim.Optimizer)}
        self.root = nn.Module()
        for name, module in self.modules.items():
            self.root.add_module(name, module)
        self.params = dict(self.root.named_parameters())
        names = {p: name for name, p in self.params.items()}
        self.groups = groups_of(self.optimizers.values())
        self.optimizer_of: dict[str, str] = {}  # by parameter name
        for key, optimizer in self.optimizers.items():
            optimizers.check(optimizer)
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                if p not in names:
                    raise ValueError(
                        f"optimizer {key!r} updates a parameter of shape {tuple(p.shape)} that no module of the store "
                        f"has; add the module to the store, which has {list(self.modules)}"
                    )
                if names[p] in self.optimizer_of:
                    raise ValueError(f"{self.optimizer_of[names[p]]!r} and {key!r} both update parameter {names[p]!r}")
                self.optimizer_of[names[p]] = key
        self.places: list[TensorPlace] = []
        for name, x in objects.items():
            if name not in self.modules and name not in self.optimizers:
                if isinstance(x, torch.Tensor):
                    raise ValueError(
                        f"{name!r} is a tensor; put it in a list or dict, so that functions can replace it"
                    )
                places = list(_places(name, x, set(), 0))
                if not places:
                    raise ValueError(f"{name!r} is a {type(x).__name__} without a tensor: the store holds tensors")
                self.places += places

    def slots(self, attributes: frozenset[str]) -> Slots:
        """attributes: paths of plain tensor attributes of modules that are state."""
        return Slots(self.root, attributes)

    def tensors(self, attributes: frozenset[str] = frozenset()) -> dict[str, torch.Tensor]:
        """Return all tensors of modules and plain objects, by the names of inputs."""
        named: dict[str, torch.Tensor] = {Kind.PARAM.at(name): p for name, p in self.root.named_parameters()}
        named |= {Kind.BUFFER.at(name): x for name, x in self.root.named_buffers()}
        named |= {Kind.BUFFER.at(path): attribute(self.root, path) for path in attributes}
        return named | {Kind.CACHE.at(place.name): place.tensor for place in self.places}

    def states(self, of: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Copies of the optimizer state of some parameters, by the names of inputs."""
        names = {p: name for name, p in self.params.items()}
        for optimizer in self.optimizers.values():
            for name, state in optimizers.states_of(optimizer, names, self.fp32_master_weights, of):
                yield from ((f"{kind}:{name}", x) for kind, x in state.items())

    def in_memory(self, attributes: frozenset[str]) -> Iterator[torch.Tensor]:
        """The tensors of the objects, with those that optimizers have as state, except numbers."""
        yield from self.tensors(attributes).values()
        for optimizer in self.optimizers.values():
            yield from state_tensors(optimizer)

    def renewed(self, now: Mapping[str, torch.Tensor]) -> Holdings:
        """Return these holdings, or new ones if the parameters of modules or optimizers changed. now: see `tensors`."""
        count = sum(kind_of(name) == Kind.PARAM for name in now)
        same = count == len(self.params) and all(now.get(Kind.PARAM.at(name)) is p for name, p in self.params.items())
        if same and groups_of(self.optimizers.values()) == self.groups:
            return self
        return Holdings(self.objects, self.fp32_master_weights)

    def contains(self, x: Any) -> bool:
        """Return whether an argument of a function is one of the objects."""
        return any(x is y for y in self.objects.values())

    @contextmanager
    def holding(self, caches: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Put these tensors, by input name, into plain objects, within the block."""
        before = [place.tensor for place in self.places]
        try:
            for place in self.places:
                place.container[place.key] = caches[Kind.CACHE.at(place.name)]
            yield
        finally:
            for place, tensor in zip(self.places, before, strict=True):
                place.container[place.key] = tensor


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The tensors that an optimizer has as state, except numbers."""
    for state in optimizer.state.values():
        yield from (x for x in state.values() if isinstance(x, torch.Tensor) and x.ndim)


def groups_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[list[int]]:
    """The parameters of each group, by id."""
    return [[id(p) for p in group["params"]] for optimizer in optimizers for group in optimizer.param_groups]


def _places(path: str, x: Any, seen: set[int], depth: int) -> Iterator[TensorPlace]:
    """The tensors in an object, through lists, tuples, dicts and attributes."""
    if id(x) in seen or depth > DEEPEST:
        return
    seen.add(id(x))
    if isinstance(x, tuple) and any(isinstance(item, torch.Tensor) for item in x):
        raise ValueError(f"{path!r} is a tuple of tensors, which functions cannot replace; make it a list or dict")
    if isinstance(x, (list, tuple)):
        container, items = x, list(enumerate(x))
    elif isinstance(x, dict):
        container, items = x, list(x.items())
    elif not isinstance(x, OPAQUE) and not is_of_the_system(x) and hasattr(x, "__dict__"):
        container, items = vars(x), list(vars(x).items())
    else:
        return
    for key, item in items:
        if isinstance(item, torch.Tensor):
            yield TensorPlace(container, key, f"{path}.{key}")
        else:
            yield from _places(f"{path}.{key}", item, seen, depth + 1)
