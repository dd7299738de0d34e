"""Values of any kind in a line."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from tutti.science.em.shown import Brief, brief


@pytest.mark.parametrize("value, told", [
    (torch.zeros(100, 3), "float32 (100, 3)"),
    (np.zeros((5, 2)), "float64 (5, 2)"),
    (torch.tensor(0.123456789), "0.123457"),
    (torch.tensor([True, False]), "[True, False]"),
    ([1e9, torch.zeros(5), 3, 4, 5], "[1e+09, float32 (5,), 3, 4, ...]"),
    ({"a": {"b": torch.zeros(9)}}, "{a: {b: float32 (9,)}}"),
    ("fr4", "'fr4'"),
])  # fmt: skip
def test_values(value, told):
    assert brief(value) == told


@dataclass(frozen=True, repr=False)
class Shown(Brief):
    x: Tensor
    name: str = "a"
    hidden: Tensor = field(default_factory=lambda: torch.zeros(3), repr=False)


def test_dataclasses():
    assert repr(Shown(torch.zeros(9, 2))) == "Shown(x=float32 (9, 2), name='a')"
