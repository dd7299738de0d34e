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
from collections.abc import Iterator, Mapping
from typing import Any

import torch

Batch = Any  # a container as described above
PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)


def leaves(batch: Batch) -> Iterator[tuple[str, Any]]:
    """(name, leaf) of all leaves, in order. Raises ValueError if a leaf is neither a tensor nor a plain value."""
    if isinstance(batch, torch.Tensor):
        raise ValueError("the batch is a tensor; give a dict (keyword arguments of the model) or a tuple of tensors")
    if not _is_container(batch):
        raise ValueError(f"the batch is a {type(batch).__name__}; give a dict or tuple of tensors")
    return _leaves("", batch)


def _leaves(name: str, tree: Any) -> Iterator[tuple[str, Any]]:
    if _is_container(tree):
        for key, x in _items(tree):
            yield from _leaves(f"{name}.{key}" if name else str(key), x)
    elif isinstance(tree, (torch.Tensor, *PLAIN)):
        yield name, tree
    else:
        raise ValueError(
            f"batch entry {name!r} is a {type(tree).__name__}; entries are tensors or plain values (numbers, strings, "
            "None): convert arrays with torch.as_tensor"
        )


def batch_items(batch: Batch) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a batch with their names."""
    return [(name, x) for name, x in leaves(batch) if isinstance(x, torch.Tensor)]


def inputs(batch: Batch) -> dict[str, torch.Tensor]:
    """The tensors of a batch as inputs of a graph: `batch:name` if dim 0 is the batch dim, or for a 0-d tensor, else
    `common:name`."""
    size, listed = rows(batch), {id(x) for x in _inside_lists(batch)}
    return {
        f"{'batch' if not x.ndim or (x.shape[0] == size and id(x) not in listed) else 'common'}:{name}": x
        for name, x in batch_items(batch)
    }


def statics(batch: Batch) -> tuple[tuple[str, Any], ...]:
    """The leaves of a batch that are not tensors, with their names."""
    return tuple((name, x) for name, x in leaves(batch) if not isinstance(x, torch.Tensor))


def rebuilt(batch: Batch, values: Mapping[str, Any]) -> Batch:
    """The same containers with other leaves. Leaves without a value are kept."""
    return _rebuilt("", batch, values)


def _rebuilt(name: str, tree: Any, values: Mapping[str, Any]) -> Any:
    if not _is_container(tree):
        return values.get(name, tree)
    return _like(tree, [_rebuilt(f"{name}.{key}" if name else str(key), x, values) for key, x in _items(tree)])


def rows(batch: Batch) -> int:
    """The batch size: the most frequent size of dim 0, of equally frequent ones the first. Tensors in lists count only
    if there are no others, since a list has one item per sample. 0 for a batch without such tensors."""
    sizes = [x.shape[0] for x in _outside_lists(batch) if x.ndim] or [
        x.shape[0] for _, x in batch_items(batch) if x.ndim
    ]
    counted = Counter(sizes)
    return max(counted, key=lambda n: counted[n]) if counted else 0


def _outside_lists(tree: Any, inside: bool = True) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif _is_container(tree) and (inside or not isinstance(tree, list)):
        for _, x in _items(tree):
            yield from _outside_lists(x, False)


def _inside_lists(batch: Batch) -> list[torch.Tensor]:
    outside = {id(x) for x in _outside_lists(batch)}
    return [x for _, x in batch_items(batch) if id(x) not in outside] if outside else []


def part(batch: Batch, begin: int, end: int) -> Batch:
    """The rows of a batch from `begin` up to, not including, `end`.

    Tensors whose dim 0 has the batch size are sliced, and lists of that length, which have one item per sample.
    Everything else (positions, a temperature, a shared mask) belongs to every part.
    """
    size = rows(batch)
    return _like(batch, [_part(x, size, begin, end) for _, x in _items(batch)])


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
