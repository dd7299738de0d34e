"""The tensors of one model and its optimizer in a store: their first values, and access under the model's names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from tutti.exec.tensor_store import TensorStore
from tutti.exec.weights import Wanted, load_weights
from tutti.ir.step_graph import StepGraph
from tutti.tracing import optimizers
from tutti.tracing.slots import attribute


def values_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, graph: StepGraph, fp32_master_weights: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a model, and copies of its optimizer's state, by the names of a graph's inputs."""
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    buffers |= {path: attribute(model, path) for path in graph.names("buffer") if path not in buffers}
    yield from ((f"buffer:{key}", x) for key, x in buffers.items())
    for key, state in optimizers.states_of(optimizer, {p: name for name, p in params.items()}, fp32_master_weights):
        parameter = params.pop(key)
        yield f"param:{key}", parameter
        yield from ((f"{kind}:{key}", value) for kind, value in state.items())
    yield from ((f"param:{key}", p) for key, p in params.items())


def read_weights(store: TensorStore, graph: StepGraph, folder: Path, model: nn.Module) -> int:
    """Read parameters, their float32 master weights and buffers from safetensors. Returns the bytes read."""
    held = store.held()
    wanted = [
        Wanted(name, held[f"{kind}:{name}"], optional=kind == "buffer")
        for kind in ("param", "master", "buffer") for name in graph.names(kind)
    ]  # fmt: skip
    return load_weights(folder, wanted, _aliases(model))


def state_dict(store: TensorStore, graph: StepGraph, model: nn.Module, sharded: bool) -> dict[str, torch.Tensor]:
    """Parameters and buffers under the model's names: full CPU tensors, or with `sharded` this rank's parts."""
    tensors = {}
    for kind in ("param", "buffer"):
        for name in graph.names(kind):
            key = f"{kind}:{name}"
            if not sharded:
                tensors[name] = store.whole(key)
            elif key in store.parts[0]:
                tensors[name] = store.parts[0][key]
    if not sharded:  # tied parameters appear under all their names, as in the model's own state dict
        tensors |= {alias: tensors[name] for alias, name in _aliases(model).items() if name in tensors}
        tensors = {name: tensors[name] for name in model.state_dict() if name in tensors}
    return tensors


def _aliases(model: nn.Module) -> dict[str, str]:
    """Other names of tied parameters and buffers -> the first."""
    first: dict[int, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: first.setdefault(id(t), name) for name, t in named if first.setdefault(id(t), name) != name}
