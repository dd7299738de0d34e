"""Batches: nested containers whose leaves are tensors, or plain values that are constant over steps.

A batch is a dict, tuple, list, named tuple, dataclass or other mapping (`BatchEncoding`), nested at will. The name of a
leaf is its path with dots: `labels`, `0`, `targets.3.boxes`. The items of a list belong to one sample each if there
are as many as the batch has rows, else to all rows.

A leaf that is no tensor is *static*: it is part of the captured graph, and a batch with another value is captured
again.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch

from tutti.ir.spec import Spec

Batch = Any  # a container as described above
Signature = tuple[tuple, ...]  # (name, Spec) of tensors, (name, value, type) of static entries, sorted by name
PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)


class FlatBatch:
    """A batch and its leaves, flattened once.

    batch: the containers. tensors, statics: the leaves that are tensors, and the others, by name, in order.

    Raises ValueError for a batch that is no container, and for a leaf that is neither a tensor nor a plain value.
    """

    def __init__(self, batch: Batch):
        if isinstance(batch, torch.Tensor):
            raise ValueError(
                "the batch is a tensor; give a dict (keyword arguments of the model) or a tuple of tensors"
            )
        if not _is_container(batch):
            raise ValueError(f"the batch is a {type(batch).__name__}; give a dict or tuple of tensors")
        self.batch = batch
        self.tensors: dict[str, torch.Tensor] = {}
        self.statics: dict[str, Any] = {}
        self._outside: set[int] = set()  # tensors that are in no list
        self._sizes: list[int] = []  # of dim 0, of tensors that are in no list
        self._flatten("", batch, False)

    def _flatten(self, name: str, tree: Any, listed: bool) -> None:
        if isinstance(tree, torch.Tensor):
            self.tensors[name] = tree
            if not listed:
                self._outside.add(id(tree))
                self._sizes += tree.shape[:1]
        elif _is_container(tree):
            listed = listed or (isinstance(tree, list) and tree is not self.batch)
            for key, x in _items(tree):
                self._flatten(f"{name}.{key}" if name else str(key), x, listed)
        elif isinstance(tree, PLAIN):
            self.statics[name] = tree
        else:
            raise ValueError(
                f"batch entry {name!r} is a {type(tree).__name__}; entries are tensors or plain values (numbers, "
                "strings, None): convert arrays with torch.as_tensor"
            )

    @cached_property
    def rows(self) -> int:
        """The batch size, the most frequent size of dim 0, of equally frequent ones the first; 0 without rows.

        Tensors in lists count only if there are no others, since a list has one item per sample.
        """
        counted = Counter(self._sizes or [x.shape[0] for x in self.tensors.values() if x.ndim])
        return max(counted, key=lambda n: counted[n]) if counted else 0

    @cached_property
    def inputs(self) -> dict[str, torch.Tensor]:
        """The tensors as inputs of a graph: `batch:name` if dim 0 is the batch dim, or for a 0-d tensor, else
        `common:name`."""
        outside = self._outside or {id(x) for x in self.tensors.values()}
        return {
            f"{'batch' if not x.ndim or (x.shape[0] == self.rows and id(x) in outside) else 'common'}:{name}": x
            for name, x in self.tensors.items()
        }

    @cached_property
    def signature(self) -> Signature:
        """What a captured graph depends on: names (in any order), shapes, dtypes and static values."""
        entries = [(name, Spec.of(x)) for name, x in self.tensors.items()]
        others = [(name, x, type(x).__name__) for name, x in self.statics.items()]  # 1, 1.0 and True are equal
        return tuple(sorted([*entries, *others], key=lambda item: item[0]))

    def rebuilt(self, inputs: Mapping[str, torch.Tensor]) -> Batch:
        """The same containers with other tensors, by the names of `inputs`."""
        values = {leaf: inputs[name] for leaf, name in zip(self.tensors, self.inputs, strict=True)}
        return _rebuilt("", self.batch, values)

    def parts(self, count: int) -> list[FlatBatch]:
        """Microbatches: equal parts of the rows.

        Tensors whose dim 0 has the batch size are sliced, and lists of that length, which have one item per sample.
        Everything else (positions, a temperature, a shared mask) belongs to every part. Raises ValueError for rows that
        do not divide.
        """
        if count == 1:
            return [self]
        if not self.rows or self.rows % count:
            entries = ((name, x) for name, x in self.tensors.items() if not self.rows or x.shape[:1] == (self.rows,))
            name, x = next(entries, ("", None))
            shape = None if x is None else tuple(x.shape)
            raise ValueError(f"batch entry {name!r} of shape {shape} does not divide into {count} microbatches")
        each = self.rows // count
        return [FlatBatch(self.part(i * each, (i + 1) * each)) for i in range(count)]

    def part(self, begin: int, end: int) -> Batch:
        """The rows from `begin` up to, not including, `end`, in the same containers."""
        return _like(self.batch, [_part(x, self.rows, begin, end) for _, x in _items(self.batch)])

    def check_like(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Raise ValueError for other names or dtypes than those of the example batch."""
        if missing := [key for key in dtypes if key not in self.tensors]:
            name = missing[0]
            if isinstance(self.batch, Mapping) and name in self.batch:
                kind = type(self.batch[name]).__name__
                raise ValueError(f"batch entry {name!r} is a {kind}; it was a tensor when the step was made")
            raise ValueError(f"the batch lacks {name!r}; it had {list(dtypes)} when the step was made")
        if unknown := [key for key in self.tensors if key not in dtypes]:
            raise ValueError(f"the batch has {unknown[0]!r}, which it did not have when the step was made")
        for key, x in self.tensors.items():
            if x.dtype != dtypes[key]:
                raise ValueError(f"batch entry {key!r} is {x.dtype}; it was {dtypes[key]} when the step was made")


def _rebuilt(name: str, tree: Any, values: Mapping[str, Any]) -> Any:
    if not _is_container(tree):
        return values.get(name, tree)
    return _like(tree, [_rebuilt(f"{name}.{key}" if name else str(key), x, values) for key, x in _items(tree)])


def _part(tree: Any, size: int, begin: int, end: int) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree[begin:end] if tree.ndim and tree.shape[0] == size else tree
    if not _is_container(tree):
        return tree
    if isinstance(tree, list):
        return tree[begin:end] if len(tree) == size else tree
    return _like(tree, [_part(x, size, begin, end) for _, x in _items(tree)])


def _like(tree: Any, values: list[Any]) -> Any:
    """Build a container like `tree` with these values."""
    if type(tree) in (tuple, list):
        return type(tree)(values)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*values)
    keys = [key for key, _ in _items(tree)]
    if type(tree) is dict:
        return dict(zip(keys, values, strict=True))
    container: Any = copy.copy(tree)
    for key, x in zip(keys, values, strict=True):
        if isinstance(tree, (Mapping, list)):
            container[key] = x
        else:
            object.__setattr__(container, key, x)
    return container


def _is_container(x: Any) -> bool:
    if isinstance(x, (Mapping, tuple, list)):
        return not isinstance(x, torch.Size)
    return dataclasses.is_dataclass(x) and not isinstance(x, type)


def _items(tree: Any) -> list[tuple[Any, Any]]:
    if isinstance(tree, Mapping):
        return list(tree.items())
    if isinstance(tree, (tuple, list)):
        return list(zip(getattr(tree, "_fields", range(len(tree))), tree, strict=True))
    return [(field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree)]
