"""Models that `tutti.compress` wrote in the format compressed-tensors, served as they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from tutti.api.store import Store
from tutti.compress.folder import Reader, stored_schemes
from tutti.compress.formats import compressed_tensors as written
from tutti.nn.quantized_embedding import QuantizedEmbedding
from tutti.nn.quantized_linear import QuantizedLinear


def is_compressed(model: Any) -> bool:
    """Whether the files of a model have quantized weights."""
    return getattr(model.config, "quantization_config", None) is not None


def prepare(model: Any) -> None:
    """Put quantized layers in the place of a model's own, as its config says. Raises ValueError for what is not
    served; nothing has been read then."""
    schemes = stored_schemes(model)
    if inside := [path for path in schemes if ".experts." in path]:
        raise ValueError(f"{inside[0]}: quantized experts are not served: load the model with transformers, which "
                         "widens them, and give Engine the model")  # fmt: skip
    modules = dict(model.named_modules())
    for path, scheme in schemes.items():
        scheme.check(path, modules[path].weight.shape[1])
    written.prepare(model, schemes)


def modules_of(model: nn.Module) -> dict[str, QuantizedLinear | QuantizedEmbedding]:
    """The modules with quantized weights, by path; of those that share one, the first."""
    found, seen = {}, set()
    for path, x in model.named_modules():
        if isinstance(x, (QuantizedLinear, QuantizedEmbedding)) and id(x.q) not in seen:
            found[path] = x
            seen.add(id(x.q))
    return found


def read(store: Store, modules: Mapping[str, Any], folder: Path, prefix: str) -> int:
    """Read quantized weights into the store of an engine. Returns the bytes read. Each process reads them whole."""
    reader, count = Reader(folder), 0
    for path, module in modules.items():
        parts, scale = written.read_parts(lambda end: reader.get(f"{path}.{end}"), module.scheme, *module.weight.shape)  # noqa: B023
        table = module.table() if isinstance(module, QuantizedEmbedding) else module
        packed = table.packed(parts) if scale is None else {**table.packed(parts), "input_scale": scale}
        for name, x in packed.items():
            store.place(f"{prefix}{path}.{name}", x)
            count += x.nbytes
    return count
