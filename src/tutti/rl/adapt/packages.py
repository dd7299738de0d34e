"""Packages that adapters need and Tutti does not install by itself."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Package -> what installs it.
INSTALL = {"envpool": "envpool", "dm_control": "dm_control", "pettingzoo": "pettingzoo", "h5py": "h5py",
           "pyarrow": "'tutti[data]'", "PIL": "pillow", "mujoco": "'tutti[rl]'"}  # fmt: skip


def package(name: str) -> Any:
    """A module. Raises ValueError with the remedy where its package is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        missing = (error.name or name).partition(".")[0]
        raise ValueError(f"there is no package {missing}; pip install {INSTALL.get(missing, missing)}") from None
