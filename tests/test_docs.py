"""The documents are true: their Python blocks run, their commands exist, and their generated pages are current."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
import torch

import tutti.api.step  # noqa: F401  (fills the tables that tests restore)
from tutti import cli
from tutti.hardware import PRESETS
from tutti.ir.op_info import CONTIGUOUS, LOCAL, RULES, SENDS
from tutti.plan.schedule import REGISTERED
from tutti.tracing.optimizers import TABLE
from tutti.tracing.pattern_table import PATTERNS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
README_LINES = 200


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, language: str) -> list[str]:
    """The blocks of a language, each behind as many empty lines as stand before it in the page."""
    text = path.read_text()
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return ["\n" * text.count("\n", 0, match.start(1)) + match[1] for match in found]


def module(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


GENERATE = module(DOCS / "generate.py")


@pytest.fixture
def tables():
    """What pages register is forgotten after each of them."""
    known: list[dict] = [TABLE, REGISTERED, PRESETS, RULES, LOCAL, SENDS, CONTIGUOUS]
    before, patterns = [dict(table) for table in known], list(PATTERNS)
    yield
    for table, old in zip(known, before, strict=True):
        table.clear()
        table.update(old)
    PATTERNS[:] = patterns


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=name_of)
def test_code_runs(page, tables, tmp_path, monkeypatch):
    """The blocks of a page run one after the other in one scope, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    scope: dict = {"__name__": "docs"}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec", dont_inherit=True), scope)


def help_of(verb: str) -> str:
    """The help of a verb, and of its subcommands."""
    return "\n".join(text for key, text in json.loads(cli.HELP.read_text()).items() if key.split()[0] == verb)


def commands(path: Path) -> list[list[str]]:
    """The calls of `tutti` in the shell blocks of a page."""
    lines = "\n".join(blocks(path, "bash")).replace("\\\n", " ").splitlines()
    calls = [shlex.split(line, comments=True) for line in lines]
    return [words[1:] for words in calls if words[:1] == ["tutti"]]


@pytest.mark.parametrize("page", [p for p in PAGES if commands(p)], ids=name_of)
def test_commands_exist(page):
    for verb, *rest in commands(page):
        assert verb in cli.VERBS or verb == "--help", f"{name_of(page)}: tutti {verb}"
        if verb in cli.VERBS:
            known = set(re.findall(r"(?<![\w-])(--?[\w.-]+)", help_of(verb)))
            used = [word.partition("=")[0] for word in _own(verb, rest) if re.match(r"-{1,2}[a-zA-Z]", word)]
            assert not set(used) - known, f"{name_of(page)}: tutti {verb}: {set(used) - known}"


def _own(verb: str, words: list[str]) -> list[str]:
    """Options of the verb itself: those after the script of `tutti run` are the script's."""
    if verb != "run":
        return words
    ends = [i for i, word in enumerate(words) if word == "-m" or word.endswith(".py")]
    return words[: ends[0]] if ends else words


@pytest.mark.parametrize("name", GENERATE.PAGES)
def test_generated_pages_are_current(name):
    made = GENERATE.PAGES[name]()
    assert (DOCS / name).read_text() == made, f"docs/{name} is out of date: run python docs/generate.py"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
        if not re.match(r"[a-z]+:", target) and target.partition("#")[0]:
            assert (page.parent / target.partition("#")[0]).exists(), f"{name_of(page)}: {target}"


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {str(path.relative_to(DOCS)) for path in PAGES[1:]}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_pages_name_exist(page):
    for name in re.findall(r"`((?:src|tests|benchmarks|runs)/[\w/.-]+\.(?:py|toml|json))`", page.read_text()):
        assert (ROOT / name).exists(), f"{name_of(page)} names {name}"
