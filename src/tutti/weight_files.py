"""Folders of safetensors files, as `transformers` writes them."""

from __future__ import annotations

import json
from pathlib import Path, PurePath
from typing import Any

NAME, INDEX = "model.safetensors", "model.safetensors.index.json"
ZIP, PICKLE = b"PK\x03\x04", b"\x80"  # how files of torch.save, and of pickle, begin


def opened(path: Path) -> Any:
    """A safetensors file as a context manager. No more than its header is read, and nothing in it is run.

    Raises ValueError, naming the file and the remedy, if it is missing, damaged, a pickle or of another kind.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError:
        raise ValueError(f"{path} is a safetensors file: pip install 'tutti[train]' to read it") from None
    if not path.is_file():
        pickled = path.parent / "pytorch_model.bin"
        convert = f": {pickled.name} is a pickle; convert it with from_pretrained(...).save_pretrained(...)"
        raise ValueError(f"there is no file {path}{convert if pickled.exists() else ''}")
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError, UnicodeDecodeError) as error:
        why = str(error)
    with path.open("rb") as file:
        start = file.read(9)
    # 0x80 may also be the lowest byte of the length of a header, which begins with a brace
    if start.startswith(ZIP) or (start.startswith(PICKLE) and start[8:] != b"{"):
        raise ValueError(f"{path} is a pickle, or an archive that may hold one, as torch.save writes, and reading it "
                         "could run code: refused. Write its tensors with safetensors.torch.save_file")  # fmt: skip
    raise ValueError(f"{path} is damaged: {why}. Copy or download it again")


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
