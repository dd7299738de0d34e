"""tools/mutants.py changes code, and nothing that only people read."""

import ast
import sys
from pathlib import Path

import pytest
from coverage import CoverageData

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
import mutants

SOURCE = '''"""1 + 1 in a docstring."""


def between(first: float, last: float = -2.0) -> float:
    """first + last"""
    if first < last and not last == 1:
        raise ValueError(f"{first + 1} is below {last}: 3 - 2")
    for i in [4, 5][1:]:
        if i > 4:
            break
    return min(first, -last) * 3


class Shown:
    size: int = 7

    def __repr__(self) -> str:
        return "x" * 8


TABLE = {1: (2, 3)}


def draw(axes) -> None:
    axes.line(1, 2)


def call(a: float, b: float) -> float:
    warn("a" + "b", 9)
    return between(a, b) - between(b, b)
'''


@pytest.fixture(scope="module")
def edits():
    return mutants.Finder("src/tutti/a/b.py", SOURCE).mutants


def test_every_kind_is_found_once_where_it_is(edits):
    changes = {(m.line, m.kind, SOURCE[m.start : m.end], m.text) for m in edits}
    for expected in [
        (6, "comparison", "first < last", "(first <= last)"),
        (6, "and/or", "first < last and not last == 1", "(first < last or not last == 1)"),
        (6, "not", "not last == 1", "(last == 1)"),
        (8, "slice", "1", "(1 + 1)"),
        (10, "removed early exit", "break", "pass"),
        (11, "min/max", "min", "(max)"),
        (11, "sign", "-last", "(last)"),
        (11, "operator", "min(first, -last) * 3", "(min(first, -last) / 3)"),
        (30, "swapped arguments", "between(a, b)", "(between(b, a))"),
        (30, "operator", "between(a, b) - between(b, b)", "(between(a, b) + between(b, b))"),
    ]:
        assert expected in changes
    assert len(changes) == len(edits)


def test_what_only_people_read_is_left_alone(edits):
    left = {1, 5, 7, 18, 29}  # docstrings, messages, __repr__, warnings
    chosen = {4, 15, 21, 25}  # defaults, fields, tables, pictures
    assert not (left | chosen) & {m.line for m in edits}
    assert all(ast.parse(m.applied(SOURCE)) for m in edits)


def test_the_same_seed_gives_the_same_mutants_that_change_the_code():
    files = [mutants.ROOT / "src/tutti/science/em/mt/inverse/quality.py"]
    first, second = (mutants.mutants(files, 5, seed=1) for _ in range(2))
    assert first == second and len({m.name for m in first}) == 5
    assert mutants.mutants(files, 5, seed=2) != first
    source = files[0].read_text()
    assert all(ast.dump(ast.parse(m.applied(source))) != ast.dump(ast.parse(source)) for m in first)


def test_tests_of_a_module_are_those_that_import_it_and_its_folder():
    tests = mutants.tests_of("src/tutti/science/em/mt/inverse/posterior.py")
    assert "tests/science/mt/test_mt_coverage.py" in tests and "tests/science/mt" in tests
    assert mutants.Mutant("src/tutti/cli/a.py", 1, "not", 0, 1, "").package == "cli"


def test_coverage_names_the_tests_of_a_statement_those_that_run_least_first(tmp_path):
    data = CoverageData(str(tmp_path / "coverage"))
    for context, lines in {"a.py::large|run": [3, 4, 9], "a.py::small|run": [3], "": [1, 4]}.items():
        data.set_context(context)
        data.add_lines({str(mutants.ROOT / "src/tutti/a/b.py"): lines, str(mutants.ROOT / "src/tutti/c.py"): []})
    data.write()
    coverage = mutants.Coverage(tmp_path / "coverage")

    def tests(line, file="src/tutti/a/b.py"):
        return coverage.tests(mutants.Mutant(file, line, "not", 0, 1, ""))

    assert tests(3) == ["a.py::small", "a.py::large"]
    assert tests(5) == ["a.py::large"], "its statement began on line 4"
    assert tests(1) == tests(3, "src/tutti/c.py") == tests(3, "src/tutti/none.py") == []
