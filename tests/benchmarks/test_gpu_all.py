"""The run of all steps on a GPU: what it keeps, skips and ends. The steps here are tiny commands."""

import importlib.metadata
import importlib.util
import json
import sys
import time
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "gpu" / "all.py"

pytestmark = pytest.mark.starts


@pytest.fixture
def every(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("gpu_all", PATH)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_all", module)  # dataclasses look there
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SCRATCH", tmp_path / "scratch")
    return module


def step(every, name, code, seconds=0.1, limit=20.0, beside="", part="part"):
    return every.Step(part, name, (sys.executable, "-S", "-c", code), seconds, limit, beside)


def saved(folder):
    return json.loads((folder / "all.json").read_text())


def test_each_step_is_kept_and_done_once(every, tmp_path):
    write = "import pathlib; p = pathlib.Path({!r}); p.write_text(p.read_text() + 'x' if p.exists() else 'x')"
    runs, seen = tmp_path / "runs", tmp_path / "out" / "all.json"
    look = f"import json; print(sorted(json.load(open({str(seen)!r}))))"
    steps = [
        step(every, "first", write.format(str(runs)) + "; print('{\"figure\": 2}')"),
        step(every, "second", look),
        step(every, "third", "raise SystemExit(3)"),
    ]
    every.run(steps, tmp_path / "out", 60)
    rows = saved(tmp_path / "out")
    assert {name: row["state"] for name, row in rows.items()} == {
        "first": "passed", "second": "passed", "third": "failed"
    }  # fmt: skip
    assert rows["first"]["result"] == {"figure": 2} and rows["third"]["code"] == 3
    assert "['first']" in (tmp_path / "out" / "all.log").read_text(), "a result is there before the next step begins"
    every.run(steps, tmp_path / "out", 60)
    assert runs.read_text() == "x" and saved(tmp_path / "out") == rows


HANGS = """import subprocess, sys, time
print("begun", flush=True)
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
time.sleep(60)"""


def test_a_step_that_hangs_is_ended_with_its_processes(every, tmp_path):
    steps = [step(every, "hangs", HANGS, limit=1.0), step(every, "next", "")]
    begin = time.monotonic()
    every.run(steps, tmp_path, 60)
    assert time.monotonic() - begin < 20
    assert {name: row["state"] for name, row in saved(tmp_path).items()} == {"hangs": "slow", "next": "passed"}
    assert "begun" in (tmp_path / "all.log").read_text()
    every.run([step(every, "hangs", ""), steps[1]], tmp_path, 60)
    assert saved(tmp_path)["hangs"]["state"] == "slow", "it is not tried again"


def test_a_step_that_the_end_of_time_cuts_is_run_again(every, tmp_path):
    every.run([step(every, "one", HANGS)], tmp_path, 1)
    assert saved(tmp_path)["one"]["state"] == "cut"
    every.run([step(every, "one", "")], tmp_path, 20)
    assert saved(tmp_path)["one"]["state"] == "passed"


def test_what_the_time_does_not_suffice_for_is_left_out(every, tmp_path):
    steps = [step(every, "long", "", seconds=100), step(every, "short", "")]
    results = every.run(steps, tmp_path, 20)
    assert [*saved(tmp_path)] == ["short"]
    assert every.table(steps, results).splitlines()[0].split() == ["long", "not", "run"]


def test_steps_of_a_group_run_side_by_side(every, tmp_path):
    """Each waits until the other has begun."""
    wait = "import pathlib, time\npathlib.Path({!r}).touch()\nwhile not pathlib.Path({!r}).exists(): time.sleep(0.01)"
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    steps = [step(every, "a", wait.format(a, b), beside="x"), step(every, "b", wait.format(b, a), beside="x")]
    every.run(steps, tmp_path / "out", 60, workers=2)
    assert {row["state"] for row in saved(tmp_path / "out").values()} == {"passed"}


def test_tests_are_told_one_by_one(every, tmp_path):
    (tmp_path / "test_two.py").write_text("def test_right(): pass\n\ndef test_wrong(): assert 1 == 2\n")
    step = every.pytest_step("two", (str(tmp_path / "test_two.py"), "--rootdir", str(tmp_path)))
    results = every.run([step], tmp_path, 60)
    tests = {name.rpartition("::")[2]: row for name, row in saved(tmp_path)["tests two"]["tests"].items()}
    assert tests["test_right"]["outcome"] == "passed" and tests["test_wrong"]["outcome"] == "failure"
    assert "assert 1 == 2" in tests["test_wrong"]["message"] and "assert 1 == 2" in every.table([step], results)


def test_every_shard_names_files_that_there_are_and_every_script_has_a_part(every):
    for arguments in every.SHARDS.values():
        assert all((every.ROOT / name).exists() for name in arguments if name.endswith(".py"))
    parts = {step.part for step in every.steps_of()}
    assert parts == {"device", "tests", *(path.stem for path in PATH.parent.glob("*.py") if path != PATH)}


def test_where_tutti_is_not_installed_its_release_is_told_all_the_same(every, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(every.importlib.metadata, "version", missing)
    (folder,) = every.site_of()
    (distribution,) = importlib.metadata.distributions(name="tutti", path=[folder])
    assert distribution.version[0].isdigit()
