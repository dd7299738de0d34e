"""Values of any kind in a line."""

from __future__ import annotations

import doctest
import importlib
from dataclasses import dataclass, field
from pydoc import plain, render_doc

import numpy as np
import pytest
import torch
from torch import Tensor

from tutti.science.em import shown
from tutti.science.em.shown import Brief, brief


@pytest.mark.parametrize("value, text", [
    (torch.zeros(100, 3), "float32 (100, 3) from 0 to 0"),
    (torch.tensor([[1.5, torch.nan], [-2.0, torch.inf]]), "float32 (2, 2) from -2 to 1.5"),
    (torch.tensor([3 + 4j] * 5), "complex64 (5,) magnitudes from 5 to 5"),
    (torch.zeros(0, 9), "float32 (0, 9)"),
    (np.array([["a"]]), "<U1 (1, 1)"),
    ((1.0, 2, 3, 4, 9), "5 numbers from 1 to 9"),
    (object(), "object"),
    (np.zeros((5, 2)), "float64 (5, 2) from 0 to 0"),
    (torch.tensor(0.123456789), "0.123457"),
    (torch.tensor([True, False]), "[True, False]"),
    ([1e9, torch.zeros(5), 3, 4, 5], "[1e+09, float32 (5,) from 0 to 0, 3, 4, ...]"),
    ({"a": {"b": torch.zeros(9)}}, "{a: {b: float32 (9,) from 0 to 0}}"),
    ("fr4", "'fr4'"),
])  # fmt: skip
def test_values(value, text):
    assert brief(value) == text


@dataclass(frozen=True, repr=False)
class Shown(Brief):
    x: Tensor
    name: str = "a"
    leading = ("size",)
    hidden: Tensor = field(default_factory=lambda: torch.zeros(3), repr=False)

    @property
    def size(self) -> int:
        return self.x.numel()


def test_dataclasses():
    assert repr(Shown(torch.zeros(9, 2))) == "Shown(size=18, x=float32 (9, 2) from 0 to 0, name='a')"


def test_examples():
    results = doctest.testmod(shown)
    assert results.attempted and not results.failed


@pytest.mark.parametrize("name", ["cad", "fdtd", "mt", "pinn", "surrogate"])
def test_help_lists_what_a_package_exports(name):
    package = importlib.import_module(f"tutti.science.em.{name}")
    text = plain(render_doc(package))
    assert package.__all__ and all(f"class {x}" in text or f"{x}(" in text or f"{x} =" in text for x in package.__all__)
