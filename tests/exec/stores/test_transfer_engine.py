"""Who carries: what the host computes for a device that works off a queue is in time, and in order."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import tutti
import zoo
from cases import slow
from tutti.exec.stores import live_store as module
from tutti.exec.stores.offload_store import OffloadStore
from tutti.exec.stores.transfer_engine import Queued
from tutti.lower.overlap import bucket
from tutti.plan.tier import HOST


class Late:
    """A stream that begins to copy only when somebody waits for it, or three are asked for. The device itself computes
    at once, and nobody else writes into its memory while it is copied."""

    def __init__(self, offload_store):
        self.offload_store, self.lock = offload_store, threading.Lock()
        self.pending: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self.asked = self.done = 0

    def empty_like(self, x):
        return torch.full_like(x, float("nan") if x.is_floating_point() else -1)

    def copy(self, to, x, after=None):
        with self.lock:
            self.pending.append((to, x if self.offload_store.holds(x) else x.clone()))
            self.asked += 1
        self.work(self.asked - 2)
        return self.copied()

    def work(self, until):
        with self.lock, torch.no_grad():
            while self.done < until:
                to, x = self.pending.popleft()
                to.copy_(x)
                self.done += 1

    def now(self):
        return None

    def copied(self):
        return SimpleNamespace(synchronize=partial(self.work, self.asked))

    def wait(self, event):
        event.synchronize()


def queued(offload_store):
    return Queued(offload_store, Late(offload_store))  # pyright: ignore[reportArgumentType]


def beside_a_host(count: int = 1) -> tutti.Cluster:
    """Devices that compute on the CPU, and have a host outside of them."""
    cluster = tutti.Cluster.parse(f"cpu:{count}")
    return tutti.Cluster(replace(cluster.device, name="accelerator"), cluster.levels)


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
}


def trained(plan, optimizer, count=1, level="O0", **options):
    model = zoo.llama(2)
    step = tutti.parallelize(model, OPTIMIZERS[optimizer](model.parameters()), zoo.tokens(4), plan=plan, level=level,
                             cluster=beside_a_host(count), **options)  # fmt: skip
    losses = [step(zoo.tokens(4)).item() for _ in range(3)]
    return step, losses, step.training_state()


@pytest.mark.parametrize(("plan", "plain", "count", "optimizer", "options"), [
    slow("offload", "single", 1, "adamw", {}),
    slow("offload2", "single", 1, "adamw", {"level": "O2"}),
    ("offload3", "single", 1, "adamw", {"accumulate": 2}),
    slow("offload2", "single", 1, "momentum", {"clip_norm": 0.5}),
    slow("zero1xoffload", "zero1", 2, "adamw", {}),
    ("tp2xoffload3", "tp2", 2, "momentum", {}),
    ("pp2xoffload2", "pp2", 2, "adamw", {"accumulate": 2}),
])  # fmt: skip
def test_a_host_computes_the_same_bits_beside_its_device(plan, plain, count, optimizer, options, monkeypatch):
    _, losses, state = trained(plain, optimizer, count, **options)
    engines: list[Queued] = []
    monkeypatch.setattr(
        module, "engine_for", lambda device, offload_store: engines.append(queued(offload_store)) or engines[0]
    )
    step, ours, after = trained(plan, optimizer, count, **options)
    assert set(step.plan.tiers.values()) == {HOST} and engines[0].stream.asked > 0
    assert ours == losses and all(torch.equal(after[name], state[name]) for name in state)


def test_what_goes_wrong_on_the_host_is_raised_when_all_is_settled():
    engine = queued(OffloadStore())

    def fail(x):
        raise OSError("no room")

    engine.compute(fail, torch.ones(2))
    with pytest.raises(OSError, match="no room"):
        engine.settle()
    engine.settle()


def test_what_is_gathered_is_what_a_slow_host_has_updated(monkeypatch):
    """Each parameter in a bucket of its own: nothing but its update lies between it and the gather."""

    class Slow(Queued):
        def compute(self, function, *args, **kwargs):
            def late(*args, **kwargs):
                assert not threading.Event().wait(0.005)
                return function(*args, **kwargs)

            return super().compute(late, *args, **kwargs)

    monkeypatch.setattr(bucket, "BUCKET", 1)
    _, losses, state = trained("zero1", "adamw", 2)
    monkeypatch.setattr(module, "engine_for", lambda device, offload_store: Slow(offload_store, Late(offload_store)))  # pyright: ignore
    _, ours, after = trained("zero1xoffload", "adamw", 2)
    assert ours == losses and all(torch.equal(after[name], state[name]) for name in state)
