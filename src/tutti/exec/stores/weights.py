"""Weights in safetensors files, as `transformers` writes them. Each rank reads the slices that it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.exec.stores.sharded_tensor import ShardedTensor
from tutti.weight_files import INDEX, NAME, files_of, opened


@dataclass(frozen=True)
class Wanted:
    """A tensor to read. name: in the model. optional: it is left unchanged if the files lack it."""

    name: str
    tensor: ShardedTensor
    optional: bool = False


def has_weights(folder: Path) -> bool:
    return (folder / NAME).exists() or (folder / INDEX).exists()


def tensor_names(folder: Path) -> set[str]:
    """The names of the tensors in a folder."""
    with ExitStack() as stack:
        return {name for file in _opened(folder, stack) for name in file.keys()}  # noqa: SIM118


def load_weights(folder: Path, wanted: Sequence[Wanted], aliases: Mapping[str, str]) -> int:
    """Read the local blocks of tensors. Returns the bytes read.

    aliases: other names of tied tensors -> the first. Values are cast to the wanted dtype. Raises ValueError for a
    missing tensor or another shape; nothing has been read then.
    """
    with ExitStack() as stack:
        slices: dict[str, Any] = {}
        for file in _opened(folder, stack):
            slices |= {aliases.get(name, name): file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        for x in wanted:
            if x.name in slices and tuple(shape := slices[x.name].get_shape()) != x.tensor.spec.shape:
                raise ValueError(f"{x.name} has {tuple(shape)} in {folder}, {x.tensor.spec.shape} is wanted")
            if x.name not in slices and not x.optional:
                raise ValueError(
                    f"{folder} has no {x.name!r}. If it uses other names than the model, load it with "
                    "transformers (from_pretrained) before tutti.parallelize"
                )
        present = [x for x in wanted if x.name in slices]
        count = 0
        for x in present:
            for begin, into in x.tensor.first():
                part = slices[x.name][tuple(slice(i, i + n) for i, n in zip(begin, into.shape, strict=True)) or ...]
                count += part.nbytes
                into.copy_(part)
            x.tensor.spread()
    return count


def _opened(folder: Path, stack: ExitStack) -> list[Any]:
    """The files of a folder, open until the stack ends."""
    return [stack.enter_context(opened(path)) for path in files_of(folder)]


def check_weights(folder: Path) -> None:
    """Raise ValueError, naming the file, if a safetensors file of a folder is missing or damaged."""
    if has_weights(folder):
        with ExitStack() as stack:
            _opened(folder, stack)
