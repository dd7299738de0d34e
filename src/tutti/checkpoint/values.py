"""Files of `torch.save` that hold values only: tensors, NumPy arrays, numbers, strings and containers of them."""

from __future__ import annotations

import io
import re
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import numpy as np
import torch

_core: Any = getattr(np, "_core", None) or np.core  # numpy 2 and 1
_ARRAYS = [_core.multiarray._reconstruct, _core.multiarray.scalar, np.ndarray, np.dtype,
           *{type(np.dtype(code)) for code in "?bBhHiIlLqQefdgFD"}]  # fmt: skip


def read_values(path: str | Path) -> Any:
    """Read a file of `torch.save` to the CPU without running code.

    Raises ValueError, naming the file, if it is damaged or names any other class or function than those of values.
    """
    if not is_zipfile(path):
        Path(path).stat()  # raises FileNotFoundError
        raise ValueError(f"{path} is damaged, or no file of torch.save")
    try:
        return _load(path)
    except UnpicklingError as error:
        raise ValueError(f"{path} holds {_named(error)}, and reading that could run code: refused") from None
    except (RuntimeError, EOFError, LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}") from None


def write_values(values: Any, path: str | Path) -> None:
    """Write a file that `read_values` reads. Raises ValueError for values of other classes; nothing is written then."""
    buffer = io.BytesIO()
    torch.save(values, buffer)
    buffer.seek(0)
    try:
        _load(buffer)
    except UnpicklingError as error:
        raise ValueError(
            f"{path} is not written: the values hold {_named(error)}, which reading would refuse"
        ) from None
    Path(path).write_bytes(buffer.getbuffer())


def _load(file: Any) -> Any:
    with torch.serialization.safe_globals(_ARRAYS):
        return torch.load(file, map_location="cpu", weights_only=True)


def _named(error: UnpicklingError) -> str:
    """The class or function that torch refuses, as its message names it."""
    name = re.search(r"GLOBAL (\S+)|(?:class|type) (\S+)", str(error))
    return next(filter(None, name.groups())) if name else "more than values"
