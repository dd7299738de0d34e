"""Break the code in small ways, one at a time, and see whether the tests notice.

    python tools/mutants.py [--count 200] [--seed 0] [--package science/em/mt] [--jobs 2] [--timeout 120] [--log FILE]

Computations are changed, not choices. Left out are defaults of parameters and fields, constants of modules that are
plain numbers, tables of presets, settings of published problems, samples for tests (`check/samples`), what draws, and
kernels that need a GPU.

Each mutant is tried in a copy of the tracked files, never in the working tree: quick tests run with -x until one
fails. They are the tests of its package, those that import its module first. With --coverage they are those that ran
the line when coverage was recorded, the tests that run least code first, which takes a fraction of the time:

    pytest -n 2 --cov=src/tutti --cov-context=test --cov-report= && python tools/mutants.py --coverage .coverage

A mutant is killed (a test failed that passes without it), timed out, or survived; one without tests survives. Results
are lines of JSON in --log, and a second call with the same log and seed goes on where the first ended. The report
counts by package and prints diffs of survivors.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from queue import Queue
from threading import Lock

from coverage import CoverageData

ROOT = Path(__file__).resolve().parents[1]
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
              ast.Mod: ast.Mult, ast.Pow: ast.Mult}  # fmt: skip
COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
               ast.NotEq: ast.Eq}  # fmt: skip
QUIET = {
    "warn",
    "print",
    "debug",
    "info",
    "warning",
    "error",
    "exception",
    "log",
    "say",
    "tell",
    "progress",
}  # messages
WAITING = 4  # seconds of the wall clock for each processor second
DRAWN = {"canvas", "axes", "figure"}  # parameters of functions that draw
CHOSEN = re.compile(r"check/samples/|presets|/(picture|figures|gantt|panels|canvas|memory_picture|microstrip|inverse|"
                    r"kernels_triton)\.py$")  # fmt: skip
STATEMENT = 20  # lines of a statement, at most
SILENT = {"__repr__", "__str__", "__init_subclass__"}


@dataclass(frozen=True)
class Mutant:
    """An edit of a file: the text from `start` to `end` (offsets) becomes `text`."""

    file: str
    line: int
    kind: str
    start: int
    end: int
    text: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}:{self.start}:{self.kind}:{self.text}"

    @property
    def package(self) -> str:
        return self.file.removeprefix("src/tutti/").partition("/")[0].removesuffix(".py")

    def applied(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]


class Finder(ast.NodeVisitor):
    """All mutants of a file, without those of docstrings, annotations, messages, logging and `__repr__`."""

    def __init__(self, file: str, source: str) -> None:
        self.file, self.source, self.mutants = file, source, list[Mutant]()
        self.offsets = [0]
        for line in source.splitlines(keepends=True):
            self.offsets.append(self.offsets[-1] + len(line))
        self.lines = source.splitlines(keepends=True)
        tree = ast.parse(source)
        self.signatures = {node.name: [ast.unparse(a.annotation) if a.annotation else "" for a in node.args.args]
                           for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}  # fmt: skip
        self.visit(tree)

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Offsets in characters; those of `ast` are in bytes."""

        def at(line: int, column: int) -> int:
            return self.offsets[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

        return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def add(self, node: ast.AST, kind: str, new: ast.AST | str) -> None:
        start, end = self.span(node)
        text = new if isinstance(new, str) else ast.unparse(new)
        if isinstance(node, ast.expr):
            text = f"({text})"
        self.mutants.append(Mutant(self.file, node.lineno, kind, start, end, text))  # type: ignore[attr-defined]

    # -- what is skipped

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        drawn = DRAWN & {arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)}
        if node.name not in SILENT and not drawn and "draw" not in node.name and "render" not in node.name:
            self.body(node.body)

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_Module(self, node: ast.Module) -> None:
        for statement in node.body:
            if not isinstance(statement, ast.Assign) or not _is_plain(statement.value):
                self.visit(statement)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            if not isinstance(statement, ast.Assign | ast.AnnAssign):  # fields and their defaults
                self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        pass  # its message; the condition is that of the `if`

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass  # a message, or a name; and offsets inside are not those of the file before Python 3.12

    def visit_Assert(self, node: ast.Assert) -> None:
        self.visit(node.test)

    def body(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self.visit(statement)
        if len(statements) > 1:
            for statement in statements:
                if isinstance(statement, ast.Break | ast.Continue):
                    self.add(statement, "removed", "pass")

    # -- what is changed

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'"):
            return
        self.add(node.test, "not", f"not ({ast.unparse(node.test)})")
        last = node.body[-1]
        if isinstance(last, ast.Return | ast.Break | ast.Continue) and not node.orelse:
            self.add(last, "removed early exit", "pass")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = any(isinstance(x, ast.JoinedStr) or (isinstance(x, ast.Constant) and isinstance(x.value, str))
                    for x in (node.left, node.right))  # fmt: skip
        if type(node.op) in ARITHMETIC and not texts:
            new = ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
            self.add(node, "operator", new)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for i, op in enumerate(node.ops):
            if type(op) in COMPARISONS:
                ops = [*node.ops[:i], COMPARISONS[type(op)](), *node.ops[i + 1 :]]
                self.add(node, "comparison", ast.Compare(node.left, ops, node.comparators))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self.add(node, "and/or", ast.BoolOp(other, node.values))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.USub | ast.Not):
            self.add(node, "sign" if isinstance(node.op, ast.USub) else "not", node.operand)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if type(value) is bool:
            self.add(node, "constant", str(not value))
        elif type(value) in (int, float):
            for other in {0: ["1"], 1: ["0", "2"]}.get(value, [f"{value * 2!r}", f"{value - 1!r}", f"{-value!r}"]):  # type: ignore[arg-type]
                self.add(node, "constant", other)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for part in parts:
            if isinstance(part, ast.Slice):
                for end in ("lower", "upper"):
                    value = getattr(part, end)
                    if value is not None:
                        self.add(value, "slice", f"{ast.unparse(value)} + 1")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in QUIET or name in ("Field", "Quantity", "Option", "Argument", "TypeVar"):
            return
        swap = {"min": "max", "max": "min", "amin": "amax", "amax": "amin", "minimum": "maximum", "maximum": "minimum",
                "any": "all", "all": "any", "floor": "ceil", "ceil": "floor"}.get(name)  # fmt: skip
        if swap:
            func = ast.Attribute(node.func.value, swap) if isinstance(node.func, ast.Attribute) else ast.Name(swap)
            self.add(node.func, "min/max", ast.unparse(func))
        kinds = self.signatures.get(name, [])
        kinds = kinds[1:] if isinstance(node.func, ast.Attribute) else kinds
        for i in range(min(len(node.args), len(kinds)) - 1):
            a, b = node.args[i : i + 2]
            same = kinds[i] and kinds[i] == kinds[i + 1] and ast.dump(a) != ast.dump(b)
            if same and not isinstance(a, ast.Starred) and not isinstance(b, ast.Starred):
                args = [*node.args[:i], b, a, *node.args[i + 2 :]]
                self.add(node, "swapped arguments", ast.Call(node.func, args, node.keywords))
        self.generic_visit(node)


