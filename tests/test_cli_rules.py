"""`tutti rules` as a command, in this process: the table, a model's operators, and the proof by machine."""

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import tutti
from tutti import cli
from tutti.check.samples.sample import SAMPLES
from tutti.cli import rules as command
from tutti.ir.op_info import CONTIGUOUS, LOCAL, RULES, SENDS

aten = torch.ops.aten
PAGE = Path(__file__).parents[1] / "docs/extend/operator.md"


def run(capsys, *arguments) -> tuple[int, str, str]:
    code = cli.main(["rules", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def table(out: str) -> dict[str, list[str]]:
    """The cells of every row, by operator."""
    rows = [re.split(r" {2,}", line.strip()) for line in out.splitlines() if line.startswith((" aten.", " tutti."))]
    return {row[0]: row[1:] for row in rows}


def two_products():
    """What an import path names: a model and a batch."""

    class Model(nn.Linear):
        def forward(self, x):
            return (super().forward(x) @ self.weight).square().sum()

    return Model(8, 8), (torch.ones(4, 8),)


def test_the_table(capsys):
    code, out, _ = run(capsys)
    names = {command.name(target) for target in RULES}
    assert code == 0 and len(names & set(table(out))) > 100 and "torch.pointwise (tag)" in out
    code, out, _ = run(capsys, "aten.bmm")
    assert code == 0 and table(out) == {"aten.bmm": ["b m k, b k n -> b m n | ~0 ~1"]}
    code, out, _ = run(capsys, "nll_loss_forward")
    assert table(out) == {"aten.nll_loss_forward": ["by its arguments (tutti.ops.reductions.loss)", "yes"]}


def test_operators_are_named_in_several_ways(capsys):
    for spelling in ("relu", "aten.relu"):
        code, out, _ = run(capsys, spelling)
        assert code == 0 and table(out) == {"aten.relu": ["a b -> a b, elementwise by torch's tag"]}
    assert re.search(r"\d+ more operator names contain 'relu'", run(capsys, "relu")[1])
    assert set(table(run(capsys, "mm", "bmm")[1])) == {"aten.mm", "aten.bmm"}
    assert {"aten.sum", "aten.sum.dim_IntList"} == set(table(run(capsys, "aten.sum")[1]))
    assert {"aten.cummax", "aten.cummin"} <= set(table(run(capsys, "cumm")[1])), "there is none of this name"
    assert set(table(run(capsys, "--check", "--examples", "1", "mm", "relu")[1])) == {"aten.mm", "aten.relu"}


def test_names_are_not_broken(capsys):
    long = "aten._scaled_dot_product_flash_attention_for_cpu_backward"
    assert long in table(run(capsys, "flash_attention_for_cpu_backward")[1])


def test_a_model(model, capsys):
    code, out, err = run(capsys, "--model", model, "--batch", "2", "--seq", "16")
    assert code == 0, err
    assert table(out)["aten.mm"][-1] == str(3 * 7 * 2), (
        "seven matrices a layer, forward and twice backward; the head is one operator with the loss"
    )
    assert out.rstrip().endswith("; 0 calls without a rule")


def test_an_operator_that_is_none_names_the_nearest(capsys):
    code, _, err = run(capsys, "embeding")
    assert code == 2 and err == "tutti rules: no operator contains 'embeding'; the nearest is 'embedding'\n"
    assert run(capsys, "embeding", "--check")[0::2] == (code, err)


def test_help_documents_every_option(capsys):
    assert cli.main(["rules", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(text in out for text in ("--model", "--batch", "--seq", "--check", "--examples", "of a transformers"))


def test_a_right_rule_is_proven(capsys):
    code, out, _ = run(capsys, "--check", "--examples", "4", "aten.mm")
    samples, cases, tried = table(out)["aten.mm"]
    assert code == 0 and samples == "4" and int(cases) > 30 and tried == "0", "there is nothing that mm forbids"
    assert out.splitlines()[-1] == f"1 operators, {cases} split cases; 0 without samples, 0 wrong"


def test_what_a_rule_forbids_is_tried(capsys):
    code, out, _ = run(capsys, "--check", "--examples", "6", "tril_indices")
    _, cases, tried = table(out)["aten.tril_indices"]
    assert code == 0 and cases == "0" and int(tried) > 3


def test_a_wrong_rule_is_shown_with_the_call_that_it_fails_for(capsys, monkeypatch):
    monkeypatch.setitem(RULES, aten.mv.default, "m k:max, k -> m")
    code, out, _ = run(capsys, "--check", "--examples", "4", "aten.mv")
    assert code == 1 and table(out)["aten.mv"] == ["wrong"]
    assert "1 operators, 0 split cases; 0 without samples, 1 wrong" in out
    failure = out.splitlines()[-1]
    assert re.search(r"aten\.mv: aten\.mv\.default\(float\d\d\[\d+, \d+\], float\d\d\[\d+\]\), rule 'm k:max", out), (
        failure
    )
    assert "split by a=" in out


def test_operators_of_a_model_are_proven_by_themselves(capsys):
    code, out, err = run(capsys, "--model", "test_cli_rules:two_products", "--check", "--examples", "2")
    assert code == 0, err
    assert {"aten.addmm", "aten.mm"} <= set(table(out)) and "aten.bmm" not in table(out)
    assert len(run(capsys, "--model", "test_cli_rules:two_products", "--check", "--examples", "1", "addmm")[1]) < len(
        out
    )


def test_an_operator_without_samples_is_told(capsys, monkeypatch):
    monkeypatch.delitem(SAMPLES, aten.mv.default)
    code, out, _ = run(capsys, "--check", "mv")
    assert code == 0 and table(out)["aten.mv"] == ["none"] and "1 without samples, 0 wrong" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="has the device")
def test_an_operator_of_another_device_is_told(capsys):
    code, out, _ = run(capsys, "--check", "cudnn_attention_backward")
    assert code == 0 and "only on cuda" in out and "1 operators, 0 split cases; 0 without samples, 0 wrong" in out


def test_what_is_needlessly_forbidden_is_told(capsys, monkeypatch):
    monkeypatch.setitem(RULES, aten.mv.default, "m! k, k -> m")
    code, out, _ = run(capsys, "--check", "--examples", "10", "mv")
    assert code == 0 and "aten.mv forbids a valid split: splitting m\n" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--examples", "3"], "--examples sets the number of calls that --check draws: add --check"),
        (["--check", "--examples", "0"], "--examples is 0; it must be at least 1"),
    ],
)
def test_mistakes_are_one_line(capsys, options, message):
    assert run(capsys, *options) == (2, "", f"tutti rules: {message}\n")


def test_the_machine_needs_hypothesis(capsys, monkeypatch):
    for module in [m for m in sys.modules if m == "tutti.check.machine" or m.startswith("tutti.check.samples")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    message = "checking rules needs the package hypothesis: pip install 'tutti[check]'"
    assert run(capsys, "--check", "mm") == (2, "", f"tutti rules: {message}\n")
    assert run(capsys, "mm")[0] == 0, "the table does not"


def page() -> str:
    """The page with another name for its library: its own operators may be defined already."""
    return PAGE.read_text().replace("mylib", "tests_of_rules")


@pytest.mark.slow
def test_the_example_of_the_page():
    (example,) = re.findall(r"```python\nimport torch\n\nimport tutti\n\n\n(@tutti\.rule.*?)```", page(), re.DOTALL)
    before = set(RULES)
    wrong = example.replace("| ~1", "| ~0").replace("silu_mm", "other_mm")
    try:
        exec(example, {"tutti": tutti, "torch": torch})
        assert {str(t): RULES[t] for t in set(RULES) - before} == {
            "tests_of_rules.silu_mm.default": "b s d, d e -> b s e | ~1"
        }
        with pytest.raises(AssertionError, match=r"\| ~0', split by a=2: ~0"):
            exec(wrong, {"tutti": tutti, "torch": torch})
    finally:
        for target in set(RULES) - before:
            del RULES[target]


def test_the_example_of_a_local_computation():
    (example,) = re.findall(r"```python\n(@torch\.library.*?rms_of_parts.*?)```", page(), re.DOTALL)
    tables = [(table, set(table)) for table in (CONTIGUOUS, LOCAL, RULES, SENDS)]
    unshared = example.replace('here.all_reduce(x.square().mean(1, keepdim=True), "d", "avg")', "x.square().mean(1)")
    try:
        exec(example, {"tutti": tutti, "torch": torch})
        assert (
            RULES[torch.ops.tests_of_rules.rms.default] == "b d@ -> b d@"
            and torch.ops.tests_of_rules.rms.default in LOCAL
        )
        with pytest.raises(AssertionError, match="rule 'b d@ -> b d@', split by a=2"):
            exec(unshared.replace("rms", "other_rms"), {"tutti": tutti, "torch": torch})
    finally:
        for table, before in tables:
            for target in set(table) - before:
                del table[target]
