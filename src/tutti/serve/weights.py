"""Where an engine's weights come from: a folder of safetensors, a checkpoint of training, or a step that trains."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tutti.api.step import Step
from tutti.api.store import Store
from tutti.checkpoint.folder import MANIFEST
from tutti.checkpoint.model import auto_class, key_of
from tutti.checkpoint.reader import CheckpointReader
from tutti.exec.relayout import Placed, move
from tutti.exec.tensor_store import TensorStore
from tutti.exec.weights import Wanted, load_weights, tensor_names

PREFIX = "param:model."  # of parameters in the engine's store

Weights = Step | Store | Mapping[str, torch.Tensor]


def read(store: Store, model: nn.Module, folder: Path) -> int:
    """Read the parts of the parameters that this process holds. Returns the bytes read.

    `transformers` reads folders whose tensors have other names than the model's (experts apart, older names): all of
    them, in each process. Raises ValueError if a tensor is missing or has another shape.
    """
    held = {name.removeprefix(PREFIX): x for name, x in store.held().items() if name.startswith(PREFIX)}
    if (folder / MANIFEST).exists():
        reader = CheckpointReader(folder)
        reader.load({key_of(reader, name) or "": x for name, x in held.items() if x.spec.bytes})
        return reader.bytes
    first = {p: name for name, p in model.named_parameters()}
    aliases = {name: first[p] for name, p in model.named_parameters(remove_duplicate=False) if name != first[p]}
    if held.keys() <= {aliases.get(name, name) for name in tensor_names(folder)}:
        return load_weights(folder, [Wanted(name, x) for name, x in held.items()], aliases)
    whole, about = auto_class(model.config).from_pretrained(folder, dtype="auto", output_loading_info=True)
    if about["missing_keys"]:
        raise ValueError(f"{folder} has no {sorted(about['missing_keys'])[0]!r}, which its config.json requires")
    return update(store, whole.state_dict())


def update(store: Store, weights: Weights) -> int:
    """Replace the parameters by those of a step or store in the same process, or of a state dict.

    Between layouts on as many devices, each rank receives only the blocks that it lacks. Returns the bytes received
    from other ranks, or placed where layouts cannot be moved (pipelines, other numbers of devices). Every rank of a job
    must call it. Raises ValueError if a parameter is missing or has another shape.
    """
    source: TensorStore | None = weights if isinstance(weights, Store) else getattr(weights, "store", None)
    known: Any = weights if source is None else source.tensors
    keys = {name: _key(name, known) for name in store.names("param")}
    for name, key in keys.items():  # before anything changes
        stored = store.tensors[name].spec.shape
        found = None if key is None else weights[key].shape if source is None else source.tensors[key].spec.shape  # pyright: ignore
        if found is None or tuple(found) != tuple(stored):
            raise ValueError(f"parameter {name.removeprefix(PREFIX)!r} has shape {tuple(stored)}; the weights have "
                             f"{found and tuple(found)}")  # fmt: skip
    count = 0
    for name, key in keys.items():
        assert key is not None
        if source is None:
            spec = store.tensors[name].spec
            store.place(name, weights[key].to(spec.dtype))  # pyright: ignore[reportIndexIssue]
            count += spec.bytes
        else:
            count += _take(store, name, source, key)
    return count


def _key(name: str, known: Container[str]) -> str | None:
    """The name of a parameter of the engine's store in other weights."""
    own = name.removeprefix(PREFIX)
    return next((x for x in (name, f"param:{own}", own) if x in known), None)


def _take(store: TensorStore, name: str, source: TensorStore, key: str) -> int:
    """Replace a tensor by one of another store."""
    new, old = store.tensors[name], source.tensors[key]
    apart = new.device is not None or old.device is not None
    if apart or old.spec.dtype != new.spec.dtype or len(store.runtime.ranks) != len(source.runtime.ranks):
        store.place(name, source.whole(key).to(new.spec.dtype))
        return new.spec.bytes
    places = Placed(old.layout, source.mesh), Placed(new.layout, store.mesh)
    parts = {rank: held[key] for rank, held in zip(source.runtime.ranks, source.parts, strict=True)}
    made, received = move(source.runtime, parts, old.spec, *places, store.device)
    for rank, held in zip(store.runtime.ranks, store.parts, strict=True):
        held[name] = made[rank]
    return received
