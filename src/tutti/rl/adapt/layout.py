"""How observations and actions of gymnasium's spaces are laid out in a batch.

    space                            a batch of n
    Box, MultiDiscrete, MultiBinary  array (n, *shape), dtype of the space
    Discrete                         int64 (n,)
    Dict                             dict of batches
    Tuple                            dict of batches with the keys "0", "1", ...

Values of Discrete and MultiDiscrete spaces begin at 0 in a batch, whatever the space's `start`: a policy's output i is
the action `start + i`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

Batch = Any  # an array, or a dict of batches


def plain(space: spaces.Space, name: str) -> spaces.Space:
    """The space of one instance's part of a batch: Tuple becomes Dict, and `start` becomes 0.

    name: what has this space, for errors. Raises ValueError where values of the space have no fixed shape.
    """
    match space:
        case spaces.Dict():
            return spaces.Dict({key: plain(part, f"{name}[{key!r}]") for key, part in space.spaces.items()})
        case spaces.Tuple():
            parts = enumerate(space.spaces)
            return spaces.Dict({str(i): plain(part, f"{name}[{i}]") for i, part in parts})
        case spaces.Discrete():
            return spaces.Discrete(int(space.n))
        case spaces.MultiDiscrete():
            return spaces.MultiDiscrete(space.nvec, dtype=_dtype(space).type)
        case spaces.Box() | spaces.MultiBinary():
            return space
    raise ValueError(
        f"{name} is {space}: values of a {type(space).__name__} space have no fixed shape, so that n of them make no "
        "array. Wrap the environment so that it has Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple spaces, "
        "for example with gymnasium.wrappers.TransformObservation"
    )


def starts(space: spaces.Space) -> Any:
    """Offsets of the discrete values of a space from those of its batches, which begin at 0: dicts of int64 arrays with
    the shapes of the parts, or one array. None if all are 0."""
    match space:
        case spaces.Dict():
            offsets = {key: starts(part) for key, part in space.spaces.items()}
        case spaces.Tuple():
            offsets = {str(i): starts(part) for i, part in enumerate(space.spaces)}
        case spaces.Discrete() | spaces.MultiDiscrete() if np.any(space.start):
            return np.asarray(space.start, np.int64)
        case _:
            return None
    return None if all(x is None for x in offsets.values()) else offsets


def shifted(batch: Batch, by: Any, sign: int = 1) -> Batch:
    """A batch, or one value, plus or minus what `starts` returned. Tuples may be dicts, as in a batch."""
    if by is None:
        return batch
    if isinstance(by, dict):
        if isinstance(batch, tuple | list):
            batch = {str(i): x for i, x in enumerate(batch)}
        return {key: shifted(x, by.get(str(key)), sign) for key, x in batch.items()}
    return batch + sign * by


def gather(space: spaces.Space, values: Sequence[Any]) -> Batch:
    """The batch of n values of a space. Raises ValueError where they do not fit the space; see `misfit` for which."""
    match space:
        case spaces.Dict():
            return {key: gather(part, [value[key] for value in values]) for key, part in space.spaces.items()}
        case spaces.Tuple():
            parts = enumerate(space.spaces)
            return {str(i): gather(part, [value[i] for value in values]) for i, part in parts}
    return arrange(space, np.array(values))


def arrange(space: spaces.Space, batch: Any) -> Batch:
    """The batch that a vector environment of gymnasium returned, which has tuples for Tuple spaces.

    Arrays may be those that were given, where nothing changes.
    """
    match space:
        case spaces.Dict():
            return {key: arrange(part, batch[key]) for key, part in space.spaces.items()}
        case spaces.Tuple():
            return {str(i): arrange(part, batch[i]) for i, part in enumerate(space.spaces)}
    array, dtype = np.asarray(batch), _dtype(space)
    if array.shape[1:] != space.shape or not np.can_cast(array.dtype, dtype, "same_kind"):
        raise ValueError(f"values of shape {array.shape[1:]} and dtype {array.dtype} do not fit {space}")
    array = array.astype(dtype, copy=False)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) and np.any(space.start):
        array = array - np.asarray(space.start, dtype)
    return array


def scatter(space: spaces.Space, batch: Batch, n: int) -> list[Any]:
    """The n values of a space in a batch, as `space.sample()` returns them. Inverse of `gather`."""
    match space:
        case spaces.Dict():
            columns = {key: scatter(part, batch[key], n) for key, part in space.spaces.items()}
            return [{key: column[i] for key, column in columns.items()} for i in range(n)]
        case spaces.Tuple():
            columns = [scatter(part, batch[str(i)], n) for i, part in enumerate(space.spaces)]
            return list(zip(*columns, strict=True))
    return list(restore(space, batch, n))


def restore(space: spaces.Space, batch: Batch, n: int) -> Any:
    """The batch that a vector environment of gymnasium takes. Inverse of `arrange`."""
    match space:
        case spaces.Dict():
            return {key: restore(part, batch[key], n) for key, part in space.spaces.items()}
        case spaces.Tuple():
            return tuple(restore(part, batch[str(i)], n) for i, part in enumerate(space.spaces))
    array, shape = np.asarray(batch), (n, *(space.shape or ()))
    if array.shape != shape:
        raise ValueError(f"actions have shape {array.shape}; {n} instances of {space} take {shape}")
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) and array.dtype.kind not in "iub":
        raise ValueError(f"actions have dtype {array.dtype}; {space} takes integers, such as int64")
    array = array.astype(_dtype(space), copy=False)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) and np.any(space.start):
        array = array + np.asarray(space.start, array.dtype)
    return array


def misfit(space: spaces.Space, value: Any, name: str, strict: bool = False) -> str | None:
    """Describe why a value does not fit a space; None if it does.

    strict: the value must be finite where it is of floating point, and be in the space.
    """
    match space:
        case spaces.Dict():
            if not isinstance(value, dict) or value.keys() != space.spaces.keys():
                return f"{name} is {_words(value)}, not a dict of {sorted(space.spaces)}"
            misfits = (misfit(part, value[k], f"{name}[{k!r}]", strict) for k, part in space.spaces.items())
            return next(filter(None, misfits), None)
        case spaces.Tuple():
            if not isinstance(value, tuple | list) or len(value) != len(space.spaces):
                return f"{name} is {_words(value)}, not a tuple of {len(space.spaces)}"
            misfits = (misfit(part, value[i], f"{name}[{i}]", strict) for i, part in enumerate(space.spaces))
            return next(filter(None, misfits), None)
    try:
        array = np.asarray(value)
    except ValueError:
        return f"{name} is {_words(value)}, not an array"
    if array.shape != space.shape:
        return f"{name} has shape {array.shape}, its space {space} has {space.shape}"
    if not np.can_cast(array.dtype, _dtype(space), "same_kind"):
        return f"{name} has dtype {array.dtype}, its space {space} has {_dtype(space)}"
    if not strict:
        return None
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return f"{name} is not finite: {_words(value)}"
    if not space.contains(array.astype(_dtype(space)) if space.shape else _dtype(space).type(array)):
        return f"{name} is not in its space {space}: {_words(value)}"
    return None


def rows(batch: Batch, index: Any) -> Batch:
    """The part of a batch at `index` in dim 0."""
    return {key: rows(part, index) for key, part in batch.items()} if isinstance(batch, dict) else batch[index]


def put(batch: Batch, index: Any, part: Batch) -> Batch:
    """A copy of a batch with `part` at `index` in dim 0."""
    if isinstance(batch, dict):
        return {key: put(batch[key], index, part[key]) for key in batch}
    batch = batch.copy()
    batch[index] = part
    return batch


def zeros(space: spaces.Space, *dims: int) -> Batch:
    """A batch of zeros for a plain space, with leading dims."""
    if isinstance(space, spaces.Dict):
        return {key: zeros(part, *dims) for key, part in space.spaces.items()}
    return np.zeros((*dims, *(space.shape or ())), _dtype(space))


def leaves(batch: Batch, *path: str) -> dict[tuple[str, ...], np.ndarray]:
    """The arrays of a batch by their keys."""
    if not isinstance(batch, dict):
        return {path: np.asarray(batch)}
    return {key: x for name, part in batch.items() for key, x in leaves(part, *path, name).items()}


def tree(arrays: dict[tuple[str, ...], np.ndarray]) -> Batch:
    """The batch of which `leaves` gives these arrays."""
    if () in arrays:
        return arrays[()]
    names = dict.fromkeys(path[0] for path in arrays)
    return {name: tree({path[1:]: x for path, x in arrays.items() if path[0] == name}) for name in names}


def _dtype(space: spaces.Space) -> np.dtype:
    return np.dtype(space.dtype if space.dtype is not None else np.float32)


def _words(value: Any) -> str:
    words = repr(value)
    return words if len(words) < 200 else words[:200] + "..."
