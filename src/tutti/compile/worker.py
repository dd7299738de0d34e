"""The process of `tutti.compile.background`: compile the functions on the standard input."""

from __future__ import annotations

import json
import os
import pkgutil
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch

import tutti.nn
from tutti import compat
from tutti.ir.portable import unpacked


def register_operators() -> None:
    """Import all modules of `tutti.nn`, which define operators."""
    for module in pkgutil.walk_packages(tutti.nn.__path__, "tutti.nn."):
        with suppress(ModuleNotFoundError):  # triton
            import_module(module.name)


def main(text: str) -> None:
    """Compile functions as `tutti.compile.background` describes them."""
    os.nice(10)
    compat.use_compilers(max(1, len(os.sched_getaffinity(0)) // 2))  # a step waits for its slowest core
    job: dict[str, Any] = json.loads(text)
    torch.set_num_threads(job["threads"])
    register_operators()
    if any(device.startswith("cpu") for row in job["functions"] for *_, device in row["args"]):
        compat.get_compiler_ready(torch.device("cpu"))
    with compat.compilers_beside_each_other():
        for row in job["functions"]:
            with compat.fake_mode():
                args = [torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device=device)
                        for shape, strides, dtype, device in row["args"]]  # fmt: skip
            with suppress(AttributeError):  # an operator that the user's script registers
                compat.compile_graph(unpacked(row["nodes"]), args)


if __name__ == "__main__":
    main(sys.stdin.read())
