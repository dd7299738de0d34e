"""Folders of safetensors files, as `transformers` writes them."""

from __future__ import annotations

import json
from pathlib import Path, PurePath
from typing import Any

NAME, INDEX = "model.safetensors", "model.safetensors.index.json"


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


def files_of(folder: Path) -> list[Path]:
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
