"""Logs for TensorBoard. They are read by people alone, so that a full disk under them does not end training."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Board:
    """Writes scalars to a folder. After an error of the file system it warns once and writes no more.

    step: step of the checkpoint that a run resumes from; later scalars of an earlier process are hidden.
    """

    def __init__(self, folder: Path, step: int | None = None):
        self.folder = folder
        self.writer: Any = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its dependencies use deprecated names
            from torch.utils.tensorboard import SummaryWriter

        def make() -> None:
            self.writer = SummaryWriter(str(folder), purge_step=None if step is None else step + 1)

        self._try(make)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        if self.writer is not None:
            self._try(self.writer.add_scalar, name, value, step)

    def flush(self) -> None:
        if self.writer is not None:
            self._try(self.writer.flush)

    def close(self) -> None:
        if self.writer is not None:
            self._try(self.writer.close)

    def _try(self, work: Callable[..., Any], *args: Any) -> None:
        try:
            work(*args)
        except OSError as error:
            self.writer = None
            warnings.warn(f"no more logs for TensorBoard in {self.folder}: {error.strerror or error}", stacklevel=3)
