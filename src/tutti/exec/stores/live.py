"""The user's tensors and those of a store are one: what a step writes is in the model, what the user writes is trained.

A tensor that this process holds whole, on its device, is *shared*: the store's part is the memory of the user's tensor.
Any other (one that the plan splits, keeps elsewhere, or rounds from a float32 master) is *remote*
(`tracing.trace.remote`): the user's tensor holds no memory. Its first use assembles its value, a collective if other
processes have parts of it, and it keeps that value until the next step, which begins with whatever the user has written
into it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter
from torch.optim import Optimizer

from tutti.exec.runtimes.runtime import same_everywhere
from tutti.exec.stores.tensor_store import TensorStore
from tutti.exec.stores.updates import Updates
from tutti.ir.kind import Kind, path_of, split_name
from tutti.launch.heartbeat import HEARTBEAT
from tutti.tracing import optimizers
from tutti.tracing.trace.remote import fetch, home_of, make_ordinary, make_remote, strides_of

COUNT = "step"  # key of an optimizer's state: the number of updates of a parameter
OF_MODEL = ("param", "buffer", "master", "cache")  # kinds of tensors that are no state of an optimizer
Owners = Mapping[str, tuple[Optimizer, Parameter]]


class Live:
    """The tensors of modules, optimizers and other objects, as a store holds them.

    owners: parameter name -> its optimizer, and the parameter itself.
    """

    def __init__(self, store: TensorStore, owners: Owners, counts: Updates):
        self.store, self.owners, self.counts = store, owners, counts
        self.tensors: dict[str, Tensor] = {}  # the user's, by the names of the store
        self.in_use: dict[str, Tensor] = {}  # remote ones that have been fetched since the last step
        self.entries: dict[str, dict[str, str]] = {}  # parameter -> key of its optimizer state -> name
        self.filled: set[str] = set()  # parameters of which the optimizer has the entries
        self.counters: dict[Optimizer, Tensor | int | None] = {}  # what optimizers keep as numbers of updates

    # -- taking over --------------------------------------------------------------------------------------------------

    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Place rank 0's values of declared tensors, one after another, and make the tensors live."""
        fresh = set()
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
            kind, path = split_name(name)
            if kind not in OF_MODEL:
                self.entries.setdefault(path, {})[kind] = name
                fresh.add(path)
        for path in fresh:
            if isinstance(counter := self._counter(path), Tensor) and COUNT not in self.entries[path]:
                name = f"{COUNT}:{path}"
                self.tensors[name] = counter.detach().clone()
                make_remote(self.tensors[name], self, name)
                self.entries[path][COUNT] = name
        self.fill(path for path in fresh if self._state(path) or self.counts[path])

    def _can_share(self, name: str, own: Tensor, value: Tensor) -> bool:
        is_own = own.data_ptr() == value.data_ptr() and not own.is_inference()
        return is_own and self._master(name) is None and self.store.can_share(name, value)

    def _master(self, name: str) -> str | None:
        """The float32 master of a parameter, by the names of the store."""
        kind, path = split_name(name)
        return Kind.MASTER.at(path) if kind == Kind.PARAM and Kind.MASTER.at(path) in self.store.tensors else None

    def _state(self, path: str) -> dict[str, Any]:
        """What the optimizer has as state of a parameter; {} if nothing."""
        optimizer, parameter = self.owners[path]
        return optimizer.state.get(parameter, {})

    def _counter(self, path: str) -> Tensor | int | None:
        optimizer = self.owners[path][0]
        if optimizer not in self.counters:
            self.counters[optimizer] = optimizers.counter_of(optimizer)
        return self.counters[optimizer]

    def fill(self, paths: Iterable[str]) -> None:
        """Put the optimizer state of some parameters into their optimizers."""
        for path in paths:
            optimizer, parameter = self.owners[path]
            optimizer.state[parameter].update((key, self.tensors[name]) for key, name in self.entries[path].items())
            self.filled.add(path)

    # -- what remote tensors call -------------------------------------------------------------------------------------

    def fetched(self, name: str, tensor: Tensor) -> Tensor:
        """The full value of a remote tensor, in memory of its own."""
        kind, path = split_name(name)
        self.in_use[name] = tensor
        if kind == COUNT:
            return torch.full((), self.counts[path], dtype=tensor.dtype, device=tensor.device)
        with HEARTBEAT.working(f"reads {name}"):
            return self.store.whole(name).to(tensor.device)

    # -- before and after a step --------------------------------------------------------------------------------------

    def absorb(self) -> set[str]:
        """Take what the user has written since the last step. Returns the names of tensors that have another shape,
        dtype or device now; if there are any, nothing has been taken."""
        parts = self.store.parts[0] if self.store.shared else {}
        moved = [name for name in self.store.shared if self.tensors[name].data_ptr() != parts[name].data_ptr()]
        replaced = [path for path in self.entries if self._is_replaced(path)]
        changed = list(self._changed(moved, replaced))
        if converted := {name for name, x in changed if (x.shape, x.dtype, x.device) != self._kind(name)}:
            return converted
        self.fill(replaced)
        counts = {}
        for name, value in changed:
            kind, path = split_name(name)
            if kind == COUNT:
                counts[path] = int(value)
                continue
            if self.store.holds(name, value):
                continue
            self.store.place(name, value)
            if master := self._master(name):
                self.store.place(master, value.to(torch.float32))
        if any(self.counts[path] != n for path, n in counts.items()):
            self.counts.recount(counts)
        for name in moved:
            self.tensors[name].data = parts[name]
        return set()

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
            entries = self._state(path)
            state = self._fresh(path) | entries
            for key, name in self.entries[path].items():
                if entries.get(key) is not self.tensors[name]:
                    yield name, torch.as_tensor(state[key]).to(self.tensors[name].device)

    def _is_replaced(self, path: str) -> bool:
        """Whether the optimizer has other tensors for the state of a parameter, or has them no more."""
        state = self._state(path)
        if not state and path not in self.filled:
            return False
        return any(state.get(key) is not self.tensors[name] for key, name in self.entries[path].items())

    def _fresh(self, path: str) -> dict[str, Any]:
        """The state of a parameter before its first update."""
        optimizer, parameter = self.owners[path]
        group = next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
        state = optimizers.initial_state(optimizer, group, parameter.detach())
        counter = self._counter(path)
        return {**state, COUNT: torch.zeros_like(counter) if isinstance(counter, Tensor) else 0}

    def release(self) -> None:
        """Free the memory of remote tensors. A step calls it when it has changed them."""
        increment_version(list(self.in_use.values()))
        for name, tensor in self.in_use.items():
            make_remote(tensor, self, name)
        self.in_use = {}

    def stepped(self, names: Iterable[str], updated: Collection[str] = ()) -> None:
        """Note that a step has changed tensors. updated: the parameters that optimizers have updated."""
        self.release()
        increment_version([self.tensors[name] for name in names if name in self.store.shared])
        if not self.filled.issuperset(updated):
            self.fill(path for path in self.entries if path in updated and path not in self.filled)
        for path in updated:
            if path in self.owners and isinstance(self._counter(path), int):
                self.owners[path][0].state[self.owners[path][1]][COUNT] = self.counts[path]

    # -- when the store is laid out anew, or used no more --------------------------------------------------------------

    def moved(self, name: str) -> None:
        """Note that the store has replaced the part of a tensor: it is shared no more."""
        if name in self.tensors and home_of(self.tensors[name]) is not self:
            increment_version([self.tensors[name]])
            make_remote(self.tensors[name], self, name)

    def share_again(self) -> None:
        """Share what is remote and this process now holds whole."""
        for name, own in self.tensors.items():
            part = self.store.parts[0].get(name)
            if part is None or home_of(own) is not self or self._master(name) or strides_of(own) != part.stride():
                continue
            if own.device == part.device and self.store.can_share(name, part):
                make_ordinary(own, part)
                self.store.share(name, part)

    def leave(self, names: Collection[str] | None = None) -> None:
        """Give tensors that are still remote here their values: the store has them no more. By default all."""
        for name in list(self.tensors if names is None else names):
            tensor = self.tensors.pop(name)
            if home_of(tensor) is self:
                fetch(tensor)
            self.in_use.pop(name, None)
            self.store.shared.discard(name)

    def forget(self, names: Collection[str]) -> None:
        """`leave` these tensors, and what optimizers have of the parameters among them. The store drops them."""
        paths = {path for kind, path in map(split_name, names) if kind not in (Kind.BUFFER, Kind.CACHE)}
        left = {name for name in self.tensors if name in names or path_of(name) in paths}
        self.leave(left)
        self.store.drop(left)
        for path in paths:
            self.entries.pop(path, None)
            self.filled.discard(path)
