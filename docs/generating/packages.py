"""The graph of packages: which imports which."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from generating.page import NOTE, ROOT
from generating.walk import walk


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


BESIDE = (  # modules beside the packages, which import none of them
    "extras",
    "keywords",
    "progress",
    "weight_files",
    "whole_files",
)


def arrows() -> dict[str, dict[str, str]]:
    """Package -> packages that it imports, each with a file that does."""
    source = ROOT / "src/tutti"
    uses: dict[str, dict[str, str]] = {}
    for file in sorted(source.rglob("*.py")):
        place = file.relative_to(source)
        package = place.parts[0].removesuffix(".py")
        if package in ("__init__", "__main__", *BESIDE):
            continue
        others = uses.setdefault(package, {})
        for other in imported(file):
            if other not in (package, *BESIDE):
                others.setdefault(other, str(place))
    return uses


def _summary(package: Path) -> str:
    """The first paragraph of a package's docstring, in one line."""
    documentation = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    return " ".join(documentation.partition("\n\n")[0].split())


def packages() -> str:
    """The graph of packages, without arrows that follow from others."""
    source = ROOT / "src/tutti"
    uses = {package: set(others) for package, others in arrows().items()}
    behind: dict[str, set[str]] = {}

    def reached(package: str) -> set[str]:
        if package not in behind:
            behind[package] = uses[package].union(*map(reached, uses[package]))
        return behind[package]

    drawn = [
        f"  {package} --> {other}"
        for package in uses
        for other in sorted(uses[package])
        if not any(other in reached(between) for between in uses[package] - {other})
    ]
    rows = []
    for package in uses:
        rows.append(f"| `{package}` | {_summary(source / package)} |")
        inside = sorted(x.parent for x in (source / package).rglob("*/__init__.py"))
        rows += [f"| &nbsp;&nbsp;`{x.relative_to(source)}` | {_summary(x)} |" for x in inside]
    return (
        f"{NOTE}\n# Packages\n\nAn arrow points from a package to one that it imports; arrows that follow from others "
        "are left out. `tests/test_house.py` fails for an import in the other direction.\n\n```mermaid\nflowchart TD\n"
        + "\n".join(drawn)
        + "\n```\n\n| package | contents |\n|---|---|\n"
        + "\n".join(rows)
        + "\n"
        + walk()
    )
