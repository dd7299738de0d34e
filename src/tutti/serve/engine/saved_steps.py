"""The store of an engine, whose captured steps are kept on disk: the next engine for such a model starts without
tracing the model's code.

What a capture depends on is described in words: the classes of all modules, their plain attributes and tensors, the
config, and the arguments. A model that cannot be described so (hooks, attributes of other kinds) is captured each time.
An engine uses saved steps only if it compares its logits with those of the model's own forward pass afterwards
(`serve.engine.self_check`).
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers import GenerationConfig, PretrainedConfig

from tutti.api.saved_graphs import SavedGraphs
from tutti.api.store import Store
from tutti.ir.spec import Spec
from tutti.tracing.batch import FlatBatch
from tutti.tracing.function import Captured, arguments
from tutti.tracing.trace.watch import HOOKS

VERSIONED = ("torch", "transformers", "peft", "tutti")  # packages whose code the version tells
KEPT_BY_TORCH = vars(nn.Module()).keys()  # attributes of every module
NAMES = ("name_or_path", "_name_or_path")  # where a model is from, which no step reads


class Indescribable(ValueError):
    """A model whose code depends on something that has no description."""


class SavedStore(Store):
    """A store whose captured functions without updates are saved, each by its name and arguments."""

    def __init__(self, graphs: SavedGraphs | None, **options: Any):
        super().__init__(**options)
        self.graphs = graphs

    def capture(self, f: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
        if self.graphs is None:
            return super().capture(f, args, kwargs)
        call = FlatBatch(arguments(args, kwargs, self.holdings)).signature
        name = hashlib.sha256(repr((f.__module__, f.__qualname__, call)).encode()).hexdigest()[:24]
        if graph := self.graphs.graph(name):
            return Captured(graph, pytree.tree_structure(0), {}, {}, self.attributes)
        captured = super().capture(f, args, kwargs)
        plain = captured.tree.is_leaf() and not (captured.fixed or captured.updates or captured.graph.guards)
        if plain and captured.attributes == self.attributes:
            self.graphs.save(name, captured.graph)
        return captured


def graphs_of(model: nn.Module, *options: Any) -> SavedGraphs | None:
    """The saved steps of a model with these options, or None if it cannot be described."""
    device = next(model.parameters()).device.type
    try:
        return SavedGraphs.of(described(model), device, torch.is_autocast_enabled(device), options)
    except Indescribable:
        return None


def described(model: nn.Module) -> list[Any]:
    """All that the graph of a model depends on, besides its arguments. Raises Indescribable."""
    modules = dict(model.named_modules(remove_duplicate=False))
    kinds = sorted({type(x) for x in modules.values()}, key=lambda kind: (kind.__module__, kind.__qualname__))
    sources = [(kind.__module__, kind.__qualname__, _source(kind)) for kind in kinds]
    configs = {
        id(x): x for module in modules.values() for x in vars(module).values() if isinstance(x, PretrainedConfig)
    }
    options = [({**x.to_dict(), "_name_or_path": ""}, x._attn_implementation) for x in configs.values()]
    numbers = {key: i for i, key in enumerate(configs)}  # of what modules share, by id
    return [sources, options, *((path, _module(module, numbers)) for path, module in modules.items())]


def _source(kind: type) -> str:
    """A hash of the source of a class's module; empty for packages that have a version."""
    if kind.__module__.partition(".")[0] in VERSIONED:
        return ""
    try:
        return hashlib.sha256(inspect.getsource(sys.modules[kind.__module__]).encode()).hexdigest()
    except (OSError, TypeError, KeyError):
        raise Indescribable(f"the source of {kind.__qualname__}") from None


def _module(module: nn.Module, numbers: dict[int, int]) -> list[Any]:
    """The class, tensors and attributes of a module. numbers: gets a number for each module and tensor, by its id."""
    if any(getattr(module, name) for name in HOOKS):
        raise Indescribable("hooks")
    named = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    shared = [numbers.setdefault(id(x), len(numbers)) for x in (module, *(x for _, x in named))]
    tensors = [(name, Spec.of(x), x.requires_grad, type(x).__qualname__) for name, x in named]
    attributes = [
        (name, numbers[id(x)] if isinstance(x, PretrainedConfig) else _value(x))
        for name, x in vars(module).items() if name not in KEPT_BY_TORCH and name not in NAMES
    ]  # fmt: skip
    return [type(module).__qualname__, module.training, shared, tensors, attributes]


def _value(x: Any) -> Any:
    """A description of an attribute. Raises Indescribable."""
    if x is None or isinstance(x, bool | int | float | complex | str | bytes | torch.dtype | torch.device | Enum):
        return repr(x)
    if isinstance(x, torch.Tensor):
        return Spec.of(x), type(x).__qualname__
    if isinstance(x, list | tuple):
        return type(x).__name__, [_value(y) for y in x]
    if isinstance(x, set | frozenset):
        return type(x).__name__, sorted(map(repr, x))
    if isinstance(x, dict):
        return "dict", [(_value(key), _value(y)) for key, y in x.items()]
    if is_dataclass(x) and not isinstance(x, type):
        return type(x).__qualname__, [_value(getattr(x, field.name)) for field in fields(x)]
    if isinstance(x, partial):
        return "partial", _value(x.func), _value(x.args), _value(x.keywords)
    if isinstance(x, GenerationConfig):  # no step reads it
        return ""
    if isinstance(x, type | FunctionType | BuiltinFunctionType) and "<locals>" not in x.__qualname__:
        return f"{x.__module__}.{x.__qualname__}"
    raise Indescribable(f"an attribute of type {type(x).__qualname__}")
