"""Checkpoints of a store: what steps and functions save and load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tutti.checkpoint.checkpoints import Checkpoints
from tutti.checkpoint.peer_checkpoint import PeerCheckpoint, opened
from tutti.checkpoint.reader import CheckpointReader
from tutti.exec.stores.tensor_store import TensorStore, check_names


def write_store(
    store: TensorStore,
    checkpoints: Checkpoints,
    number: int,
    manifest: Mapping[str, Any],
    fill: Callable[[Path], None],
    in_memory: bool,
) -> None:
    """Start a checkpoint of everything placed. manifest: entries for it. The rest is as for `Step.save`."""
    if not isinstance(checkpoints, Checkpoints):
        raise ValueError(f"checkpoints is {checkpoints!r}: make `tutti.Checkpoints(folder)` once, and save into it")
    labels = {name: stored.label for name, stored in store.tensors.items()}
    checkpoints.save(number, store.sharded(), {"labels": labels, **manifest}, fill, in_memory)


def read_store(
    store: TensorStore, folder: str | Path | PeerCheckpoint, exactly: bool
) -> tuple[dict[str, Any], CheckpointReader, int]:
    """Read the placed tensors of a checkpoint. exactly: it must have no others.

    Returns its manifest, its reader, and the bytes read. ValueError changes nothing.
    """
    about, reader = opened(folder)
    parts, before = {name: x for name, x in store.sharded().items() if x.spec.bytes}, reader.bytes
    if exactly:
        check_names(parts, reader.tensors)
    reader.load(parts)
    return about, reader, reader.bytes - before
