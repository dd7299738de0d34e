"""What README, the claims and the guide quote: claims are listed, figures are those of results, commands exist."""

import json
import re
import statistics
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CLAIMS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/proofs/claims*.md"))
FIGURES = tomllib.loads((ROOT / "docs/proofs/figures.toml").read_text())["figure"]
NUMBER = r"\d[\d,]*(?:\.\d+)?"
SETTINGS = {  # numbers of README's rows that say what was measured, not what came out
    "benchmarks/published.py": ["27", "1", "2048"],
    "benchmarks/rl.py": ["3"],
    "benchmarks/mt.py": ["2", "0", "0.25", "2"],
    "benchmarks/mt_prior.py": [],
    "benchmarks/surrogate.py": ["90"],
    "benchmarks/fdtd.py": ["3", "0.6", "3"],
    "benchmarks/mol_md.py": ["864", "8.6"],
    "benchmarks/corpus.py": ["0.10", "0.4", "0.5"],
}


@cache
def result(name: str) -> dict:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def leaves(tree, keys: list[str]) -> list[float]:
    if not keys:
        return [float(tree)]
    if keys[0] == "*":
        return [x for each in tree.values() for x in leaves(each, keys[1:])]
    return leaves(tree[int(keys[0])] if isinstance(tree, list) else tree[keys[0]], keys[1:])


def value(tree: dict, text: str) -> float:
    """The value of an expression of docs/proofs/figures.toml."""
    if " over " in text:
        above, below = text.split(" over ")
        return value(tree, above) / value(tree, below)
    if text.endswith(" per MiB"):
        return value(tree, text.removesuffix(" per MiB")) / 2**20
    if match := re.fullmatch(r"(.*) times ([\d.e-]+)", text):
        return value(tree, match[1]) * float(match[2])
    if text.endswith(" minus 1"):
        return value(tree, text.removesuffix(" minus 1")) - 1
    if text.startswith("1 minus "):
        return 1 - value(tree, text.removeprefix("1 minus "))
    word, _, path = text.partition(" ")
    reduce = {"max": max, "min": min, "median": statistics.median}.get(word)
    if reduce is None:
        (leaf,) = leaves(tree, text.split("|"))
        return leaf
    return reduce(leaves(tree, path.split("|")))


def quoted(figure: dict) -> str:
    return figure["text"].format(*(value(result(figure["result"]), text) for text in figure["values"]))


@pytest.mark.parametrize("figure", FIGURES, ids=lambda f: f"{Path(f['page']).stem}-{f['result']}-{f['text'][:20]}")
def test_quoted_figures_are_those_of_the_results(figure):
    expected, page = (" ".join(text.split()) for text in (quoted(figure), (ROOT / figure["page"]).read_text()))
    says_so = expected in page
    assert says_so, f"{figure['page']} does not say: {expected}"
    assert figure["text"].count("{:") == len(figure["values"])


def proofs() -> list[tuple[str, str]]:
    """Claim and command of each row of README's table of proofs."""
    section = (ROOT / "README.md").read_text().split("## Proofs")[1].split("\n## ")[0]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in section.splitlines() if re.match(r"\| (?!claim)[^-]", line)]
    assert len(rows) > 15
    return [(claim.strip(), command.strip()) for claim, command in rows]


def rows_of_claims() -> list[tuple[str, str]]:
    lines = [line for page in CLAIMS for line in (ROOT / page).read_text().splitlines()]
    rows = [line.strip("| \n").rsplit(" | ", 1) for line in lines]
    return [(row[0], row[1]) for row in rows if len(row) == 2]


def files(text: str) -> set[str]:
    return set(re.findall(r"(?:tests|benchmarks)/[\w/]+(?:\.py)?", text))


@pytest.mark.parametrize(("claim", "command"), proofs(), ids=lambda x: x[-40:])
def test_every_row_of_readme_is_a_claim_with_a_command_that_exists(claim, command):
    assert files(command) and all((ROOT / file).exists() for file in files(command))
    assert any(files(command) <= files(proof) for _, proof in rows_of_claims()), (
        f"docs/proofs/claims*.md have no row of {command}"
    )
    for part in re.findall(r"`([^`]+)`", command):
        expected = "pytest --whole tests/" if "tests/" in part else "python benchmarks/"
        assert part.startswith(expected), "all cases of a test, or a script"


@pytest.mark.parametrize(
    ("claim", "command"), [row for row in proofs() if "benchmarks/" in row[1]], ids=lambda x: x[-25:]
)
def test_every_number_of_a_measured_row_of_readme_is_a_figure(claim, command):
    (script,) = (file for file in files(command) if file.startswith("benchmarks/"))
    rest = claim
    for figure in FIGURES:
        if figure["page"] == "README.md" and f"benchmarks/{figure['result']}.py" == script:
            rest = rest.replace(quoted(figure), re.sub(r"\{:[^}]*\}", "", figure["text"]))
    assert set(re.findall(r"(?<![\w.])" + NUMBER, rest)) <= set(SETTINGS[script])


def test_every_claim_of_a_benchmark_has_a_figure_or_says_why_not():
    checked = {figure["result"] for figure in FIGURES if figure["page"] in CLAIMS}
    without = tomllib.loads((ROOT / "docs/proofs/figures.toml").read_text())["without"]
    cited = {
        Path(file).stem for _, proof in rows_of_claims() for file in files(proof) if file.startswith("benchmarks/")
    }
    assert cited <= checked | set(without), f"no figure in docs/proofs/figures.toml: {cited - checked - set(without)}"
    assert not checked & set(without) and set(without) <= cited, "listed in vain"


def test_times_say_which_clock():
    for claim, command in proofs():
        if "benchmarks/rl.py" in command or "benchmarks/mt.py" in command or "benchmarks/fdtd.py" in command:
            assert "wall time" in claim
    assert "per CPU second and" in next(claim for claim, command in proofs() if "benchmarks/rl.py" in command)


def test_a_wrong_figure_is_found():
    figure = {"text": "{:.1f} x", "result": "mt", "values": ["times_faster|forward|tutti than simpeg-mmd"]}
    assert quoted(figure) == "3.3 x"
    assert value({"a": {"b": 2.0, "c": 4.0}}, "max a|* times 10") == 40
    assert value({"a": {"b": 2.0, "c": 4.0}}, "a|b over a|c") == 0.5
