"""Compression of models: `tutti.compress(model, recipe)`. The package is the verb."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from tutti.compress.adapters import with_adapters
from tutti.compress.compressor import Compressed, CompressionReport
from tutti.compress.folder import load
from tutti.compress.recipe import Distill, LowRank, Mixed, Prune, Quantize, Recipe, Rotate, Shrink, parse
from tutti.compress.verb import compress
from tutti.nn.quantized.scheme import Scheme

__all__ = [
    "Compressed",
    "CompressionReport",
    "Distill",
    "LowRank",
    "Mixed",
    "Prune",
    "Quantize",
    "Recipe",
    "Rotate",
    "Scheme",
    "Shrink",
    "compress",
    "load",
    "parse",
    "with_adapters",
]  # fmt: skip


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Compressed:
        return compress(*args, **kwargs)


_Callable.__call__.__doc__ = compress.__doc__
sys.modules[__name__].__class__ = _Callable
