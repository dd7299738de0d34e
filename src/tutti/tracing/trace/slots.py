"""Slots, in which a model stores its tensors. Stand-ins replace the tensors during capture.

A *slot* is an entry of `_parameters` or `_buffers` of one module. A tensor in several slots (tied weights, a module
under two names) has one name, the first of `named_parameters()` or `named_buffers()`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from tutti.ir.kind import Kind, kind_of, path_of


@dataclass(frozen=True)
class Slot:
    """`table[key]` is the tensor called `name`; `kind` is "param" or "buffer". registered: not a plain attribute."""

    table: Any
    key: Any
    kind: str
    name: str
    registered: bool = True

    @property
    def content(self) -> Any:
        """The current content of the slot."""
        return self.table.get(self.key) if isinstance(self.table, dict) else self.table[self.key]


class Slots:
    """The slots of a model. params, buffers: its tensors by name.

    attributes: paths of plain tensor attributes (`layer.running`) that forward replaces; they count as buffers.
    Attributes of modules, and lists and dicts in them, that refer to a parameter or buffer are slots too.
    """

    def __init__(self, model: nn.Module, attributes: Collection[str] = ()):
        self.params: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.buffers: dict[str, torch.Tensor] = dict(model.named_buffers())
        self.buffers |= {path: attribute(model, path) for path in attributes}
        names = {id(t): ("param", name) for name, t in self.params.items()}
        names |= {id(t): ("buffer", name) for name, t in self.buffers.items()}
        self.slots: list[Slot] = []
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                self.slots += [Slot(table, k, *names[id(t)]) for k, t in table.items() if t is not None]
            for key, value in module.__dict__.items():
                if isinstance(value, torch.Tensor) and id(value) in names:
                    kind, name = names[id(value)]
                    self.slots.append(Slot(module.__dict__, key, kind, name, name in attributes))
                elif isinstance(value, (list, dict)) and key not in ("_parameters", "_buffers", "_modules"):
                    items = value.items() if isinstance(value, dict) else enumerate(value)
                    entries = [(k, names[id(t)]) for k, t in items if isinstance(t, torch.Tensor) and id(t) in names]
                    self.slots += [Slot(value, k, *name, registered=False) for k, name in entries]

    def named(self) -> dict[str, torch.Tensor]:
        """All tensors by the names of graph inputs."""
        params = {Kind.PARAM.at(name): t for name, t in self.params.items()}
        return params | {Kind.BUFFER.at(name): t for name, t in self.buffers.items()}

    @contextmanager
    def holding(self, params: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Put these tensors, by name, into the model's slots, within the block."""
        before = [slot.table[slot.key] for slot in self.slots]
        try:
            for slot in self.slots:
                slot.table[slot.key] = (params if slot.kind == "param" else buffers)[slot.name]
            yield
        finally:
            for slot, tensor in zip(self.slots, before, strict=True):
                slot.table[slot.key] = tensor

    def changed(self, kind: str) -> dict[str, torch.Tensor]:
        """Return the tensors in the slots of a kind by name, after forward, which may assign other tensors.

        Raises ValueError if two slots of one name have different tensors, or if a successor has another shape or dtype.
        """
        tensors: dict[str, torch.Tensor] = {}
        before = self.params if kind == "param" else self.buffers
        for slot in self.slots:
            if slot.kind != kind or not slot.registered:
                continue
            now, old = slot.content, before[slot.name]
            if tensors.setdefault(slot.name, now) is not now:
                raise ValueError(
                    f"forward assigns another tensor to one of the attributes that share {kind} {slot.name!r}; assign "
                    "to all of them, or write into the tensor with copy_()"
                )
            if not isinstance(now, torch.Tensor) or (now.shape, now.dtype) != (old.shape, old.dtype):
                what = f"{tuple(now.shape)} {now.dtype}" if isinstance(now, torch.Tensor) else type(now).__name__
                raise ValueError(
                    f"forward changes {kind} {slot.name!r} from {tuple(old.shape)} {old.dtype} to {what}; state must "
                    "keep its shape and dtype from step to step"
                )
        return tensors


def check_dense(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError for sparse, quantized, nested and distributed tensors, by the names of graph inputs."""
    for name, x in tensors.items():
        wrapper = (
            "fully_shard or parallelize_module" if any(kind.__name__ == "DTensor" for kind in type(x).__mro__)
            else "FullyShardedDataParallel" if hasattr(x, "_is_flat_param") else None
        )  # fmt: skip
        if wrapper:
            raise ValueError(f"{name} was distributed by {wrapper}: leave that out, and give a plan instead, such as "
                             "plan='zero3', 'tp2' or 'auto'")  # fmt: skip
        kind = "nested" if x.is_nested else "quantized" if x.is_quantized else str(x.layout).removeprefix("torch.")
        if kind != "strided":
            place = f"batch entry {path_of(name)!r}" if kind_of(name) in (Kind.BATCH, Kind.COMMON) else name
            remedy = {
                "nested": "pad it (torch.nested.to_padded_tensor) and give a mask, or its values() and offsets()",
                "quantized": "dequantize() it",
            }.get(kind, "to_dense() it, or keep indices() and values() as two tensors and use index_add")
            raise ValueError(f"{place} is a {kind} tensor, but tensors of a step are dense: {remedy}")


def check_attributes(model: nn.Module, paths: Collection[str]) -> None:
    """Raise ValueError for tensors that a step changes and that are not in the model: in a criterion, for instance."""
    for path in sorted(paths):
        try:
            attribute(model, path)
        except AttributeError:
            raise ValueError(
                f"the step changes {path!r}, a tensor of an object outside of the model: make it a buffer "
                "(register_buffer) of a module in training mode that the loss refers to, or give "
                "nn.ModuleList([model, criterion]) as the model"
            ) from None


def attribute(model: nn.Module, path: str) -> torch.Tensor:
    """The tensor at the dotted path of an attribute."""
    return attrgetter(path)(model)


def check_memory_not_shared(tensors: Mapping[str, torch.Tensor], written: set[str]) -> None:
    """Raise ValueError if a tensor that a step writes shares memory with another one of the model.

    tensors: all of them, by name. written: names of those that a step replaces.
    """
    by_storage: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        if tensor.numel() and tensor.layout is torch.strided:
            begin = int(tensor.storage_offset()) * tensor.element_size()
            extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            storage = tensor.untyped_storage()._cdata
            by_storage.setdefault(storage, []).append((begin, begin + extent * tensor.element_size(), name))
    for spans in by_storage.values():
        spans.sort()
        for (_, end, a), (begin, _, b) in pairwise(spans):
            if begin < end and (a in written or b in written):
                raise ValueError(
                    f"{a} and {b} are different tensors that share memory, and a step writes into one of them; tie "
                    "them by assigning the same Parameter or buffer to both modules, or clone() one"
                )


def same_view(whole: torch.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> torch.Tensor:
    """`whole.as_strided(shape, strides, offset)` of a contiguous tensor, as a slice, a reshape and a permutation if
    these suffice: they can be split over devices."""
    order = sorted(range(len(shape)), key=lambda d: (-strides[d], d))
    dense, expected = True, 1
    for d in reversed(order):
        dense = dense and (shape[d] == 1 or strides[d] == expected)
        expected *= shape[d]
    if not dense:
        return whole.as_strided(list(shape), list(strides), offset)
    flat = whole if expected == whole.numel() else whole.reshape(-1)[offset : offset + expected]
    inverse = [order.index(d) for d in range(len(shape))]
    return flat.reshape([shape[d] for d in order]).permute(inverse)
