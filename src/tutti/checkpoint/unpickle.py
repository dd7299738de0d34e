"""Read the two pickles of a checkpoint without executing them: `.metadata`, and the header of a stored tensor.

A pickle names functions and calls them. Here each allowed name stands for a plain record class, created per file. Any
other name raises ValueError. No class of torch is instantiated, and nothing outside the result changes.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any

import torch

DCP = "torch.distributed.checkpoint"
# What torch.distributed.checkpoint writes in torch 2.3 to 2.13 into `.metadata`, besides dtypes.
RECORDS = [
    (f"{DCP}.filesystem", "_StorageInfo"),
    *((f"{DCP}.metadata", name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata",
      "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")),
]  # fmt: skip
PATHS = {"PosixPath": PurePosixPath, "WindowsPath": PureWindowsPath}
PATH_MODULES = ("pathlib", "pathlib._local")  # the latter in Python 3.13
STORAGES = ("Storage", "_UntypedStorage", "UntypedStorage")


def metadata(content: bytes) -> Any:
    """The `.metadata` of a checkpoint, as records with the attributes of torch's classes.

    Raises ValueError for a damaged pickle, or one that names anything but `RECORDS`, torch.Size, dtypes and paths.
    """
    allowed: dict[tuple[str, str], Any] = {row: _record(row[1]) for row in RECORDS}
    allowed |= {(module, name): kind for module in PATH_MODULES for name, kind in PATHS.items()}
    allowed["torch.serialization", "_get_layout"] = lambda name: str(name)
    allowed["torch", "Size"] = torch.Size
    return _load(content, allowed, ".metadata")


def tensor_header(content: bytes) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Offset, sizes and strides, in elements, of the tensor with this `data.pkl` (`torch.save`).

    Raises ValueError for anything but one dense tensor.
    """

    def rebuild(_storage: Any, offset: int, sizes: tuple, strides: tuple, *_: Any) -> SimpleNamespace:
        return SimpleNamespace(offset=offset, sizes=sizes, strides=strides)

    def parameter(data: Any, *_: Any) -> Any:
        return data

    allowed: dict[tuple[str, str], Any] = {
        ("torch._utils", "_rebuild_tensor_v2"): rebuild,
        ("torch._utils", "_rebuild_tensor_v3"): rebuild,  # dtypes without a storage class
        ("torch._utils", "_rebuild_parameter"): parameter,
        ("collections", "OrderedDict"): OrderedDict,
        ("torch", "Size"): tuple,
        ("torch.serialization", "_get_layout"): lambda name: str(name),
    }
    tensor = _load(content, allowed, "a stored tensor", storages=True)
    numbers = (getattr(tensor, "sizes", None), getattr(tensor, "strides", None))
    if not all(isinstance(row, tuple) and all(type(x) is int and x >= 0 for x in row) for row in numbers):
        raise ValueError("a stored tensor is not dense")
    if type(tensor.offset) is not int or tensor.offset < 0 or len(tensor.sizes) != len(tensor.strides):
        raise ValueError("a stored tensor is not dense")
    return tensor.offset, tensor.sizes, tensor.strides


def _record(name: str) -> type:
    """A class without behaviour: a dict state becomes attributes, any other state the attribute `state`.

    Equality is identity, because dict keys are hashed before their attributes are set.
    """

    def take(self: Any, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})

    return type(name, (), {"__setstate__": take, "__new__": lambda kind, *args: object.__new__(kind),
                           "__init__": lambda self, *args: None})  # fmt: skip


def _load(content: bytes, allowed: Mapping[tuple[str, str], Any], what: str, storages: bool = False) -> Any:
    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) in allowed:
                return allowed[module, name]
            if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
                return dtype
            if storages and module in ("torch", "torch.storage") and name.endswith(STORAGES):
                return name
            raise _Refused(f"refused: {what} is a pickle that names {module}.{name}, which no checkpoint needs; "
                           "loading it would run that code")  # fmt: skip

        def persistent_load(self, pid: Any) -> Any:
            if not storages:
                raise _Refused(f"refused: {what} refers to objects outside the file")
            return pid

    read: Callable[[], Any] = Reader(io.BytesIO(content)).load
    try:
        return read()
    except _Refused:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise ValueError(f"{what} is damaged: {type(error).__name__}: {error}") from None


class _Refused(ValueError):
    """The pickle uses a name that is not allowed."""
