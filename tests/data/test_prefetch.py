import doctest
import threading
from collections import OrderedDict, namedtuple
from concurrent import futures
from itertools import count
from types import MappingProxyType

import pytest
import torch

from tutti.data import prefetch
from tutti.data.prefetch import Prefetch


def wait(semaphore):
    assert semaphore.acquire(timeout=60)


class Gate:
    """A source of which each batch is let through; `begins` tells of each that is begun."""

    def __init__(self):
        self.open, self.begins = threading.Semaphore(0), threading.Semaphore(0)
        self.begun: list[int] = []

    def __call__(self, step):
        self.begun.append(step)
        self.begins.release()
        wait(self.open)
        return {"x": torch.tensor(step)}


def test_a_source_that_is_faster_than_the_step_has_each_batch_ready_before_it_is_asked_for():
    with Prefetch(lambda step: step, range(50)) as batches:
        for step in range(50):
            done, _ = futures.wait(list(batches._ahead), 60)  # what a step that takes longer would do
            assert len(done) == min(2, 50 - step)
            assert next(batches) == step
        assert batches.late == 0 and next(batches, None) is None


def test_no_more_is_made_ahead_than_was_asked_for():
    source = Gate()
    source.open.release(9)
    with Prefetch(source, range(9), ahead=3) as batches:
        for step in range(7):
            futures.wait(list(batches._ahead), 60)
            assert source.begun == list(range(step + 3))
            assert int(next(batches)["x"]) == step


def test_the_wait_for_a_slow_source_is_told(monkeypatch):
    """By a clock that goes on two seconds with each batch; none is made before it is asked for."""
    now, asked, reads = [0.0], threading.Semaphore(0), count()

    def clock():
        value = now[0]
        if next(reads) % 2 == 0:  # the wait begins
            asked.release()
        return value

    def make(step):
        wait(asked)
        now[0] += 2.0
        return step

    monkeypatch.setattr(prefetch, "perf_counter", clock)
    with Prefetch(make, range(4)) as batches:
        assert [(batch, batches.waited) for batch in batches] == [(step, 2.0) for step in range(4)]
        assert batches.late == 4


def test_what_the_source_raises_is_raised_at_its_step():
    def make(step):
        if step == 1:
            raise OSError("the disk is gone")
        return step

    batches = Prefetch(make, range(3))
    assert next(batches) == 0
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
    batches.close()


def test_closing_makes_no_more_and_ends_the_thread():
    source = Gate()
    batches = Prefetch(source, range(100), ahead=5)
    wait(source.begins)
    last, cancelled = batches._ahead[-1], threading.Event()
    last.add_done_callback(lambda _: cancelled.set())
    closing = threading.Thread(target=batches.close)
    closing.start()
    assert cancelled.wait(60)
    source.open.release()
    closing.join(60)
    assert last.cancelled() and source.begun == [0]
    assert not any(thread.name.startswith("prefetch") for thread in threading.enumerate())


def test_a_batch_is_made_ahead_or_not_at_all():
    with pytest.raises(ValueError, match="ahead is 0; it must be at least 1"):
        Prefetch(int, range(3), ahead=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory is for a GPU")
def test_batches_for_a_gpu_lie_in_pinned_memory():
    with Prefetch(lambda step: {"x": torch.ones(3), "y": (torch.ones(2),)}, range(2)) as batches:
        batch = next(batches)
    assert batch["x"].is_pinned() and batch["y"][0].is_pinned()


def test_the_example():
    assert doctest.testmod(prefetch).failed == 0


def test_batches_after_ones_that_could_not_be_made():
    def make(step):
        if step in (1, 2):
            raise OSError(step)
        return step

    outcomes = []
    with Prefetch(make, range(6), ahead=2) as batches:
        for _ in range(6):
            try:
                outcomes.append(next(batches))
            except OSError as error:
                outcomes.append(str(error))
    assert outcomes == [0, "1", "2", 3, 4, 5]


def test_trees_keep_their_types_when_they_are_pinned(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x + 1)
    Pair = namedtuple("Pair", "x y")
    assert prefetch.pinned(Pair(torch.tensor(1), [OrderedDict(z=torch.tensor(2)), "text"])) == Pair(
        torch.tensor(2), [OrderedDict(z=torch.tensor(3)), "text"]
    )
    assert prefetch.pinned(MappingProxyType({"x": torch.tensor(4)})) == {"x": torch.tensor(5)}


def test_a_source_that_ends_too_early_is_told():
    source = iter([1, 2])
    batches = Prefetch(lambda step: next(source), range(3))
    assert [next(batches), next(batches)] == [1, 2]
    with pytest.raises(RuntimeError, match="no batch for step 2"):
        next(batches)
