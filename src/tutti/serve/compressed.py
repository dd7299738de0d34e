"""Models that `tutti.compress` wrote in the format compressed-tensors, served as they are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from tutti.api.store import Store
from tutti.compress.experts import NAMES, Expert, ExpertLayers
from tutti.compress.folder import Reader, stored_schemes
from tutti.compress.formats import compressed_tensors as written
from tutti.compress.modules import shapes, sharing_copy
from tutti.nn.experts.quantized_experts import QuantizedExperts, StackedLinear
from tutti.nn.quantized.quantized_embedding import QuantizedEmbedding
from tutti.nn.quantized.quantized_linear import QuantizedLinear
from tutti.serve.values import Model

_log = logging.getLogger("tutti.serve")
Stored = QuantizedLinear | QuantizedEmbedding | StackedLinear


def is_compressed(model: Model) -> bool:
    """Whether the files of a model have quantized weights."""
    return getattr(model.config, "quantization_config", None) is not None


def prepare(model: Model) -> None:
    """Put quantized layers in the place of a model's own, as its config says. Raises ValueError for what is not
    served; nothing has been read then."""
    written.factor(model)
    schemes = stored_schemes(model)
    sizes = {path: x.embedding_dim for path, x in model.named_modules() if isinstance(x, nn.Embedding)}
    sizes |= {path: k for path, (_, k) in shapes(model).items()}
    for path, scheme in schemes.items():
        scheme.check(path, sizes[path])
    written.prepare(model, schemes)
    _stack(model, False)


def served(model: nn.Module) -> nn.Module:
    """A model in memory as it is served: with its experts stacked if they are layers of their own, in a copy then."""
    if not any(isinstance(x, ExpertLayers) for x in model.modules()):
        return model
    copy = sharing_copy(model)
    _stack(copy, True)
    return copy


def _stack(model: nn.Module, load: bool) -> None:
    """Stack the quantized experts of a model in place. load: whether to copy their weights.

    Experts that are not all quantized alike compute all tokens, which takes longer.
    """
    for path, x in list(model.named_modules()):
        if not isinstance(x, ExpertLayers):
            continue
        experts = [x[i] for i in range(x.count)]
        layers = [[getattr(e, name) for e in experts] for name in NAMES]
        try:
            gate, up, down = (StackedLinear(row, load) for row in layers)
            model.set_submodule(path, QuantizedExperts(gate, up, down, _gated(experts[0])))
        except ValueError as error:
            _log.warning("%s computes all tokens by all experts: %s", path, error)
            x.dense = True


def _gated(expert: Expert) -> Callable[[Tensor, Tensor], Tensor]:
    """What an expert makes of the results (m, f) of its first two layers."""
    from transformers.integrations import moe

    act, interleaved = expert.act[0], expert.interleaved
    if not interleaved and getattr(act, "__func__", None) is moe._default_apply_gate:
        return lambda gate, up: act.__self__.act_fn(gate) * up  # whose columns can be split
    if interleaved:
        return lambda gate, up: act(torch.stack([gate, up], -1).flatten(-2))
    return lambda gate, up: act(torch.cat([gate, up], -1))


def modules_of(model: nn.Module) -> dict[str, Stored]:
    """The modules with quantized weights, by path; of those that share one, the first."""
    by_path, seen = {}, set()
    for path, x in model.named_modules():
        if isinstance(x, Stored) and id(x.q) not in seen:
            by_path[path] = x
            seen.add(id(x.q))
    return by_path


def read(store: Store, modules: Mapping[str, Stored], folder: Path, prefix: str) -> int:
    """Read quantized weights into the store of an engine. Returns the bytes read. Each process reads them whole."""
    reader, count = Reader(folder), 0
    for path, module in modules.items():
        for name, x in _packed(reader, path, module).items():
            store.place(f"{prefix}{path}.{name}", x)
            count += x.nbytes
    return count


def _packed(reader: Reader, path: str, module: Stored) -> dict[str, Tensor]:
    """The parameters of a module with quantized weights."""
    if isinstance(module, StackedLinear):
        stem, _, name = path.rpartition(".")
        each = [_of_layer(reader, f"{stem}.{i}.{name}", module.layer) for i in range(module.count)]
        return {key: torch.stack([x[key] for x in each]) for key in each[0]}
    return _of_layer(reader, path, module.table() if isinstance(module, QuantizedEmbedding) else module)


def _of_layer(reader: Reader, path: str, layer: QuantizedLinear) -> dict[str, Tensor]:
    parts, scale = written.read_parts(lambda end: reader.get(f"{path}.{end}"), layer.scheme, *layer.shape)
    return layer.packed(parts) | ({} if scale is None else {"input_scale": scale})
