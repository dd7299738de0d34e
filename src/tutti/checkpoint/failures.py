"""Failures to write a checkpoint."""

from __future__ import annotations

import shutil
import sys
from typing import Any, TypeGuard


def is_failure(error: BaseException) -> bool:
    """Whether an error is a failure, and no request to end the process."""
    return isinstance(error, Exception) or _of_ranks(error)


def reason(error: BaseException) -> str:
    """Why a checkpoint could not be written, in one line. If several ranks failed, the first."""
    if _of_ranks(error):
        rank, (cause, _) = min(error.failures.items())
        return f"rank {rank}: {reason(cause)}" if len(error.failures) > 1 or rank else reason(cause)
    if isinstance(error, shutil.Error):  # of a tree that was copied: (from, to, why) of each file
        return str(error.args[0][0][-1])
    if isinstance(error, OSError) and (why := error.strerror or getattr(error.__cause__, "strerror", None)):
        return why
    return str(error) or type(error).__name__


def _of_ranks(error: Any) -> TypeGuard[Any]:
    """Whether an error is the `CheckpointException` of torch, which has the errors of all ranks and is no Exception."""
    api = sys.modules.get("torch.distributed.checkpoint.api")  # imported only by those who write
    return api is not None and isinstance(error, api.CheckpointException)
