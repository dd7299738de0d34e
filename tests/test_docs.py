"""The documents are true: their Python blocks run, their commands exist, and their generated pages are current."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import json
import pydoc
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import tutti
import tutti.api.step  # fills the tables that tests restore
from tutti import cli
from tutti.hardware import PRESETS
from tutti.ir.op_info import CONTIGUOUS, LOCAL, RULES, SENDS
from tutti.plan.pipeline.schedule import REGISTERED
from tutti.rl import adapt
from tutti.tracing.optimizers import TABLE
from tutti.tracing.rewrite.pattern_table import PATTERNS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
README_LINES, WORDS, GUIDE_WORDS = 200, 2_000, 1_500


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, language: str) -> list[str]:
    """The blocks of a language, each behind as many empty lines as stand before it in the page."""
    text = path.read_text()
    matches = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return ["\n" * text.count("\n", 0, match.start(1)) + match[1] for match in matches]


def module(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATE = module(DOCS / "generate.py")
api = GENERATE.api


@pytest.fixture
def tables():
    """What pages register is forgotten after each of them."""
    registries: list[dict] = [TABLE, REGISTERED, PRESETS, RULES, LOCAL, SENDS, CONTIGUOUS]
    before, patterns = [dict(table) for table in registries], list(PATTERNS)
    yield
    for table, old in zip(registries, before, strict=True):
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


INTERNAL = ("tutti.rl.core", "tutti.rl.networks", "tutti.rl.placement", "tutti.plan", "tutti.ir", "tutti.serve.server",
            "tutti.science.mol.units", "tutti.science.em.surrogate.stub", "tutti.train.scores.", "tutti.train.pet",
            "tutti.models", "tutti.align.rewards")  # fmt: skip


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python") and p.parent.name != "extend"], ids=name_of)
def test_pages_import_public_names(page):
    """Names in the `__all__` of a package on the pages of the API; of a few others, whole modules are public."""
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            source = node.module if isinstance(node, ast.ImportFrom) else None
            if source and source.startswith("tutti.") and not source.startswith(INTERNAL):
                assert source.removeprefix("tutti.") in api.public(), f"{source} is not in docs/generating/api.py"
                names = {alias.name for alias in node.names} - set(api.names_of(source.removeprefix("tutti.")))
                modules = {name for name in names if f"{source}.{name}".removeprefix("tutti.") in api.public()}
                assert names <= modules, f"{source}: {names}"


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
    launched = [words[words.index("--") + 1 :] for words in commands(page) if words[0] == "launch"]
    for verb, *rest in [*commands(page), *launched]:
        assert verb in cli.VERBS or verb == "--help", f"{name_of(page)}: tutti {verb}"
        if verb in cli.VERBS:
            options = set(re.findall(r"(?<![\w-])(--?[\w.-]+)", help_of(verb)))
            used = [word.partition("=")[0] for word in _own(verb, rest) if re.match(r"-{1,2}[a-zA-Z]", word)]
            assert not set(used) - options, f"{name_of(page)}: tutti {verb}: {set(used) - options}"


def _own(verb: str, words: list[str]) -> list[str]:
    """Options of the verb itself: those after the script of `tutti run` are the script's, those after -- another's."""
    if verb == "launch":
        return words[: words.index("--")]
    if verb != "run":
        return words
    ends = [i for i, word in enumerate(words) if word == "-m" or word.endswith(".py")]
    return words[: ends[0]] if ends else words


GENERATED = {path for name in GENERATE.PAGES if (path := (DOCS / name).resolve()).suffix == ".md"}


def is_written(path: Path) -> bool:
    """Whether a page is written by hand: not by docs/generate.py, and not by the proof of the rules."""
    return path not in GENERATED and "Written by `make proofs`" not in path.read_text()


@pytest.mark.parametrize("page", [p for p in PAGES if is_written(p)], ids=name_of)
def test_written_pages_are_short(page):
    assert len(page.read_text().split()) <= WORDS, f"split {name_of(page)}, or shorten it"


@pytest.mark.parametrize("page", sorted((DOCS / "guide").glob("*.md")), ids=name_of)
def test_guide_pages_are_read_in_one_sitting(page):
    """Details that a first-time user does not need belong into pages of their own, the reference or the concepts."""
    words = len(page.read_text().split())
    assert words <= GUIDE_WORDS, f"{name_of(page)} has {words} words, more than {GUIDE_WORDS}: split or shorten it"


def test_generated_pages_are_those_that_there_are():
    assert {path for path in PAGES if path.read_text().startswith(GENERATE.NOTE)} == GENERATED


@pytest.mark.parametrize("name", GENERATE.PAGES)
def test_generated_pages_are_current(name):
    text = GENERATE.PAGES[name]()
    assert (DOCS / name).read_text() == text, f"docs/{name} is out of date: run python docs/generate.py"


def test_lists_of_results_are_no_products():
    show = importlib.import_module("generating.benchmarks").show
    assert show([1234, 0.5, "a"]) == "1,234; 0.5; a"
    assert show("a*b|c __d__ <e> x_y") == r"a\*b\|c \_\_d\_\_ \<e> x_y"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
        if not re.match(r"[a-z]+:", target) and target.partition("#")[0]:
            assert (page.parent / target.partition("#")[0]).exists(), f"{name_of(page)}: {target}"


def anchor(heading: str) -> str:
    """As the site names it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip()
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


