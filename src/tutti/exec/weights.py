"""Weights in safetensors files, as `transformers` writes them. Each rank reads the slices that it holds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from tutti.exec.sharded_tensor import ShardedTensor

NAME, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Wanted:
    """A tensor to read. name: in the model. optional: it is left unchanged if the files lack it."""

    name: str
    held: ShardedTensor
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
            if x.name in slices and tuple(shape := slices[x.name].get_shape()) != x.held.spec.shape:
                raise ValueError(f"{x.name} has {tuple(shape)} in {folder}, {x.held.spec.shape} is wanted")
            if x.name not in slices and not x.optional:
                raise ValueError(
                    f"{folder} has no {x.name!r}. If it uses other names than the model, load it with "
                    "transformers (from_pretrained) before tutti.parallelize"
                )
        found = [x for x in wanted if x.name in slices]
        count = 0
        for x in found:
            for begin, into in x.held.first():
                part = slices[x.name][tuple(slice(i, i + n) for i, n in zip(begin, into.shape, strict=True)) or ...]
                count += part.nbytes
                into.copy_(part)
            x.held.spread()
    return count


def _opened(folder: Path, stack: ExitStack) -> list[Any]:
    """The files of a folder, open until the stack ends."""
    return [stack.enter_context(opened(path)) for path in _files(folder)]


def opened(path: Path) -> Any:
    """A safetensors file as a context manager. Raises ValueError, naming the file, if it is missing or damaged."""
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError:
        raise ValueError(f"{path} is a safetensors file: pip install 'tutti[train]' to read it") from None
    if not path.exists():
        pickled = path.parent / "pytorch_model.bin"
        convert = f": {pickled.name} is a pickle; convert it with from_pretrained(...).save_pretrained(...)"
        raise ValueError(f"there is no file {path}{convert if pickled.exists() else ''}")
    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}. Copy or download it again") from None


def check_weights(folder: Path) -> None:
    """Raise ValueError, naming the file, if a safetensors file of a folder is missing or damaged."""
    if has_weights(folder):
        with ExitStack() as stack:
            _opened(folder, stack)


def _files(folder: Path) -> list[Path]:
    """Names may not lead out of the folder; symbolic links may, as in the cache of the Hugging Face hub: the format of
    safetensors runs nothing."""
    if not (folder / INDEX).exists():
        return [folder / NAME]
    try:
        names = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / INDEX} is damaged: {type(error).__name__}") from None
    if outside := [
        name
        for name in names
        if not isinstance(name, str) or PurePath(name).is_absolute() or ".." in PurePath(name).parts
    ]:
        raise ValueError(f"{folder / INDEX} names {outside[0]!r}, which leads out of the folder: refused")
    return sorted(folder / name for name in names)