def _is_plain(value: ast.expr) -> bool:
    """Whether an expression consists of literals only."""
    literal = ast.Constant | ast.UnaryOp | ast.BinOp | ast.Tuple | ast.List | ast.Set | ast.Dict
    return all(isinstance(node, literal | ast.operator | ast.unaryop | ast.expr_context) for node in ast.walk(value))


def mutants(files: list[Path], count: int, seed: int) -> list[Mutant]:
    """`count` of all mutants that parse, each file with a chance by its number of them."""
    candidates = []
    for file in files:
        if CHOSEN.search(str(file)):
            continue
        source = file.read_text()
        candidates += Finder(str(file.relative_to(ROOT)), source).mutants
    # edits elsewhere leave the order
    candidates.sort(key=lambda mutant: sha256(f"{seed} {mutant.name}".encode()).digest())
    chosen: list[Mutant] = []
    for mutant in dict.fromkeys(candidates):
        if len(chosen) == count:
            break
        source = (ROOT / mutant.file).read_text()
        try:
            changed = ast.parse(mutant.applied(source))
        except SyntaxError:
            continue
        if ast.dump(changed) != ast.dump(ast.parse(source)):
            chosen.append(mutant)
    return chosen


def tests_of(file: str) -> list[str]:
    """Test files of its package that import a module, the whole package, then other importers: the nearest first."""
    module = file.removeprefix("src/").removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    parent, _, name = module.rpartition(".")
    names = [f"from {module} import", f"import {module}"]
    importers = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        lines = [line for line in text.splitlines() if f"from {parent} import" in line]
        if any(each in text for each in names) or any(name in line.split("import")[1] for line in lines):
            importers.append(str(path.relative_to(ROOT)))
    parts = file.removeprefix("src/tutti/").split("/")[:-1]
    shorter = [parts[:end] for end in range(len(parts), 0, -1)]  # tests/science/mt for science/em/mt/inverse
    folders = ["/".join(["tests", *x[:1], *x[skip:]]) for x in shorter for skip in range(1, max(2, len(x)))]
    folder = [each for each in folders if (ROOT / each).is_dir()][:1]
    package = file.removeprefix("src/tutti/").removesuffix(".py").split("/")[0]
    others = [f"tests/test_{package}_{name}.py", f"tests/test_{package}.py"]
    others += ["tests/proofs/test_rules.py"] if package == "ops" else []
    near = [each for each in importers if folder and each.startswith(folder[0])]
    near.sort(key=lambda each: Path(each).stem != f"test_{name}")
    paths = [*near, *folder, *others, *importers]
    return [each for each in dict.fromkeys(paths) if (ROOT / each).exists()]


class Coverage:
    """Which tests ran a line, read from the data that pytest-cov writes with `--cov-context=test`."""

    def __init__(self, path: Path) -> None:
        self.data = CoverageData(str(path))
        self.data.read()
        root = os.path.commonpath([*self.data.measured_files()])
        self.files = {str(Path(file).relative_to(root)): file for file in self.data.measured_files()}
        self.size: Counter[str] = Counter()  # lines that a test runs
        for file in self.files.values():
            for contexts in self.data.contexts_by_lineno(file).values():
                self.size.update({context.rpartition("|")[0] for context in contexts})

    def tests(self, mutant: Mutant) -> list[str]:
        """The tests that ran a mutant's statement; of a statement of several lines, one of the lines is recorded."""
        lines = self.data.contexts_by_lineno(self.files.get(mutant.file.removeprefix("src/tutti/"), ""))
        for line in range(mutant.line, max(0, mutant.line - STATEMENT), -1):
            tests = {context.rpartition("|")[0] for context in lines.get(line, [])} - {""}
            if tests:
                return sorted(tests, key=lambda test: (self.size[test], test))
        return []


def copy_of_tree(to: Path) -> None:
    """The tracked files as they are in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def tried(mutant: Mutant, tests: list[str], tree: Path, timeout: float) -> dict:
    """Outcome of tests on a mutant in a copy of the tree, which is as before afterwards."""
    path = tree / mutant.file
    source = path.read_text()
    row = {"mutant": mutant.name, "package": mutant.package, "tests": tests[:9]}
    row["diff"] = "".join(difflib.unified_diff(source.splitlines(True), mutant.applied(source).splitlines(True),
                                               mutant.file, mutant.file, n=1))  # fmt: skip
    if not tests:
        return {**row, "outcome": "survived", "why": "no tests"}
    env = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [sys.executable, "-m", "pytest", *options, f"@{tree / 'tests.txt'}"]
    (tree / "tests.txt").write_text("\n".join(tests))
    path.write_text(mutant.applied(source))

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (int(timeout), int(timeout) + 5))

    try:
        with subprocess.Popen(command, cwd=tree, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              start_new_session=True, preexec_fn=limit) as process:  # fmt: skip
            try:
                out, _ = process.communicate(timeout=WAITING * timeout)
            except subprocess.TimeoutExpired:
                pass
            finally:
                with suppress(ProcessLookupError):  # and what it has started
                    os.killpg(process.pid, signal.SIGKILL)
    finally:
        path.write_text(source)
    if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return {**row, "outcome": "timeout"}
    if process.returncode == 0:
        return {**row, "outcome": "survived"}
    failed = process.returncode in (1, 2) or process.returncode < 0  # a test or an import failed, or Python crashed
    if failed or "ERROR collecting" in out:
        return {
            **row,
            "outcome": "killed",
            "by": [line for line in out.splitlines() if line[:6] in ("FAILED", "ERROR ")],
        }
    return {**row, "outcome": "error", "why": out[-2000:]}


def report(rows: list[dict]) -> Iterator[str]:
    by_package = {package: Counter(row["outcome"] for row in rows if row["package"] == package)
                  for package in sorted({row["package"] for row in rows})}  # fmt: skip
    outcomes = ("killed", "survived", "timeout", "error")
    yield f"{'package':12}" + "".join(f"{x:>10}" for x in outcomes)
    for package, counts in [*by_package.items(), ("all", Counter(row["outcome"] for row in rows))]:
        yield f"{package:12}" + "".join(f"{counts[x]:10d}" for x in outcomes)
    for row in rows:
        if row["outcome"] in ("survived", "error"):
            yield f"\n{row['outcome']}: {row['mutant']}  {row.get('why', '')}\n{row['diff']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=200, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--package", default="", help="a folder or a file in src/tutti; all of it by default")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at the same time")
    parser.add_argument("--timeout", type=float, default=300.0,
                        help="processor seconds for the tests of a mutant, whatever else the machine does")  # fmt: skip
    parser.add_argument("--log", type=Path, default=ROOT / "out/mutants.jsonl", help="results; a second call goes on")
    parser.add_argument("--coverage", type=Path, help="data of pytest-cov, with contexts: which tests run which line")
    options = parser.parse_args()
    coverage = Coverage(options.coverage) if options.coverage else None
    place = ROOT / "src/tutti" / options.package
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))
    if not files:
        parser.error(f"--package: {place} has no Python files")
    chosen = mutants(files, options.count, options.seed)
    options.log.parent.mkdir(parents=True, exist_ok=True)
    lines = options.log.read_text().splitlines() if options.log.exists() else []
    done = {row["mutant"]: row for row in map(json.loads, lines)}
    lock, trees = Lock(), Queue[Path]()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        for i in range(options.jobs):
            copy_of_tree(Path(folder) / str(i))
            trees.put(Path(folder) / str(i))

        def work(mutant: Mutant) -> None:
            tree = trees.get()
            try:
                tests = coverage.tests(mutant) if coverage else []
                row = tried(mutant, tests or tests_of(mutant.file), tree, options.timeout)
            finally:
                trees.put(tree)
            with lock:
                done[mutant.name] = row
                with options.log.open("a") as log:
                    log.write(json.dumps(row) + "\n")
                print(f"{row['outcome']:9} {mutant.name}", flush=True)

        list(pool.map(work, [mutant for mutant in chosen if mutant.name not in done]))
    print("\n".join(report([done[mutant.name] for mutant in chosen])))


if __name__ == "__main__":
    main()
