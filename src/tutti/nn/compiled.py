"""Operators in C++ files of this package, which share `vectors.h`. They are compiled at their first use."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tutti import compat

SHARED = Path(__file__).with_name("vectors.h")


@cache
def has_triton() -> bool:
    """Whether Triton is installed, for kernels on a GPU."""
    return find_spec("triton") is not None


def source(path: Path) -> str:
    """The C++ source of a file, with what it shares and its headers."""
    return with_headers(SHARED) + with_headers(path)


def with_headers(path: Path) -> str:
    """The text of a C++ file with the headers beside it that it includes."""
    return re.sub(
        r'^#include "(\w+\.h)"$', lambda line: path.with_name(line[1]).read_text(), path.read_text(), flags=re.MULTILINE
    )


def operators(path: Path) -> Any:
    """The compiled operators of a file: see its end."""
    return compat.compile_operators(source(path))
