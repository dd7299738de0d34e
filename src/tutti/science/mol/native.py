"""The C++ files of this package as one library, compiled at first use and called through ctypes.

Tensors are passed by address; the callers see to it that they are contiguous float64 or int64.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from tutti import compat

FILES = ("simd.h", "vector_math.h", "neighbors.cpp", "pairwise.cpp", "tuples.cpp", "pme.cpp", "dynamics.cpp")
P, N, D = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "neighbors_new": (P, [D, D, N, N, N, N, P, P]),
    "neighbors_delete": (None, [P]),
    "neighbors_divide": (None, [P, N, P]),
    "neighbors_motion": (None, [P, P, P, P]),
    "neighbors_update": (N, [P, P, P, N]),
    "neighbors_count": (N, [P]),
    "neighbors_copy": (None, [P, P, P, P, P]),
    "pairwise_add": (None, [P, P, P, P, P, P, P, N]),
    "tuples_add": (None, [N, P, N, N, N, P, P, P, P, P]),
    "pme_spread": (None, [N, N, N, P, P, P, P, P, N]),
    "pme_collect": (None, [N, N, N, P, P, P, P, P, P, N]),
    "normal_numbers": (None, [N, N, N, N, N, N, P, P]),
    "chain_half_step": (None, [N, N, D, D, P, P, P, P, P, P]),
    "mailbox_post": (None, [P, N]),
    "mailbox_wait": (N, [P, N, N, N]),
    "constrain": (N, [P, N, N, N, P, P, P, D, D, N]),
}


@cache
def library(plain: bool = False) -> ctypes.CDLL:
    """plain: without AVX-512, as on processors that lack it."""
    source = "".join(Path(__file__).with_name(name).read_text() for name in FILES)
    loaded = compat.compile_cpp("#define PLAIN\n" + source if plain else source)
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded
