"""Packages import one another in one direction: each only packages that stand before it in `ORDER`."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import tutti

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tutti"
ORDER = (
    "compat", "nn", "models", "compress", "ir", "ops", "tracing", "optim", "hardware", "plan", "launch", "lower",
    "analysis", "compile", "sim", "exec", "observe", "checkpoint", "api", "data", "check", "serve", "rl", "train",
    "align", "science", "cli",
)  # fmt: skip
APART = {  # packages that know nothing of parallelism
    "nn": {"compat"}, "models": {"nn"}, "compress": {"compat", "nn", "models"}, "data": {"compat"},
    "sim": set(ORDER) - {"exec"},
}  # fmt: skip


@pytest.fixture(scope="module")
def arrows() -> dict[str, dict[str, str]]:
    """As docs/design.md draws them."""
    return runpy.run_path(str(ROOT / "docs" / "generate.py"))["arrows"]()


def test_all_packages_are_in_the_order():
    packages = {p.name for p in SOURCE.iterdir() if (p / "__init__.py").exists()}
    assert packages == set(ORDER)
    assert not packages & tutti.NAMES.keys(), "a package would hide a public name"


@pytest.mark.parametrize("package", ORDER)
def test_arrows_point_one_way(package, arrows):
    allowed = set(ORDER[: ORDER.index(package)]) & APART.get(package, set(ORDER))
    wrong = {other: file for other, file in arrows[package].items() if other not in allowed}
    assert not wrong, f"{package} imports what stands behind it: {wrong}"


def test_names_of_test_modules_are_unique():
    """pytest imports them by name."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
