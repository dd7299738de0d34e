"""The user's tensors and those of a store are one: what a step writes is in the model, what the user writes is trained.

A tensor that this process holds whole, on its device, is *shared*: the store's part is the memory of the user's tensor.
Any other (one that the plan splits, keeps elsewhere, or rounds from a float32 master) is *remote* (`tracing.remote`):
the user's tensor holds no memory. Its first use assembles its value, a collective if other processes have parts of it,
and it keeps that value until the next step, which begins with whatever the user has written into it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter
from torch.optim import Optimizer

from tutti.exec.runtime import same_everywhere
from tutti.exec.tensor_store import TensorStore
from tutti.launch.heartbeat import HEARTBEAT
from tutti.tracing import optimizers
from tutti.tracing.remote import fetch, home_of, make_remote

COUNT = "step"  # key of an optimizer's state: the number of updates of a parameter


class Counts(Protocol):
    """The numbers of updates, by parameter."""

    def count(self, name: str) -> int: ...
    def recount(self, counts: Mapping[str, int]) -> None: ...


class Live:
    """The tensors of a model and of its optimizer, as a store holds them."""

    def __init__(self, store: TensorStore, optimizer: Optimizer, params: Mapping[str, Parameter], counts: Counts):
        self.store, self.optimizer, self.params, self.counts = store, optimizer, dict(params), counts
        self.tensors: dict[str, Tensor] = {}  # the user's, by the names of the store
        self.in_use: dict[str, Tensor] = {}  # remote ones that have been fetched since the last step
        self.entries: dict[str, dict[str, str]] = {}  # parameter -> key of its optimizer state -> name
        self.filled: set[str] = set()  # parameters of which the optimizer has the entries
        self.counter = optimizers.counter_of(optimizer)

    # -- taking over --------------------------------------------------------------------------------------------------

    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Place rank 0's values of declared tensors, one after another, and make the tensors live."""
        for name, own in tensors:
            if name not in self.store.tensors:
                continue
            value = own.data.to(self.store.device)
            if (same := same_everywhere(value)) is not value:
                value.copy_(same)
            if self._can_share(name, own, value):
                self.store.share(name, value)
            else:
                self.store.place(name, value)
                del value, same
                make_remote(own, self, name)
            self.tensors[name] = own
            kind, _, path = name.partition(":")
            if kind not in ("param", "buffer", "master"):
                self.entries.setdefault(path, {})[kind] = name
        for path in self.entries:
            if isinstance(self.counter, Tensor):
                name = f"{COUNT}:{path}"
                self.tensors[name] = self.counter.detach().clone()
                make_remote(self.tensors[name], self, name)
                self.entries[path][COUNT] = name
        self.fill(path for path in self.entries if self.optimizer.state.get(self.params[path]))

    def _can_share(self, name: str, own: Tensor, value: Tensor) -> bool:
        is_own = own.data_ptr() == value.data_ptr()
        return is_own and self._master(name) is None and self.store.can_share(name, value)

    def _master(self, name: str) -> str | None:
        """The float32 master of a parameter, by the names of the store."""
        kind, _, path = name.partition(":")
        return f"master:{path}" if kind == "param" and f"master:{path}" in self.store.tensors else None

    def fill(self, paths: Iterable[str]) -> None:
        """Put the optimizer state of some parameters into the optimizer."""
        for path in paths:
            state = self.optimizer.state[self.params[path]]
            state.update((key, self.tensors[name]) for key, name in self.entries[path].items())
            self.filled.add(path)

    # -- what remote tensors call -------------------------------------------------------------------------------------

    def fetched(self, name: str, tensor: Tensor) -> Tensor:
        """The full value of a remote tensor, in memory of its own."""
        kind, _, path = name.partition(":")
        self.in_use[name] = tensor
        if kind == COUNT:
            return torch.full((), self.counts.count(path), dtype=tensor.dtype, device=tensor.device)
        with HEARTBEAT.working(f"reads {name}"):
            return self.store.whole(name).to(tensor.device)

    # -- before and after a step --------------------------------------------------------------------------------------

    def absorb(self) -> bool:
        """Take what the user has written since the last step. Returns False, with nothing taken, if a tensor has
        another shape, dtype or device now."""
        parts = self.store.parts[0] if self.store.shared else {}
        moved = [name for name in self.store.shared if self.tensors[name].data_ptr() != parts[name].data_ptr()]
        replaced = [path for path in self.filled if self._is_replaced(path)]
        changed = list(self._changed(moved, replaced))
        if any((x.shape, x.dtype, x.device) != self._kind(name) for name, x in changed):
            return False
        self.fill(replaced)
        counts = {}
        for name, value in changed:
            kind, _, path = name.partition(":")
            if kind == COUNT:
                counts[path] = int(value)
                continue
            if self.store.holds(name, value):
                continue
            self.store.place(name, value)
            if master := self._master(name):
                self.store.place(master, value.to(torch.float32))
        if any(self.counts.count(path) != n for path, n in counts.items()):
            self.counts.recount(counts)
        for name in moved:
            self.tensors[name].data = parts[name]
        return True

    def _kind(self, name: str) -> tuple[Any, ...]:
        """Shape, dtype and device of a tensor."""
        if name.startswith(f"{COUNT}:"):
            x = self.tensors[name]
            return x.shape, x.dtype, x.device
        spec = self.store.tensors[name].spec
        return torch.Size(spec.shape), spec.dtype, self.store.device

    def _changed(self, moved: Iterable[str], replaced: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """The tensors whose values may not be those of the store, and these values.

        moved: shared tensors that have other memory now. replaced: parameters whose state is other tensors now.
        """
        for name in moved:
            yield name, self.tensors[name].data
        for name, tensor in self.in_use.items():
            yield name, fetch(tensor).data
        for path in replaced:
            entries = self.optimizer.state.get(self.params[path], {})
            state = self._fresh(self.params[path]) | entries
            for key, name in self.entries[path].items():
                if entries.get(key) is not self.tensors[name]:
                    yield name, torch.as_tensor(state[key]).to(self.tensors[name].device)

    def _is_replaced(self, path: str) -> bool:
        """Whether the optimizer has other tensors for the state of a parameter, or none."""
        entries = self.optimizer.state.get(self.params[path], {})
        return any(entries.get(key) is not self.tensors[name] for key, name in self.entries[path].items())

    def _fresh(self, parameter: Parameter) -> dict[str, Any]:
        """The state of a parameter before its first update."""
        group = next(group for group in self.optimizer.param_groups if any(p is parameter for p in group["params"]))
        state = optimizers.initial_state(self.optimizer, group, parameter.detach())
        return {**state, COUNT: torch.zeros_like(self.counter) if isinstance(self.counter, Tensor) else 0}

    def release(self) -> None:
        """Free the memory of remote tensors. A step calls it when it has changed them."""
        increment_version(list(self.in_use.values()))
        for name, tensor in self.in_use.items():
            make_remote(tensor, self, name)
        self.in_use = {}

    def stepped(self, updated: Collection[str]) -> None:
        """Note that parameters have been updated."""
        self.release()
        shared = (f"param:{path}" for path in updated)
        increment_version([self.tensors[name] for name in shared if name in self.store.shared])
        if not self.filled.issuperset(updated):
            self.fill(path for path in self.entries if path in updated and path not in self.filled)
        if isinstance(self.counter, int):
            for path in updated:
                self.optimizer.state[self.params[path]][COUNT] = self.counts.count(path)

    def leave(self) -> None:
        """Give all tensors that are still remote here their values: the store is used no more."""
        for tensor in self.tensors.values():
            if home_of(tensor) is self:
                fetch(tensor)
