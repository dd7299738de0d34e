"""What a step reads of Python: changes take effect, or the capture refuses or says what it takes as a constant."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tutti

STEPS = 4
Loss = Callable[[torch.nn.Module, dict[str, torch.Tensor]], torch.Tensor]


def score(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["x"]).pow(2).mean()


def losses(make: Callable[[], tuple[Loss, Callable[[], Any]]], lifted: bool, steps: int = STEPS) -> list[float]:
    """make: a loss, and what changes the Python state that it reads, after each step."""
    torch.manual_seed(0)
    model, (loss, change), batch = torch.nn.Linear(3, 1), make(), {"x": torch.randn(4, 3)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = tutti.parallelize(model, optimizer, batch, loss=loss, plan="single") if lifted else None
    values = []
    for _ in range(steps):
        if step:
            value = step(batch)
        else:
            value = loss(model, batch)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
        values.append(value.item())
        change()
    return values


def array_as_a_number():
    a = np.ones(3, dtype=np.float32)
    return lambda m, b: score(m, b) * float(a[0]), lambda: a.__imul__(2)


def array_replaced():
    namespace = SimpleNamespace(a=np.ones(3, dtype=np.float32))
    return lambda m, b: score(m, b) * float(namespace.a[0]), lambda: setattr(namespace, "a", namespace.a * 2)


def number_of_numpy():
    namespace = SimpleNamespace(k=np.float64(1))
    return lambda m, b: score(m, b) * float(namespace.k), lambda: setattr(namespace, "k", namespace.k * 2)


def deep_object():
    deepest = SimpleNamespace(k=1.0)
    a = SimpleNamespace(b=SimpleNamespace(c=SimpleNamespace(d=SimpleNamespace(e=deepest))))
    return lambda m, b: score(m, b) * a.b.c.d.e.k, lambda: setattr(deepest, "k", deepest.k * 2)


def deep_list():
    a = [[[[1.0]]]]
    return lambda m, b: score(m, b) * a[0][0][0][0], lambda: a[0][0][0].append(a[0][0][0].pop() * 2)


def object_in_a_list_in_a_dict():
    a = {"w": [SimpleNamespace(k=1.0)]}
    return lambda m, b: score(m, b) * a["w"][0].k, lambda: setattr(a["w"][0], "k", a["w"][0].k * 2)


def set_of_numbers():
    a = {1.0}
    return lambda m, b: score(m, b) * sum(a), lambda: a.add(len(a) + 1.0)


@pytest.mark.parametrize(
    "make",
    [array_as_a_number, array_replaced, number_of_numpy, deep_object, deep_list, object_in_a_list_in_a_dict,
     set_of_numbers],
)  # fmt: skip
def test_changes_take_effect(make):
    assert losses(make, lifted=True) == pytest.approx(losses(make, lifted=False))


def test_a_tensor_that_shares_an_arrays_memory_is_read_anew_without_another_capture():
    def make():
        a = np.ones(3, dtype=np.float32)
        return lambda m, b: score(m, {"x": b["x"] * torch.from_numpy(a)}), lambda: a.__imul__(1.01)

    assert losses(make, True, 20) == pytest.approx(losses(make, False, 20))  # 16 captures are allowed


def test_what_no_code_names_is_not_watched_far_down():
    def make():
        progress = SimpleNamespace(total=0)
        a = SimpleNamespace(b=SimpleNamespace(c=SimpleNamespace(loops=[progress])), k=1.0)
        return lambda m, b: score(m, b) * a.k, lambda: setattr(progress, "total", progress.total + 1)

    assert losses(make, True, 20) == pytest.approx(losses(make, False, 20))


def counter_in_a_closure():
    n = 0

    def loss(m, b):
        nonlocal n
        n += 1
        return score(m, b) * n

    return loss, lambda: None


def counter_of_an_object():
    class Counts:
        n = 0

        def __call__(self, m, b):
            self.n += 1
            return score(m, b) * self.n

    return Counts(), lambda: None


def python_generator():
    own = random.Random(0)
    return lambda m, b: score(m, b) * own.random(), lambda: None


def numpy_generator():
    own = np.random.default_rng(0)
    return lambda m, b: score(m, b) * own.random(), lambda: None


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (counter_in_a_closure, "Python state that its forward changes: 'n'"),
        (counter_of_an_object, "Python state that its forward changes: 'n'"),
        (python_generator, "random numbers that the model draws from own"),
        (numpy_generator, "random numbers that the model draws from own"),
    ],
)
def test_what_changes_with_each_call_is_refused(make, why):
    with pytest.raises(ValueError, match=why):
        losses(make, lifted=True)


def test_a_capture_restores_variables_of_closures():
    last = None

    def loss(m, b):
        nonlocal last
        last = score(m, b)
        return last

    losses(lambda: (loss, lambda: None), lifted=True)
    assert last is None


def test_an_iterator_is_said_to_be_a_constant():
    def make():
        numbers = iter(range(1, 100))
        return lambda m, b: score(m, b) * next(numbers), lambda: None

    with pytest.warns(UserWarning, match="numbers is an iterator.*constant"):
        losses(make, lifted=True)


def test_a_large_array_is_said_to_be_a_constant():
    large = np.ones(1 << 20, dtype=np.float32)

    def make():
        return lambda m, b: score(m, b) * float(large[0]), lambda: None

    with pytest.warns(UserWarning, match="large is an array of 4 MiB.*constant"):
        losses(make, lifted=True)
