import importlib.util
import json
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "harness.py"


@pytest.fixture
def harness(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("harness", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "benchmarks" / "results")
    monkeypatch.setattr(module.Rows, "FOLDER", tmp_path / "rows")
    (tmp_path / "benchmarks").mkdir()
    return module


class Steady:
    """A contender whose every step takes the same time."""

    def __init__(self, name, seconds, log):
        self.name, self.seconds, self.log = name, seconds, log

    def turn(self, steps):
        self.log.append(self.name)
        return [self.seconds] * steps

    def close(self):
        pass


def test_all_take_turns_and_each_round_begins_with_another(harness):
    log = []
    contenders = [Steady(name, 1.0, log) for name in "abc"]
    times = harness.take_turns(contenders, rounds=3, steps=2)
    assert "".join(log) == "abc" + "abc" + "bca" + "cab"
    assert times == {name: [[1.0, 1.0]] * 3 for name in "abc"}


def test_ratio_is_taken_round_by_round(harness):
    """In the second round the machine was three times slower for all: the ratio does not see it."""
    times = {"ours": [[1.0], [3.0], [1.0]], "slow": [[9.0], [9.0], [9.0]], "peer": [[2.0], [6.0], [2.0]]}
    ratio = harness.ratio(times, ["slow", "ours"], ["peer"])
    assert (ratio["ours"], ratio["peer"]) == ("ours", "peer")
    assert ratio["by_round"] == [2.0, 2.0, 2.0] and ratio["times_faster"] == 2.0


def test_summary(harness):
    summary = harness.summary([[4.0, 1.0], [2.0, 3.0, 5.0]])
    assert summary == {"median": 3.0, "lower_quartile": 2.0, "upper_quartile": 4.0, "smallest": 1.0, "steps": 5}
    assert harness.summary([[2.0]])["median"] == 2.0


@pytest.mark.parametrize(("script", "options", "name"), [
    ("somewhere/speed.py", [], "speed.json"), ("somewhere/speed.py", ["--quick"], "speed-quick.json"),
    ("somewhere/gpu/speed.py", [], "gpu-speed.json"),
])  # fmt: skip
def test_last_line_is_the_saved_object(harness, monkeypatch, capsys, script, options, name):
    monkeypatch.setattr(sys, "argv", ["speed.py", *options])

    def run(quick):
        print("a peer writes to stdout")
        harness.say("half done")
        return {"figure": 1.5, "case": "small" if quick else "large"}

    harness.main(run, script, packages=["numpy"])
    captured = capsys.readouterr()
    result = json.loads(captured.out.splitlines()[-1])
    assert result == json.loads((harness.RESULTS / name).read_text())
    assert result["figure"] == 1.5 and result["quick"] == bool(options)
    assert {"benchmark", "date", "device", "threads", "versions"} <= set(result)
    assert {"python", "torch", "tutti", "numpy"} == set(result["versions"])
    assert "half done" in captured.err and "half done" not in captured.out


def test_rows_of_a_run_that_was_stopped_are_not_measured_again(harness, monkeypatch, capsys):
    measured = []

    def measure(row):
        measured.append(row)
        return {"s": len(measured)}

    rows = harness.Rows("long")
    assert rows.row("a", lambda: measure("a")) == {"s": 1}
    with pytest.raises(ZeroDivisionError):
        rows.row("b", lambda: 1 / 0)
    again = harness.Rows("long")
    assert [again.row(key, lambda key=key: measure(key)) for key in "ab"] == [{"s": 1}, {"s": 2}]
    assert measured == ["a", "b"]
    harness.Rows("long", ["numpy"]).row("a", lambda: measure("a with other versions"))
    assert measured == ["a", "b", "a with other versions"]
    (harness.Rows.FOLDER / "long.json").write_text("{")  # a file that is cut off
    assert harness.Rows("long").row("a", lambda: measure("a")) == {"s": 4}
    monkeypatch.setattr(sys, "argv", ["long.py"])
    harness.main(lambda quick: {}, "long.py")
    assert not (harness.Rows.FOLDER / "long.json").exists(), "the whole result is saved"


def test_contenders_may_warm_up_together(harness):
    log = []
    harness.take_turns([Steady(name, 1.0, log) for name in "ab"], rounds=1, steps=1, together=True)
    assert sorted(log[:2]) == ["a", "b"] and "".join(log[2:]) == "ab" + "ab"


def test_one_case_alone_is_printed_and_not_saved(harness, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["speed.py", "--only", "b"])
    harness.main(lambda quick, only: {"case": only}, "somewhere/speed.py", cases=["a", "b"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["case"] == "b" and not harness.RESULTS.exists()
