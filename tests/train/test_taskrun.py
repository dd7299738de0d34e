"""`tutti train` with a config that names a task."""

from __future__ import annotations

import json
import signal

import pytest
import transformers

from tutti.cli import main
from tutti.data.reviews import Reviews
from tutti.train.configfile import parse
from tutti.train.trainer.trainer import Trainer

BASE = """
out = "OUT"
task = "masked-lm"

[options]
length = 32

[model]
type = "bert"
hidden_size = 16
num_hidden_layers = 1
num_attention_heads = 2
intermediate_size = 32
max_position_embeddings = 32

[tokenizer]
kind = "wordpiece"
vocab_size = 300

[data]
train = "ROWS"
held_out = "ROWS"

[trainer]
max_steps = 3
global_batch_size = 4
disable_tqdm = true
use_cpu = true
level = "O0"
plan = "dp"
"""


@pytest.fixture
def base(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps(row) for row in Reviews().rows(24, 0)))
    file = tmp_path / "base.toml"
    file.write_text(BASE.replace("OUT", str(tmp_path / "out")).replace("ROWS", str(rows)))
    return file


def test_a_task_is_trained_from_a_config(base, tmp_path, capsys):
    assert main(["train", str(base)]) in (0, None)
    assert "eval_loss" in json.loads((tmp_path / "out/metrics.json").read_text())
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out/model")
    assert model.config.vocab_size == len(transformers.AutoTokenizer.from_pretrained(tmp_path / "out/model"))
    assert "model" in capsys.readouterr().out


def test_steps_of_saves_and_evaluations_need_no_strategy(base, tmp_path):
    base.write_text(base.read_text() + "save_steps = 2\neval_steps = 1\n")
    assert main(["train", str(base)]) in (0, None)
    state = json.loads((tmp_path / "out/checkpoint-2/trainer_state.json").read_text())
    assert [row["step"] for row in state["log_history"] if "eval_loss" in row] == [1, 2]


def test_a_file_includes_another_and_may_be_yaml(base, tmp_path):
    file = tmp_path / "more.yaml"
    file.write_text(f"include: base.toml\nout: {tmp_path / 'classes'}\ntask: sequence-classification\n"
                    f"model:\n  num_labels: 2\n  folder: null\n")  # fmt: skip
    assert main(["train", str(file)]) in (0, None)
    assert "eval_accuracy" in json.loads((tmp_path / "classes/metrics.json").read_text())


def test_mistakes_are_named(base, tmp_path, capsys):
    def said(text):
        file = tmp_path / "wrong.toml"
        file.write_text(text)
        assert main(["train", str(file)]) not in (0, None)
        return capsys.readouterr().err

    assert "there is no key trainr; did you mean trainer?" in said('task = "masked-lm"\n[trainr]\n')
    assert "learning_rate" in said('include = "base.toml"\n[trainer]\nlearning_rat = 1.0\n')
    assert "masked-lm" in said('include = "base.toml"\ntask = "masked-lms"\n')
    assert "includes itself" in said('include = "wrong.toml"\n')
    assert "no file" in said('include = "nothing.toml"\n')
    assert "the file needs [data] train" in said('task = "masked-lm"\n')
    assert "data.streaming" in said('include = "base.toml"\n[data]\nstreaming = true\n')
    assert "one of 'bytes', 'wordpiece'" in said('include = "base.toml"\n[tokenizer]\nkind = "word"\n')
    assert "parallel.processes is 0; it must be at least 1" in said('include = "base.toml"\nparallel.processes = 0\n')
    assert main(["train", str(base), "--sed", "1"]) not in (0, None)
    assert "there is no key sed; did you mean seed?" in capsys.readouterr().err


def test_options_of_the_command_line_are_over_the_file(base, tmp_path, capsys):
    parsed = parse(
        [str(base), "--trainer.max_steps", "1", f"--out={tmp_path / 'other'}", "--tokenizer.vocab-size", "90"]
    )
    assert (parsed.trainer["max_steps"], parsed.trainer["plan"], parsed.tokenizer.vocab_size) == (1, "dp", 90)
    assert parsed.out == str(tmp_path / "other")
    with pytest.raises(ValueError, match=r"--section\.key value"):
        parse([str(base), "--seed"])
    with pytest.raises(SystemExit):
        parse([str(base), "--help"])
    assert "tokenizer.vocab_size     a whole number; 4096 without it" in capsys.readouterr().out


def test_a_signal_stops_it_with_a_checkpoint(base, tmp_path, monkeypatch, capsys):
    """And the same command goes on, with the losses of a run that was left alone."""
    base.write_text(base.read_text().replace("max_steps = 3", "max_steps = 5\nlogging_steps = 1"))
    alone = tmp_path / "alone.toml"
    alone.write_text(base.read_text().replace(str(tmp_path / "out"), str(tmp_path / "alone")))
    assert main(["train", str(alone)]) in (0, None)
    run_step, count = Trainer.run_step, 0

    def stopped(self, batch):
        nonlocal count
        count += 1
        if count == 2:
            signal.raise_signal(signal.SIGTERM)
        return run_step(self, batch)

    monkeypatch.setattr(Trainer, "run_step", stopped)
    assert main(["train", str(base)]) == 128 + signal.SIGTERM
    assert "saved step 2; the same command again continues" in capsys.readouterr().out
    assert count == 2 and (tmp_path / "out/checkpoint-2").is_dir() and not (tmp_path / "out/model").exists()
    assert main(["train", str(base)]) in (0, None)
    logs = [json.loads((tmp_path / x / "trainer_state.json").read_text())["log_history"] for x in ("alone", "out")]
    losses = [[row["loss"] for row in rows if "loss" in row] for rows in logs]
    assert len(losses[0]) == 5 and losses[0] == losses[1]
