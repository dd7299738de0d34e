"""`tutti launch`: what it checks before anything is submitted."""

import pytest

from tutti import cli


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("")
    (tmp_path / "a.toml").write_text("out = 'x'\n")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-- train", "no cluster: give one of --slurm"),
        ("--slurm --ray -- train", "--slurm and --ray: give one of"),
        ("--slurm", "no verb: write it after --"),
        ("--slurm -- trian", "no verb 'trian'; did you mean train?"),
        ("--slurm -- chat m", "chat cannot be launched: it needs a terminal"),
        ("--slurm -- train nowhere.toml", "no file nowhere.toml"),
        ("--slurm -- train a.toml --schedule.step 3", "no option --schedule.step; did you mean --schedule.steps"),
        ("--slurm -- align sft nowhere.toml", "there is no file nowhere.toml"),
        ("--slurm -- rl train nowhere", "there is no preset 'nowhere'"),
        ("--slurm -- rl trian x", "there is no verb 'trian' of rl"),
        ("--slurm -- corpus run nowhere.toml", "no file nowhere.toml"),
        ("--slurm -- corpus run nowhere.toml --ray", "leave --ray out"),
        ("--slurm -- corpus run .", ". is a folder"),
        ("--slurm -- run nowhere.py", "no file nowhere.py"),
        ("--slurm -- run --restarts 3 script.py", "options of `tutti run` are options of `tutti launch`"),
        ("--kubernetes --partition gpu -- run script.py", "--partition is an option of --slurm, not of --kubernetes"),
    ],
)
def test_what_is_wrong_is_said_before_it_waits_in_a_queue(here, capsys, words, message):
    assert cli.main(["launch", *words.split()]) == 2
    assert message in capsys.readouterr().err
    assert not (here / "launch").exists()


def test_a_folder_that_cannot_be_written(here, capsys):
    (here / "file").write_text("")
    assert cli.main(["launch", "--slurm", "--folder", "file", "--", "run", "script.py"]) == 2
    assert "file" in capsys.readouterr().err


def test_a_dry_run_prints_the_script_and_writes_nothing(here, capsys):
    assert cli.main(["launch", "--slurm", "--dry-run", "--", "run", "script.py", "--steps", "3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("#!/bin/bash\n") and "script.py --steps 3" in out
    assert not (here / "launch").exists()
