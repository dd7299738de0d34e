"""`tutti train` as a command: two processes, and input that is wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

from tutti import cli
from tutti.train.command import run
from tutti.train.configfile import load, parse
from tutti.train.corpus import load_pipeline
from tutti.train.text.config import check
from tutti.train.text.history import read, series


def tutti(*args):
    return subprocess.run([sys.executable, "-m", "tutti.cli", *args], capture_output=True, text=True)


@pytest.fixture
def options(corpus, tmp_path):
    return [
        *("--data.source", str(corpus), "--data.cache", str(tmp_path / "cache"), "--data.held-out", "0.2"),
        *("--tokenizer.vocab-size", "300", "--batch.size", "4", "--batch.seq", "16", "--model.hidden-size", "32"),
        *("--model.num-hidden-layers", "2", "--model.num-attention-heads", "2", "--schedule.steps", "4"),
        *("--schedule.warmup", "2", "--eval.batches", "2", "--parallel.level", "O0", "--sample.tokens", "2"),
        *("--parallel.precision", "float32", "--checkpoint.every", "2"),
    ]


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one(options, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    run(parse([*options, "--out", str(one)]))
    done = tutti("train", *options, "--out", str(two), "--parallel.processes", "2", "--parallel.plan", "dp")
    assert done.returncode == 0, done.stderr
    assert "(dp 2) on cpu:2" in done.stdout and done.stdout.count("step 4  saved") == 1
    assert series(read(two), "loss")[1] == pytest.approx(series(read(one), "loss")[1], rel=1e-5)


@pytest.mark.slow
def test_a_mistake_that_only_the_ranks_find_is_one_line(options, tmp_path):
    wrong = ["--parallel.processes", "2", "--parallel.plan", "tp7", "--out", str(tmp_path / "run")]
    done = tutti("train", *options, *wrong)
    assert done.returncode == 1
    assert done.stderr.startswith("tutti train: ") and "tp7" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--data.source", "/nowhere"], "tutti train: the corpus /nowhere is not a folder; give one, or 'stdlib'"),
        (["--model.type", "lama"], "did you mean llama?"),
        (["--parallel.processes", "0"], "tutti train: parallel.processes must be at least 1, not 0"),
        (["--batch.seq", "100000"], "windows of 100000 need at least 200000"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(options, tmp_path, capsys, wrong, message):
    assert cli.main(["train", *options, "--out", str(tmp_path / "run"), *wrong]) == 2
    err = capsys.readouterr().err
    assert message in err and err.startswith("tutti train: ") and err.count("\n") == 1


def test_a_misspelt_model_option_writes_nothing(options, tmp_path, capsys):
    file, out = tmp_path / "run.toml", tmp_path / "run"
    file.write_text("[model.options]\nintermediate_sise = 48")
    assert cli.main(["train", str(file), *options, "--out", str(out)]) == 2
    assert "no option intermediate_sise (model.options); did you mean intermediate_size?" in capsys.readouterr().err
    assert not out.exists() and not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_a_run_that_failed_before_its_first_checkpoint_can_be_corrected(options, tmp_path, capsys):
    out = tmp_path / "run"
    assert cli.main(["train", *options, "--out", str(out), "--batch.seq", "100000"]) == 2
    assert "windows of 100000 need" in capsys.readouterr().err
    assert cli.main(["train", *options, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "step 4  saved" in said and "changed since the run began" not in said
    assert series(read(out), "loss")[0] == [1, 2, 3, 4]


def test_a_mistake_in_the_config_file_names_file_and_key(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text("[optimizer]\nlerning_rate = 1")
    assert cli.main(["train", str(file)]) == 2
    keys = "name, lr, betas, momentum, weight_decay, layer_decay, ema_decay, clip_norm, stochastic_rounding"
    keys += ", max_nonfinite_steps"
    said = f"tutti train: {file}: there is no key optimizer.lerning_rate; [optimizer] has {keys}\n"
    assert capsys.readouterr().err == said


def test_every_run_of_the_repository_is_a_valid_config():
    runs = (Path(__file__).parents[2] / "runs").glob("*.toml")
    files = sorted(f for f in runs if not f.name.startswith(("md_", "mt_", "peptides")))  # of other verbs
    assert load_pipeline(files.pop(0)).out == "out/code_corpus"
    assert [f.name for f in files] == ["code_lm.toml", "code_lm_35m.toml", "corpus_lm.toml", "demo.toml"]
    for file in files:
        check(load(file))
