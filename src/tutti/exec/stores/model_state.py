"""The tensors of one model and its optimizer in a store: their first values, and access under the model's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from tutti import compat
from tutti.exec.stores.tensor_store import TensorStore
from tutti.exec.stores.weights import Wanted, load_weights
from tutti.ir.kind import Kind
from tutti.ir.step_graph import StepGraph
from tutti.tracing import optimizers
from tutti.tracing.trace.slots import attribute


def values_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, graph: StepGraph, fp32_master_weights: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a model, and copies of its optimizer's state, by the names of a graph's inputs."""
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    buffers |= {path: attribute(model, path) for path in graph.names("buffer") if path not in buffers}
    yield from ((Kind.BUFFER.at(key), x) for key, x in buffers.items())
    for key, state in optimizers.states_of(optimizer, {p: name for name, p in params.items()}, fp32_master_weights):
        parameter = params.pop(key)
        yield Kind.PARAM.at(key), parameter
        yield from ((f"{kind}:{key}", value) for kind, value in state.items())
    yield from ((Kind.PARAM.at(key), p) for key, p in params.items())


def read_weights(store: TensorStore, graph: StepGraph, folder: Path, model: nn.Module) -> int:
    """Read parameters, their float32 master weights and buffers from safetensors. Returns the bytes read."""
    sharded = store.sharded()
    wanted = [
        Wanted(name, sharded[kind.at(name)], optional=kind == Kind.BUFFER)
        for kind in (Kind.PARAM, Kind.MASTER, Kind.BUFFER) for name in graph.names(kind)
    ]  # fmt: skip
    return load_weights(folder, wanted, _aliases(model))


def state_dict(store: TensorStore, module: nn.Module, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters and buffers under a module's own names, tied ones under all: full CPU tensors.

    named: tensors by the names of the store. Those that it has not placed are read from the module.
    """
    names = {id(x): name for name, x in named.items()}
    own = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    with compat.without_subclasses():  # no values are read
        persistent = list(module.state_dict())
    values: dict[str, torch.Tensor] = {}
    for key in (key for key in persistent if key in own):
        name = names.get(id(own[key]), key)
        if name not in values:
            values[name] = store.whole(name) if name in store.tensors else own[key].detach().cpu()
    return {key: values[names.get(id(own[key]), key)] for key in persistent if key in own}


def _aliases(model: nn.Module) -> dict[str, str]:
    """Other names of tied parameters and buffers -> the first."""
    first: dict[int, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: first.setdefault(id(t), name) for name, t in named if first.setdefault(id(t), name) != name}