def anchors(path: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_headings(page):
    for file, place in re.findall(r"\]\(([^)\s#:]*\.md)?#([^)\s]+)\)", page.read_text()):
        target = page.parent / file if file else page
        if target.name == "api.md" and "." in place:  # an object, which the site documents
            assert place.startswith("tutti.") and pydoc.locate(place) is not None, f"{name_of(page)}: {place}"
            continue
        assert place in anchors(target), f"{name_of(page)}: {file}#{place}"


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {str(path.relative_to(DOCS)) for path in PAGES[1:]}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_pages_name_exist(page):
    for name in re.findall(r"`((?:src|tests|benchmarks|runs)/[\w/.-]+\.(?:py|toml|json))`", page.read_text()):
        assert (ROOT / name).exists(), f"{name_of(page)} names {name}"


def test_the_page_of_server_fields_has_every_field():
    from tutti.serve.server import fields, meanings, protocol

    def kinds(kind) -> list:
        return [x for sub in kind.__subclasses__() for x in (sub, *kinds(sub))]

    names = {field.alias or name for kind in kinds(protocol.Body) for name, field in kind.model_fields.items()}
    names |= {*fields.IGNORED, *fields.REFUSED, *fields.RESPONSES, *meanings.TRANSCRIPTION}
    shown = set(re.findall(r"`(\w+)`", (DOCS / "reference/server-fields.md").read_text()))
    assert len(names) > 100 and names <= shown, f"python docs/generate.py: {names - shown}"


def test_the_page_of_models_has_every_model():
    import encoder_models
    import models
    import more_models

    text = (DOCS / "reference/supported-models.md").read_text()
    first = set(re.findall(r"^\| `?([^|`]+)`? \|", text, re.MULTILINE))
    families = {name for name in encoder_models.FAMILIES}
    assert {*models.MODELS, *more_models.MODELS, *families} <= {cell.strip() for cell in first}


def rows(table: dict[str, str | tuple]) -> list[str]:
    """Rows of a table that a page quotes from the code: a name, and the last of what is said of it."""
    texts = {name: about if isinstance(about, str) else about[-1] for name, about in table.items()}
    return [
        f"| `{name}` | {text.replace('|', chr(92) + '|').replace('*', chr(92) + '*')} |" for name, text in texts.items()
    ]


@pytest.mark.parametrize("name", ["INSTEAD", "ABSENT", "ACCELERATOR"])
def test_what_the_trainer_refuses_is_on_the_page_of_migration(name):
    from tutti.train.trainer import arguments

    text = (DOCS / "migration/transformers-trainer.md").read_text()
    assert [row for row in rows(vars(arguments)[name]) if row not in text] == []


@pytest.mark.parametrize("name", ["POLICY_OPTIONS", "HINTS", "ABSENT"])
def test_names_of_stable_baselines_are_on_the_page_of_migration(name):
    from tutti.rl import sb3

    text = (DOCS / "migration/stable-baselines3.md").read_text()
    assert [row for row in rows(vars(sb3)[name]) if row not in text] == []


def test_options_with_one_value_are_on_the_pages_of_migration():
    from tutti.rl import sb3
    from tutti.train.trainer import arguments

    trainer, agents = ((DOCS / f"migration/{x}.md").read_text() for x in ("transformers-trainer", "stable-baselines3"))
    for name, (value, text) in arguments.ONLY.items():
        assert f"| `{name}` | `{value!r}` | {text} |" in trainer
    for name, (values, text) in sb3.NEUTRAL.items():
        assert f"| `{name}` | {', '.join(f'`{x!r}`' for x in values)} | {text} |" in agents


def test_options_that_the_pages_of_migration_name_are_ours():
    """The second column of their tables: keywords and options of ours, as in `name=` or `--name`."""
    from tutti.rl import PPO, SAC, CheckpointCallback, EvalCallback
    from tutti.serve import Engine, Request, Sampling
    from tutti.train.trainer.arguments import TrainingArguments

    makers: list[Any] = [tutti.parallelize, tutti.Step.state_dict, TrainingArguments, adapt.make, PPO, PPO.learn,
                         EvalCallback, CheckpointCallback, Engine, Request, Sampling]  # fmt: skip
    parameters = {name for maker in makers for name in inspect.signature(maker).parameters}
    parameters |= {field.name for kind in (PPO, SAC) for field in dataclasses.fields(kind.Config)} | {"policy_kwargs"}
    options = set(re.findall(r"(?<![\w-])--([\w-]+)", cli.HELP.read_text()))
    for page in sorted((DOCS / "migration").glob("*.md")):
        tables = page.read_text().split("## What is refused")[0]
        for line in tables.splitlines():
            cells = line.split(" | ")
            if len(cells) < 2 or not line.startswith("| "):
                continue
            used = set(re.findall(r"(?<=[`(, ])([a-z]\w*)=(?!=)", re.sub(r"--\S+ \S+", "", cells[1])))
            assert used <= parameters, f"{name_of(page)}: {used - parameters} in {cells[1]}"
            flags = set(re.findall(r"(?<![\w-])--([a-z][\w-]*)", cells[1]))
            assert flags <= options, f"{name_of(page)}: {flags - options} in {cells[1]}"


def test_pages_cite_the_version_of_the_package():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"\nversion: {version['version']}\nlicense: {version['license']}\n" in (ROOT / "CITATION.cff").read_text()
    cited = (DOCS / "citing.md").read_text()
    assert f"version = {{{version['version']}}}" in cited and f"license = {{{version['license']}}}" in cited
