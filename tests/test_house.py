"""The house: packages import one another in one direction, and names are words of the field."""

from __future__ import annotations

import ast
import importlib.util
import re
import runpy
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import tutti

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tutti"
ORDER = (
    "config", "compat", "nn", "models", "compress", "ir", "ops", "tracing", "optim", "hardware", "plan", "launch",
    "lower", "analysis", "compile", "sim", "exec", "observe", "checkpoint", "api", "data", "check", "serve", "rl",
    "train", "align", "science", "cli",
)  # fmt: skip
APART = {  # packages that know nothing of parallelism
    "config": set(), "nn": {"compat"}, "models": {"nn"}, "compress": {"compat", "nn", "models"}, "data": {"compat"},
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


def _scripts(path: Path) -> Iterator[ast.Module]:
    """The texts of a file that are Python and import from here: scripts that tests run."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "from tutti" in node.value:
            with suppress(SyntaxError):
                yield ast.parse(textwrap.dedent(node.value))


def test_scripts_in_tests_import_what_there_is():
    """Those of slow tests, too, which nobody runs after each move of a module."""
    missing = []
    for path in (ROOT / "tests").rglob("*.py"):
        for script in _scripts(path):
            for line in (x for x in ast.walk(script) if isinstance(x, ast.ImportFrom) and x.module):
                if line.module.split(".")[0] == "tutti":
                    module = importlib.import_module(line.module)
                    for name in (x.name for x in line.names):
                        if not hasattr(module, name) and not importlib.util.find_spec(f"{line.module}.{name}"):
                            missing.append(f"{path.name}: from {line.module} import {name}")
    assert not missing


RETIRED = {
    "made",
    "found",
    "known",
    "held",
    "kept",
    "told",
    "given",
}  # names say what a variable holds: docs/glossary.md

GENITIVE = re.compile(r"\A *Of |(?:^ *|[.:;] )`?\w+(?:, \w+)*`?: [Oo]f ", re.M)  # "Of a step.", "seed: of weights."


def _bound(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(name, line) of all variables, parameters, attributes, functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno


def _documented(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        documented = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module)
        if documented and (text := ast.get_docstring(node)):
            yield text, getattr(node, "lineno", 1)


@pytest.mark.parametrize(
    "folder", [*(f"src/tutti/{package}" for package in ORDER), "tests", "benchmarks", "docs", "tools"]
)
def test_names_say_what_they_hold(folder):
    wrong = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        tree, file = ast.parse(path.read_text()), path.relative_to(ROOT)
        wrong += [f"{file}:{line} {name}" for name, line in _bound(tree) if name.strip("_").lower() in RETIRED]
        wrong += [f"{file}:{line} {text[:40]!r}" for text, line in _documented(tree) if GENITIVE.search(text)]
    assert not wrong, f"retired names, and docstrings that say of what, but not what: {wrong[:20]}"


def test_names_of_inputs_are_built_by_kind():
    """`Kind.PARAM.at(path)`, `kind_of(name)` and `path_of(name)`, not strings that are put together and split."""
    by_hand = re.compile(r"""["'](?:param|buffer|grad|batch|common|count|written|value|cache|output|metric|check):""")
    wrong = []
    for path in SOURCE.rglob("*.py"):
        code = ast.parse(path.read_text())
        documentation = {id(node.value) for node in ast.walk(code) if isinstance(node, ast.Expr)}
        wrong += [f"{path.relative_to(SOURCE)}:{node.lineno}" for node in ast.walk(code)
                  if isinstance(node, ast.Constant) and id(node) not in documentation
                  and isinstance(node.value, str) and by_hand.match(f"'{node.value}")]  # fmt: skip
    assert not wrong, f"use tutti.ir.kind: {wrong}"


def test_the_glossary_names_the_terms_of_the_field():
    rows = [line for line in (ROOT / "docs" / "glossary.md").read_text().splitlines() if line.startswith("| ")][1:]
    terms = [row.split("|")[1].strip().lower() for row in rows]
    assert len(rows) >= 60 and terms == sorted(terms), "sorted, 60 or more"
    assert all(row.count("|") == 4 for row in rows)


def _imports(path: Path, modules: Mapping[str, Path]) -> set[str]:
    """The modules of this package that a module imports, also inside of functions, but not for types alone."""
    tree = ast.parse(path.read_text())
    for_types = {inner for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
                 for inner in ast.walk(node)}  # fmt: skip
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node not in for_types:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= {name if name in modules else node.module for name in names}
        elif isinstance(node, ast.Import) and node not in for_types:
            imported |= {alias.name for alias in node.names}
    return imported & modules.keys()


def test_no_modules_import_one_another():
    modules = {".".join(("tutti", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): path
               for path in SOURCE.rglob("*.py")}  # fmt: skip
    graph = {name: _imports(path, modules) - {name} for name, path in modules.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, with the circle


def test_an_algorithm_fits_into_one_file_of_200_lines():
    files = (SOURCE / "rl" / "algorithms").rglob("*.py")
    long = {path.stem: n for path in files if (n := len(path.read_text().splitlines())) > 200}
    assert not long, "move what algorithms share to rl/core, rl/networks or rl/replay"


def test_packages_have_at_most_twenty_modules():
    rooms = {path.parent for path in SOURCE.rglob("*.py")}
    crowded = {str(room.relative_to(SOURCE)): n for room in rooms if (n := len(list(room.glob("*.py")))) > 20}
    assert not crowded, "split them by what the modules are about"


@pytest.mark.parametrize(("package", "most"), [("train", 10), ("serve", 10)])
def test_few_values_are_of_any_type(package, most):
    """most: whole words `Any` in 1,000 lines."""
    texts = [path.read_text() for path in (SOURCE / package).rglob("*.py")]
    count, lines = sum(len(re.findall(r"\bAny\b", text)) for text in texts), sum(text.count("\n") for text in texts)
    assert count <= most * lines / 1000, f"{count} in {lines} lines: name the types, or add a Protocol"
