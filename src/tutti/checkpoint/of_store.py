"""Checkpoints of a store: what steps and functions save and load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tutti.checkpoint.checkpoints import Checkpoints
from tutti.checkpoint.peer_checkpoint import PeerCheckpoint, opened
from tutti.checkpoint.reader import CheckpointReader
from tutti.exec.tensor_store import TensorStore, check_names


def write_store(
    store: TensorStore,
    checkpoints: Checkpoints,
    number: int,
    known: Mapping[str, Any],
    fill: Callable[[Path], None],
    in_memory: bool,
) -> None:
    """Start a checkpoint of everything placed. known: entries for its manifest. The rest is as for `Step.save`."""
    if not isinstance(checkpoints, Checkpoints):
        raise ValueError(f"checkpoints is {checkpoints!r}: make `tutti.Checkpoints(folder)` once, and save into it")
    labels = {name: stored.label for name, stored in store.tensors.items()}
    checkpoints.save(number, store.held(), {"labels": labels, **known}, fill, in_memory)


def read_store(
    store: TensorStore, folder: str | Path | PeerCheckpoint, exactly: bool
) -> tuple[dict[str, Any], CheckpointReader, int]:
    """Read the placed tensors of a checkpoint. exactly: it must have no others.

    Returns its manifest, its reader, and the bytes read. ValueError changes nothing.
    """
    about, reader = opened(folder)
    held, before = {name: x for name, x in store.held().items() if x.spec.bytes}, reader.bytes
    if exactly:
        check_names(held, reader.tensors)
    reader.load(held)
    return about, reader, reader.bytes - before
