"""Linear layers of a served model in int8 or int4, rounded to nearest when they are loaded.

int8 has a scale for each output, int4 a scale for 64 inputs of an output. Activations stay in the model's dtype.
Embeddings, norms and the output layer stay as they are. `tutti.compress` has what is more accurate or smaller.
"""

from __future__ import annotations

from typing import Literal

from torch import nn

from tutti.compress.modules import sharing_copy
from tutti.nn.linear.linear_int4 import BLOCK
from tutti.nn.quantized.quantized_linear import QuantizedLinear
from tutti.nn.quantized.scheme import Scheme

Quantize = Literal["", "int8", "int4"]
FACTOR = ".lora_"  # in the paths of factors of adapters
SCHEMES = {"int8": Scheme(bits=8, group=None), "int4": Scheme(bits=4, group=64)}


def quantized(model: nn.Module, kind: str, load: bool) -> nn.Module:
    """A copy of a causal language model with quantized linear layers. It shares all other tensors, those of adapters of
    `peft` among them.

    load: whether the model's weights are rounded now. Raises ValueError for an unknown kind, for layers that the kind
    cannot hold and for a model without linear layers.
    """
    if kind not in SCHEMES:
        raise ValueError(f"quantize={kind!r}; expected {' or '.join(map(repr, SCHEMES))}")
    copied = sharing_copy(model)
    output = copied.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    layers = {path: x for path, x in copied.named_modules()
             if type(x) is nn.Linear and x is not output and FACTOR not in path}  # fmt: skip
    if not layers:
        raise ValueError(f"{type(model).__name__} has no linear layers to quantize")
    for path, layer in layers.items():
        if kind == "int4" and layer.in_features % BLOCK:
            raise ValueError(f"{path} has {layer.in_features} inputs; int4 needs a multiple of {BLOCK}: use int8")
        new = QuantizedLinear.like(layer, SCHEMES[kind])
        if load:
            new.load(layer.weight)
        copied.set_submodule(path, new)
    return copied
