"""LiveStore: a store that is one with the user's objects and counts updates, for steps and functions."""

from __future__ import annotations

import torch

from tutti.exec.stores.live import Live
from tutti.exec.stores.memory_budget import MemoryBudget
from tutti.exec.stores.offload_store import OffloadStore
from tutti.exec.stores.tensor_store import TensorStore
from tutti.exec.stores.transfer_engine import TransferEngine, engine_for
from tutti.exec.stores.updates import Updates
from tutti.plan.plan import Plan


class LiveStore(TensorStore):
    """Tensors of modules, optimizers and other objects. live: the user's tensors; none of those that have been copied.
    updates: number of updates of each parameter that an optimizer has. engine: transfer engine, made with the first
    plan that uses outer tiers."""

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
