"""A linear layer with a quantized weight, which is not trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tutti.nn.linear import linear_bits, linear_codes, linear_int4
from tutti.nn.quantized import quantized_gradients
from tutti.nn.quantized.scheme import FLOAT8, Parts, Scheme, pack_bits, unpack_bits

ops = torch.ops.tutti
Layout = Literal["int8", "int4", "low", "float8", "bits"]
STORED = "q", "scales", "input_scale"  # parameters whose dtypes stay
KERNELS = "int8", "int4", "low"  # layouts that are multiplied as integers; others are dequantized at each call


def layout(scheme: Scheme, k: int) -> Layout:
    """How a weight with rows of k numbers lies in memory: for the operator `linear_int8`, `linear_int4` or, "low",
    `linear_bits`; as float8, or as a stream of bits (`pack_bits`), for `linear_codes`."""
    if scheme.kind == "float8":
        return "float8"
    if scheme.bits == 8 and scheme.symmetric and scheme.group is None:
        return "int8"
    if scheme.bits in (2, 3, 4) and scheme.group in linear_int4.GROUPS and k % linear_int4.BLOCK == 0:
        return "int4" if scheme.bits == 4 else "low"
    return "bits"


def unpacked(q: Tensor, scales: Tensor, zeros: Tensor | None, scheme: Scheme, k: int) -> Parts:
    """The codes, scales and zeros of rows that lie as `layout` says."""
    at = layout(scheme, k)
    if at == "int8":
        return Parts((q.to(torch.int16) + 128).to(torch.uint8), scales.unsqueeze(1), zeros)
    if at == "int4":
        q = linear_int4.unpack(q)
    elif at == "low":
        q = linear_bits.unpack(q, scheme.bits)
    elif at == "bits":
        q = unpack_bits(q, scheme.bits, k)
    return Parts(q, scales, zeros)


class Quantized(nn.Module):
    """A module with a quantized weight. `to(dtype)` changes the dtype in which it computes, not what it stores."""

    dtype: torch.dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Quantized:
        stored = {name: (x, x.data) for name in STORED if (x := getattr(self, name, None)) is not None}
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=stored["q"][1].device)).dtype
        super()._apply(fn, recurse)
        for name, (parameter, before) in stored.items():
            if getattr(self, name).dtype != before.dtype:
                parameter.data = before.to(parameter.device)  # the same parameter: an embedding may share it
                setattr(self, name, parameter)
        return self


class QuantizedLinear(Quantized):
    """A linear layer y = x W^T + bias with a quantized weight W (n, k). Its memory is not touched before it is loaded.

    scheme: how W is quantized. dtype: dtype of the weight before it was rounded.
    q, scales, zeros: W as `layout` says; scales are float32, (n) for "int8" and else (n, groups); zeros may be None.
    input_scale: scale of the inputs, a number, where activations are "int8-static".
    """

    q: nn.Parameter
    scales: nn.Parameter
    zeros: nn.Parameter | None
    input_scale: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        scheme: Scheme,
        bias: nn.Parameter | None = None,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
    ):
        super().__init__()
        scheme.check("the layer", in_features)
        self.in_features, self.out_features, self.scheme, self.dtype = in_features, out_features, scheme, dtype
        self.layout, self.bias = layout(scheme, in_features), bias
        n, k, groups = out_features, in_features, scheme.groups(in_features)
        sizes = {
            "int8": k,
            "int4": k // 2,
            "low": k * scheme.bits // 8,
            "float8": k,
            "bits": 4 * -(-k * scheme.bits // 32),
        }
        size, of_q = sizes[self.layout], {"int8": torch.int8, "float8": FLOAT8}.get(self.layout, torch.uint8)
        static = scheme.activations == "int8-static"
        parameters = {"q": torch.empty(n, size, dtype=of_q, device=device),
                "scales": torch.empty((n,) if self.layout == "int8" else (n, groups), device=device),
                "zeros": None if scheme.symmetric else torch.empty(n, groups, dtype=torch.uint8, device=device),
                "input_scale": torch.ones((), device=device) if static else None}  # fmt: skip
        for name, x in parameters.items():
            self.register_parameter(name, None if x is None else nn.Parameter(x, requires_grad=False))

    @classmethod
    def like(cls, layer: nn.Linear, scheme: Scheme) -> QuantizedLinear:
        """A layer in the place of another, with its bias. Its weight is not loaded."""
        weight = layer.weight
        return cls(layer.in_features, layer.out_features, scheme, layer.bias, weight.dtype, weight.device)

    @classmethod
    def from_parts(
        cls,
        parts: Parts,
        scheme: Scheme,
        bias: nn.Parameter | None = None,
        dtype: torch.dtype = torch.float32,
        input_scale: Tensor | None = None,
    ) -> QuantizedLinear:
        """A layer with a weight that is quantized already. dtype: in which it computes if it must widen its weight."""
        n, k = parts.codes.shape
        layer = cls(k, n, scheme, bias, dtype, parts.codes.device)
        layer.load_parts(parts, input_scale)
        return layer

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (out_features, in_features) of the weight."""
        return self.out_features, self.in_features

    @property
    def weight(self) -> Tensor:
        """The shape and dtype of the weight, which some models look at."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    @property
    def qweight(self) -> Tensor:
        """The packed weight, under the name where `peft` looks for the device of adapters."""
        return self.q

    @torch.no_grad()
    def load(self, weight: Tensor) -> None:
        """Take the nearest quantized weight."""
        self.load_parts(self.scheme.quantize(weight.detach().to(self.dtype)))

    @torch.no_grad()
    def load_parts(self, parts: Parts, input_scale: Tensor | None = None) -> None:
        """Take a quantized weight."""
        for name, x in self.packed(parts).items():
            getattr(self, name).copy_(x)
        if input_scale is not None and self.input_scale is not None:
            self.input_scale.copy_(input_scale)

    def packed(self, parts: Parts) -> dict[str, Tensor]:
        """What q, scales and zeros are for a quantized weight."""
        codes, scales, zeros = parts
        if self.layout == "int8":
            tensors = {"q": (codes.to(torch.int16) - 128).to(torch.int8), "scales": scales.squeeze(1)}
        else:
            bits = self.scheme.bits
            pack = {"int4": linear_int4.pack, "low": lambda x: linear_bits.pack(x, bits), "float8": lambda x: x,
                    "bits": lambda x: pack_bits(x, bits)}  # fmt: skip
            tensors = {"q": pack[self.layout](codes), "scales": scales}
        return tensors if zeros is None else {**tensors, "zeros": zeros}

    def rounded(self, weight: Tensor) -> dict[str, Tensor]:
        """What q, scales and zeros are for the nearest quantized weight."""
        return self.packed(self.scheme.quantize(weight.detach().to(self.dtype)))

    def parts(self) -> Parts:
        """The quantized weight."""
        zeros = None if self.zeros is None else self.zeros.data
        return unpacked(self.q.data, self.scales.data, zeros, self.scheme, self.in_features)

    def dequantize(self) -> Tensor:
        """The weight (n, k) in its dtype."""
        parts = unpacked(self.q, self.scales, self.zeros, self.scheme, self.in_features)
        return self.scheme.dequantize(parts).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self.input_scale is not None:
            rows = ((rows / self.input_scale).round().clamp(-128, 127) * self.input_scale).to(x.dtype)
        if self.layout == "int8":
            dynamic = self.scheme.activations == "int8"
            y = ops.linear_int8(rows, self.q, self.scales, self.bias, rounded=dynamic)
        elif self.layout == "int4":
            y = ops.linear_int4(rows, self.q, self.scales, self.zeros, self.bias)
        elif self.layout == "low":
            y = ops.linear_bits(rows, self.q, self.scales, self.zeros, self.bias, bits=self.scheme.bits)
        else:
            y = ops.linear_codes(rows, self.q, self.scales, self.zeros, self.bias, bits=self.scheme.bits)
        return y.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.scheme}"


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """The quantized layers of a model, by path."""
    return {path: x for path, x in model.named_modules() if isinstance(x, QuantizedLinear)}


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype in which a model computes: that of its first parameter, before it was quantized if it is."""
    for module in model.modules():
        if getattr(module, "scheme", None).__class__ is Scheme:
            return module.dtype  # pyright: ignore[reportReturnType]
        for x in module.parameters(recurse=False):
            return x.dtype
    raise ValueError(f"{type(model).__name__} has no parameters")


assert linear_codes and quantized_gradients  # they register operators
