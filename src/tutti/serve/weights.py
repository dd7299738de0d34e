"""Where an engine's weights come from: a folder of safetensors, a checkpoint of training, or a step that trains."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tutti.api.step import Step
from tutti.api.store import Store
from tutti.checkpoint.folder import is_step_checkpoint
from tutti.checkpoint.model import auto_class, key_of
from tutti.checkpoint.reader import CheckpointReader
from tutti.exec.runtimes.relayout import Placed, move
from tutti.exec.stores.sharded_tensor import ShardedTensor
from tutti.exec.stores.tensor_store import TensorStore
from tutti.exec.stores.weights import Wanted, load_weights, tensor_names
from tutti.ir.kind import Kind
from tutti.nn.quantized.quantized_linear import QuantizedLinear, quantized_layers
from tutti.plan.layouts.layout import devices
from tutti.serve import compressed
from tutti.serve.values import Model

PREFIX = Kind.PARAM.at("model.")  # of parameters in the engine's store
OF_PEFT = "base_model.model."  # begins the names of a model within one of peft
AT_ONCE = 1 << 30  # bytes of weights in memory while they are rounded

Weights = Step | Store | Mapping[str, torch.Tensor]


def read(store: Store, model: nn.Module, folder: Path) -> int:
    """Read the parts of the parameters that this process holds. Returns the bytes read.

    `transformers` reads folders whose tensors have other names than the model's (experts apart, older names): all of
    them, in each process. Raises ValueError if a tensor is missing or has another shape.
    """
    layers, stored = _layers(store, model), store.sharded()
    if compressed.is_compressed(model):
        quantized = {p: x for p, x in compressed.modules_of(model).items() if f"{PREFIX}{p}.q" in store.tensors}
        rest = {name.removeprefix(PREFIX): stored[name] for name in _unrounded(store, quantized)}
        return _reader(folder, model)(rest) + compressed.read(store, quantized, folder, PREFIX)
    names = [name.removeprefix(PREFIX) for name in _unrounded(store, layers)] + [f"{x}.weight" for x in layers]
    if not is_step_checkpoint(folder) and not set(names) <= _parameters_in(folder, model):
        return update(store, model, _whole(folder, model))
    read_named = _reader(folder, model)
    count = read_named({name.removeprefix(PREFIX): stored[name] for name in _unrounded(store, layers)})
    for weights in _groups(layers):
        count += read_named({f"{path}.weight": ShardedTensor.whole(x) for path, x in weights.items()})
        for path, x in weights.items():
            _round(store, path, layers[path], x)
    return count


def _groups(layers: Mapping[str, QuantizedLinear]) -> Iterator[dict[str, torch.Tensor]]:
    """Memory for the weights of layers before they are rounded, for some layers at a time: a read opens all files."""
    group: dict[str, torch.Tensor] = {}
    for path, layer in layers.items():
        group[path] = torch.empty(layer.shape, dtype=layer.dtype)
        if sum(x.nbytes for x in group.values()) >= AT_ONCE:
            yield group
            group = {}
    if group:
        yield group


def _unrounded(store: Store, layers: Container[str]) -> list[str]:
    """The names of parameters in the store that are not rounded."""
    rounded = "q", "scales", "zeros", "input_scale"

    def is_rounded(path: str, _: str, last: str) -> bool:
        return path in layers and last in rounded

    return [name for name in store.names("param") if not is_rounded(*name.removeprefix(PREFIX).rpartition("."))]


def _reader(folder: Path, model: nn.Module) -> Callable[[Mapping[str, ShardedTensor]], int]:
    """A function that reads tensors by their names in the model, and returns the bytes read."""
    if not is_step_checkpoint(folder):
        aliases = _aliases(model)
        return lambda tensors: load_weights(folder, [Wanted(name, x) for name, x in tensors.items()], aliases)
    reader = CheckpointReader(folder)  # compares each file with its checksum once

    def read_stored(tensors: Mapping[str, ShardedTensor]) -> int:
        before = reader.bytes
        reader.load({key_of(reader, name) or "": x for name, x in tensors.items() if x.spec.bytes})
        return reader.bytes - before

    return read_stored


def _layers(store: TensorStore, model: nn.Module) -> dict[str, QuantizedLinear]:
    """The quantized layers that the served steps use."""
    return {path: x for path, x in quantized_layers(model).items() if f"{PREFIX}{path}.q" in store.tensors}


def _aliases(model: nn.Module) -> dict[str, str]:
    """Other names of tied parameters, and the first."""
    first = {p: name for name, p in model.named_parameters()}
    return {name: first[p] for name, p in model.named_parameters(remove_duplicate=False) if name != first[p]}


def _parameters_in(folder: Path, model: nn.Module) -> set[str]:
    """The parameters of a model that a folder has under their names."""
    aliases = _aliases(model)
    return {aliases.get(name, name) for name in tensor_names(folder)}


def _whole(folder: Path, model: Model) -> dict[str, torch.Tensor]:
    """The state dict that `transformers` makes of a folder. Raises ValueError if a tensor is missing."""
    whole, about = auto_class(model.config).from_pretrained(folder, dtype="auto", output_loading_info=True)
    if about["missing_keys"]:
        raise ValueError(f"{folder} has no {sorted(about['missing_keys'])[0]!r}, which its config.json requires")
    return whole.state_dict()


def _round(store: Store, path: str, layer: QuantizedLinear, weight: torch.Tensor) -> None:
    """Replace the weight of a quantized layer."""
    for name, x in layer.rounded(weight).items():
        with _in_place(store, f"{PREFIX}{path}.{name}") as stored:
            store.place(stored, x)


@contextmanager
def _in_place(store: TensorStore, name: str) -> Iterator[str]:
    """Write what replaces a stored tensor within the block into the tensor's own memory."""
    before = [tensors.get(name) for tensors in store.parts]
    try:
        yield name
    finally:
        for tensors, old in zip(store.parts, before, strict=True):
            if old is not None:
                tensors[name] = old.copy_(tensors[name])


