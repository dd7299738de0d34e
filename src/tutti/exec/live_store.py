"""LiveStore: a store that is one with the user's objects and counts updates, for steps and functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tutti.checkpoint.checkpoints import Checkpoints
from tutti.checkpoint.peer_checkpoint import PeerCheckpoint, opened
from tutti.checkpoint.reader import CheckpointReader
from tutti.exec.live import Live
from tutti.exec.memory_budget import MemoryBudget
from tutti.exec.offload_store import OffloadStore
from tutti.exec.tensor_store import TensorStore, check_names
from tutti.exec.transfer_engine import TransferEngine, engine_for
from tutti.exec.updates import Updates
from tutti.plan.plan import Plan


class LiveStore(TensorStore):
    """Tensors of modules, optimizers and other objects. live: the user's tensors; none of those that have been copied.
    updates: of each parameter that an optimizer has. engine: made with the first plan that uses outer tiers."""

    def __init__(self, device: torch.device, offload_store: OffloadStore | None = None):
        super().__init__(device, offload_store)
        self.updates = Updates()
        self.live = Live(self, {}, self.updates)
        self.engine: TransferEngine | None = None

    def prepare(self, plan: Plan, memory: int | None = None) -> None:
        """Use the mesh of a plan, if there is none yet, and the tiers. memory: limit of each device, in bytes."""
        if not self.mesh:
            self.spread(plan.mesh)
        if plan.tiers and self.engine is None:
            self.engine = engine_for(self.device, self.offload_store)
        if memory is not None:
            self.budgets = [MemoryBudget(self.offload_store, memory) for _ in self.runtime.ranks]
            for budget in self.budgets if self.engine else ():
                budget.settle = self.engine.settle  # pyright: ignore[reportOptionalMemberAccess]

    def wholes(self) -> dict[str, torch.Tensor]:
        """All tensors in full, on the CPU. Every rank of a job must call it."""
        return {name: self.whole(name) for name in self.tensors}

    def replaced(self) -> None:
        """Note that values and numbers of updates have been loaded."""
        self.live.stepped(self.tensors, {name for name, n in self.updates.items() if n})

    def write(
        self,
        checkpoints: Checkpoints,
        number: int,
        known: Mapping[str, Any],
        fill: Callable[[Path], None],
        in_memory: bool,
    ) -> None:
        """Start a checkpoint. known: entries for its manifest."""
        if not isinstance(checkpoints, Checkpoints):
            raise ValueError(f"checkpoints is {checkpoints!r}: make `tutti.Checkpoints(folder)` once, and save into it")
        labels = {name: stored.label for name, stored in self.tensors.items()}
        checkpoints.save(number, self.held(), {"labels": labels, **known}, fill, in_memory)

    def read(self, folder: str | Path | PeerCheckpoint, exactly: bool) -> tuple[dict[str, Any], CheckpointReader, int]:
        """Read the placed tensors of a checkpoint. exactly: it must have no others.

        Returns its manifest, its reader, and the bytes read. ValueError changes nothing.
        """
        about, reader = opened(folder)
        held, before = {name: x for name, x in self.held().items() if x.spec.bytes}, reader.bytes
        if exactly:
            check_names(held, reader.tensors)
        reader.load(held)
        return about, reader, reader.bytes - before
