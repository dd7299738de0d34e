"""`tutti plan --report`: one page with the answer, which loads nothing and shows hostile names as text."""

import re
import shutil
from html.parser import HTMLParser

import pytest

import tutti
from tutti import cli
from tutti.cli.plan.report import model_name
from tutti.plan.explain import seconds, size
from tutti.sim.error_bars import DENSE, ERROR_BARS

HOSTILE = 'x"><img src=x onerror=alert(1)>'
OPTIONS = ["--batch", "8", "--seq", "32", "--level", "O0"]


class Page(HTMLParser):
    """Tags and text of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data):
        self.words.append(data)


@pytest.mark.parametrize("plan", ["zero3", "pp2xdp2"])
def test_the_page_has_the_answer_and_loads_nothing(model, plan, tmp_path, capsys):
    folder = tmp_path / HOSTILE
    shutil.copytree(model, folder)
    file, saved = tmp_path / "plan.html", tmp_path / "plan.json"
    arguments = ["plan", "--model", str(folder), "--cluster", "h100:4", *OPTIONS, "--plan", plan, "--tokens", "1e9",
                 "--price", "2", "--report", str(file), "--save", str(saved)]  # fmt: skip
    assert cli.main(arguments) == 0
    assert f"saved {file}" in capsys.readouterr().out
    text, prediction = file.read_text(), tutti.Plan.load(saved).predicted
    page = Page(text)
    words = " ".join(page.words)
    assert f"{HOSTILE} on h100:4" in words and "tutti plan --model" in words
    assert not {"script", "img", "link", "iframe", "object"} & {*page.tags} and page.tags.count("svg") == 2
    assert all(not name.startswith("on") and name != "src" for name, _ in page.attributes)
    assert all(value.startswith("#") for name, value in page.attributes if name in ("href", "xlink:href"))
    assert not re.search(r"url\((?!#)|@import", text)
    for expected in (seconds(prediction.step_seconds), size(prediction.peak_bytes), "MWh", "at 2 a device hour",
                     "optimizer state", "NVIDIA H100 datasheet", f"within {100 * ERROR_BARS[DENSE]:.0f} %",
                     "of 80 GiB on a device: fits"):  # fmt: skip
        assert expected in words, expected


@pytest.mark.slow
def test_a_search_shows_its_ranking_and_the_runner_up(model, tmp_path, capsys):
    file = tmp_path / "plan.html"
    assert cli.main(["plan", "--model", str(model), "--cluster", "h100:4", *OPTIONS, "--report", str(file)]) == 0
    out = capsys.readouterr().out
    page = Page(file.read_text())
    rows = [line.split()[0] for line in out.splitlines() if line.rstrip().endswith(" yes")]
    assert len(rows) == 5 and all(row in page.words for row in rows)
    assert any(reason.startswith("runner-up ") for reason in page.words)


def test_names_of_models():
    assert model_name("/a/llama/config.json") == "llama" and model_name("/a/qwen2.5-72b.json") == "qwen2.5-72b"
    assert model_name("package.module:function") == "package.module:function"


@pytest.mark.parametrize("option, message", [
    (["--report", "plan.txt"], "its name must end in .html"),
    (["--report", "/nowhere/plan.html"], "--report /nowhere/plan.html: there is no folder /nowhere"),
    (["--memory", "/nowhere/memory.svg"], "--memory /nowhere/memory.svg: there is no folder /nowhere"),
])  # fmt: skip
def test_files_that_cannot_be_written_are_named_before_the_search(model, capsys, option, message):
    assert cli.main(["plan", "--model", str(model), "--cluster", "h100:4", *option]) == 2
    assert message in capsys.readouterr().err