def update(store: Store, model: nn.Module, weights: Weights) -> int:
    """Replace the parameters by those of a step or store in the same process, or of a state dict.

    Between layouts on as many devices, each rank receives only the blocks that it lacks. Shared parameters stay so
    unless they have other values. Returns the bytes received from other ranks, or placed where layouts cannot be moved
    (pipelines, other numbers of devices). Every rank of a job must call it. Raises ValueError if a parameter is missing
    or has another shape.
    """
    if isinstance(weights, Step | Store):
        weights.look()
    source: TensorStore | None = weights if isinstance(weights, Store) else getattr(weights, "store", None)
    available: Any = weights if source is None else source.tensors
    layers = {f"{PREFIX}{path}.weight": (path, layer) for path, layer in _layers(store, model).items()}
    shapes = {name: store.tensors[name].spec.shape for name in _unrounded(store, dict(layers.values()))}
    shapes |= {name: layer.shape for name, (_, layer) in layers.items()}
    keys = {name: _key(name, available) for name in shapes}
    for name, key in keys.items():  # before anything changes
        shape = None if key is None else weights[key].shape if source is None else source.tensors[key].spec.shape  # pyright: ignore
        if shape is None or tuple(shape) != tuple(shapes[name]):
            raise ValueError(f"parameter {name.removeprefix(PREFIX)!r} has shape {tuple(shapes[name])}; the weights "
                             f"have {shape and tuple(shape)}")  # fmt: skip
    count = 0
    for name, key in keys.items():
        assert key is not None
        if name in store.shared:
            if _is_current(store.parts[0][name], source, key, weights):
                continue
            store.unshare(name)
        if name not in layers and source is not None:
            with _in_place(store, name):
                count += _take(store, name, source, key)
            continue
        weight = weights[key] if source is None else source.whole(key)  # pyright: ignore[reportIndexIssue]
        if name in layers:
            _round(store, *layers[name], weight)
            count += weight.nbytes
        else:
            spec = store.tensors[name].spec
            with _in_place(store, name):
                store.place(name, weight.to(spec.dtype))
            count += spec.bytes
    return count


def whole_weights(weights: Weights, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of these names as whole tensors, one after the other, those of a step or store on the CPU.

    Every rank of a job must call it. Raises ValueError if one is missing.
    """
    if isinstance(weights, Step | Store):
        weights.look()
    source: Any = weights if isinstance(weights, Store) else getattr(weights, "store", None)
    available: Any = weights if source is None else source.tensors
    keys = {name: _key(f"{PREFIX}{name}", available) for name in names}
    if missing := [name for name, key in keys.items() if key is None]:
        raise ValueError(f"the weights have no parameter {missing[0]!r}")
    for name, key in keys.items():
        yield name, available[key] if source is None else source.whole(key)


def _key(name: str, available: Container[str]) -> str | None:
    """The name of a parameter of the engine's store in other weights, which may be those of a model of `peft` around
    the engine's."""
    own = name.removeprefix(PREFIX)
    names = (name, Kind.PARAM.at(own), own, Kind.PARAM.at(OF_PEFT + own), f"{OF_PEFT}{own}")
    return next((x for x in names if x in available), None)


def _is_current(current: torch.Tensor, source: TensorStore | None, key: str, weights: Any) -> bool:
    """Whether a tensor has the values of other weights. Every rank of a job must call it."""
    shared = source is not None and key in source.shared
    value = weights[key] if source is None else source.parts[0][key] if shared else source.whole(key)
    return value.data_ptr() == current.data_ptr() or torch.equal(value.to(current.device), current)


def _take(store: TensorStore, name: str, source: TensorStore, key: str) -> int:
    """Replace a tensor by one of another store."""
    new, old = store.tensors[name], source.tensors[key]
    apart = new.device is not None or old.device is not None
    if apart or old.spec.dtype != new.spec.dtype or devices(store.mesh) != devices(source.mesh):
        store.place(name, source.whole(key).to(new.spec.dtype))
        return new.spec.bytes
    places = Placed(old.layout, source.mesh), Placed(new.layout, store.mesh)
    parts = {rank: tensors[key] for rank, tensors in zip(source.runtime.ranks, source.parts, strict=True)}
    moved, received = move(source.runtime, parts, old.spec, *places, store.device)
    for rank, tensors in zip(store.runtime.ranks, store.parts, strict=True):
        tensors[name] = moved[rank]
    return received
