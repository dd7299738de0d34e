"""Packages import one another in one direction: each only packages that stand before it in `ORDER`."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import tutti

SOURCE = Path(__file__).parents[1] / "src" / "tutti"
ORDER = (
    "compat", "nn", "models", "ir", "tracing", "ops", "hardware", "plan", "launch", "lower", "analysis", "compile",
    "sim", "exec", "observe", "checkpoint", "api", "data", "check", "train", "cli",
)  # fmt: skip
APART = {  # packages that know nothing of parallelism
    "nn": {"compat"}, "models": {"nn"}, "data": set(), "sim": set(ORDER) - {"exec"},
}  # fmt: skip


def imported(file: Path) -> Iterator[str]:
    """The packages that a file imports, also within functions; not what type checkers alone read."""
    tree = ast.parse(file.read_text())
    hidden = {
        id(x)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for x in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in hidden and (node.module or "").startswith("tutti"):
            inside = (node.module or "").split(".")[1:2]
            yield from inside or [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("tutti."))


def arrows() -> dict[str, dict[str, str]]:
    """Package -> packages that it imports, each with a file that does."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for file in sorted(SOURCE.rglob("*.py")):
        place = file.relative_to(SOURCE)
        package = place.parts[0].removesuffix(".py")
        for other in imported(file) if package != "__init__" else ():
            if other != package:
                found[package].setdefault(other, str(place))
    return found


def test_all_packages_are_in_the_order():
    packages = {p.name for p in SOURCE.iterdir() if (p / "__init__.py").exists()} | {"compat"}
    assert packages == set(ORDER)
    assert not packages & tutti.NAMES.keys(), "a package would hide a public name"


@pytest.mark.parametrize("package", ORDER)
def test_arrows_point_one_way(package):
    allowed = set(ORDER[: ORDER.index(package)]) & APART.get(package, set(ORDER))
    wrong = {other: file for other, file in arrows()[package].items() if other not in allowed}
    assert not wrong, f"{package} imports what stands behind it: {wrong}"
