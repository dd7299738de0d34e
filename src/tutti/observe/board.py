"""Logs for TensorBoard. They are read by people alone, so that a full disk under them does not end training."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any


class Board:
    """Writes scalars to a folder. After an error of the file system it warns once and writes no more.

    step: of the checkpoint that a run resumes from; later scalars of an earlier process are hidden.
    """

    def __init__(self, folder: Path, step: int | None = None):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its dependencies use deprecated names
            from torch.utils.tensorboard import SummaryWriter

            self.folder = folder
            self.writer: Any = SummaryWriter(str(folder), purge_step=None if step is None else step + 1)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self._try("add_scalar", name, value, step)

    def flush(self) -> None:
        self._try("flush")

    def close(self) -> None:
        self._try("close")

    def _try(self, method: str, *args: Any) -> None:
        if self.writer is None:
            return
        try:
            getattr(self.writer, method)(*args)
        except OSError as error:
            self.writer = None
            warnings.warn(f"no more logs for TensorBoard in {self.folder}: {error.strerror or error}", stacklevel=3)
