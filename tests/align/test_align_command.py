"""`tutti align`: configs are run, resumed and checked."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import align_models as small
from tutti.align.arguments import pretrained
from tutti.align.command import command
from tutti.align.report import write_report
from tutti.align.trainer import AlignTrainer
from tutti.launch.launch import Interrupted

OPTIONS = "max_steps = 2\nper_device_train_batch_size = 4\nlogging_steps = 1\nlearning_rate = 0.01\n"


@pytest.fixture
def folder(tmp_path):
    small.model().save_pretrained(tmp_path / "model")
    small.tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"{i}+{i}=", "completion": str(2 * i), "chosen": str(2 * i), "rejected": "?"} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(x) + "\n" for x in rows))
    (tmp_path / "rewards.py").write_text(
        "def vowels(completions):\n    return [float('a' in x) for x in completions]\n"
    )
    return tmp_path


def config(folder: Path, name: str = "run", options: str = "", tables: str = "", model: str = "model") -> Path:
    path = folder / f"{name}.toml"
    path.write_text(f"model = '{folder / model}'\ndata = '{folder / 'rows.jsonl'}'\nout = '{folder / name}'\n"
                    f"{tables if '=' in tables.partition('[')[0] else ''}[options]\n{OPTIONS}{options}"
                    f"{'' if '=' in tables.partition('[')[0] else tables}")  # fmt: skip
    return path


@pytest.mark.parametrize("kind", ["sft", "dpo", "orpo"])
def test_a_run(kind, folder, capfd):
    command(kind, config(folder))
    assert f"model                          {folder / 'run' / 'model'}" in capfd.readouterr().out
    AutoModelForCausalLM.from_pretrained(folder / "run" / "model")
    command(kind, config(folder))  # nothing is left to do


def test_a_reward_model_and_a_policy(folder):
    command("reward", config(folder, "judge"))
    AutoModelForSequenceClassification.from_pretrained(folder / "judge" / "model")
    rewards = f"[[rewards]]\nmodel = '{folder / 'judge' / 'model'}'\nweight = 0.5\n"
    options = "num_generations = 4\nmax_completion_length = 4\n"
    held_out = f"held_out = '{folder / 'rows.jsonl'}'\n"
    command("grpo", config(folder, "policy", options, held_out + rewards), (f"{folder / 'rewards.py'}:vowels",))
    state = json.loads((folder / "policy" / "trainer_state.json").read_text())
    assert {"rewards/vowels/mean", "rewards/LlamaForSequenceClassification/mean"} <= state["log_history"][0].keys()
    assert "eval_reward" in state["log_history"][-1]
    page = (folder / "policy" / "report.html").read_text()
    assert "<svg" in page and "<td>reward</td>" in page and "<h2>Completions</h2>" in page


@pytest.mark.parametrize("kind", ["online_dpo", "best_of_n"])
def test_rewards_that_verify(kind, folder):
    rewards = "[[rewards]]\nverifier = 'regex'\npattern = '[aeiou]'\nweight = 2.0\n" + (
        "[[rewards]]\nverifier = 'exact_match'\ncolumn = 'completion'\nextract = 'boxed'\nnormalize = 'number'\n"
    )
    options = f"max_completion_length = 4\nnum_generations = {2 if kind == 'online_dpo' else 4}\n"
    command(kind, config(folder, options=options, tables=rewards))
    log = json.loads((folder / "run" / "trainer_state.json").read_text())["log_history"][0]
    assert log["rewards/exact_match/mean"] == 0 and log["reward"] == pytest.approx(2 * log["rewards/regex/mean"])


def test_an_environment(folder):
    (folder / "games.py").write_text(
        "class Game:\n    def reset(self, row):\n        return row['prompt']\n\n"
        "    def step(self, completion):\n        return '', 0.5, True\n"
    )
    options = "num_generations = 4\nmax_completion_length = 4\n"
    command("grpo", config(folder, options=options, tables=f"env = '{folder / 'games.py'}:Game'\n"))
    log = json.loads((folder / "run" / "trainer_state.json").read_text())["log_history"][0]
    assert log["rewards/environment/mean"] == log["reward"] == 0.5


def test_a_teacher(folder):
    small.model(seed=5).save_pretrained(folder / "teacher")
    tables = f"teacher = '{folder / 'teacher'}'\nheld_out = '{folder / 'rows.jsonl'}'\n"
    command("gkd", config(folder, options="max_completion_length = 4\nlmbda = 0.0\n", tables=tables))
    log = json.loads((folder / "run" / "trainer_state.json").read_text())["log_history"]
    assert log[0]["loss"] > log[-1]["eval_loss"] > 0


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_adapters(folder):
    command("dpo", config(folder, tables="[lora]\nr = 2\ntarget_modules = ['q_proj']\n"))
    assert (folder / "run" / "model" / "adapter_config.json").exists()


def message(kind: str, path: Path, *reward: str) -> str:
    with pytest.raises(ValueError) as caught:
        command(kind, path, reward)  # pyright: ignore[reportArgumentType]
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_adapters_are_merged_in_further_runs(folder):
    """A policy of adapters is trained further, and a reward model of adapters gives rewards."""
    command("sft", config(folder, "tuned", tables="\n[lora]\nr = 2\ntarget_modules = ['q_proj']\n"))
    lora = "\n[lora]\nr = 2\ntarget_modules = ['q_proj']\ntask_type = 'SEQ_CLS'\n"
    command("reward", config(folder, "judge", tables=lora))
    rewards = f"\n[[rewards]]\nmodel = '{folder / 'judge' / 'model'}'\n"
    options = "num_generations = 4\nmax_completion_length = 4\n"
    command("grpo", config(folder, "policy", options, rewards, model="tuned/model"))
    from peft import PeftModel

    merged = PeftModel.from_pretrained(small.model(), folder / "tuned" / "model").merge_and_unload()  # pyright: ignore
    policy = AutoModelForCausalLM.from_pretrained(folder / "policy" / "model")
    name = "model.layers.0.self_attn.q_proj.weight"
    close = [(policy.get_parameter(name) - x.get_parameter(name)).norm() for x in (merged, small.model())]
    assert close[0] < close[1], "it began from the merged weights"
    with pytest.raises(ValueError, match="has adapters, and new ones cannot stand on them"):
        command("sft", config(folder, "more", tables=lora, model="tuned/model"))


def test_errors(folder):
    assert "there is no file" in message("sft", folder / "nothing.toml")
    assert "DPOConfig has no option 'betta'; did you mean 'beta'?" in message(
        "dpo", config(folder, options="betta = 1\n")
    )
    assert "needs rewards: --reward FILE.py:NAME" in message("grpo", config(folder))
    assert "sft takes no rewards" in message("sft", config(folder), "rewards.py:vowels")
    assert "has no function 'consonants'" in message("ppo", config(folder), f"{folder / 'rewards.py'}:consonants")
    assert "there is no file 'none.py'" in message("ppo", config(folder), "none.py:a")
    assert "there is no key beta" in message("dpo", config(folder, tables="beta = 0.1\n"))
    assert "sft has no reference" in message("sft", config(folder, tables="reference = 'model'\n"))
    assert 'gkd needs teacher = "..."' in message("gkd", config(folder))
    assert "dpo has no teacher" in message("dpo", config(folder, tables="teacher = 'model'\n"))
    assert "sft takes no rewards and no env" in message("sft", config(folder, tables="env = 'games.py:Game'\n"))
    assert "env none.py:a: there is no file" in message("grpo", config(folder, tables="env = 'none.py:a'\n"))
    for text, said in {
        "weight = 1": "[[rewards]] 1 needs model",
        "verifier = 'regexp'": "no verifier 'regexp'; did you mean 'regex'",
        "verifier = 'regex'\npatern = 'a'": "no key 'patern'; did you mean 'pattern'",
        "verifier = 'regex'": "regex needs pattern",
        "model = 'a'\ncolumn = 'b'": "no key 'column'",
    }.items():
        assert said in message("grpo", config(folder, tables=f"[[rewards]]\n{text}\n"))
    bad = folder / "bad.toml"
    bad.write_text("model = 3")
    assert "should be a string" in message("sft", bad)
    bad.write_text("[[rewards")
    assert str(bad) in message("sft", bad)


def test_a_report_escapes_what_models_write(tmp_path):
    row = {
        "step": 1,
        "prompt": [{"role": "user", "content": "<b>"}],
        "completion": "<script>x" + "y" * 999,
        "reward": None,
    }
    (tmp_path / "completions.jsonl").write_text(json.dumps(row) + "\n")
    page = write_report(tmp_path, "<run>", [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0, "epoch": 1}]).read_text()
    assert "<script>" not in page and "&lt;script&gt;" in page and "user: &lt;b&gt;" in page and "<run>" not in page
    assert "y" * 600 not in page


def test_adapters_are_read_from_safetensors_alone(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "base", "peft_type": "LORA"}')
    (tmp_path / "adapter_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(ValueError, match=r"no adapter_model\.safetensors"):
        pretrained(AutoModelForCausalLM, str(tmp_path))


def test_a_signal_stops_it_with_a_checkpoint(folder, monkeypatch, capfd):
    """And the same command goes on, with the losses of a run that was left alone."""
    more = "max_steps = 4\n"
    files = [config(folder, name) for name in ("alone", "stopped")]
    for file in files:
        file.write_text(file.read_text().replace("max_steps = 2\n", more))
    command("sft", files[0])
    run_step, count = AlignTrainer.run_step, 0

    def stopped(self, batch):
        nonlocal count
        count += 1
        if count == 2:
            signal.raise_signal(signal.SIGTERM)
        return run_step(self, batch)

    monkeypatch.setattr(AlignTrainer, "run_step", stopped)
    with pytest.raises(Interrupted, match="stopped by SIGTERM"):
        command("sft", files[1])
    assert "saved step 2" in capfd.readouterr().out and (folder / "stopped/checkpoint-2").is_dir()
    command("sft", files[1])
    logs = [json.loads((folder / x / "trainer_state.json").read_text())["log_history"] for x in ("alone", "stopped")]
    losses = [[row["loss"] for row in rows if "loss" in row] for rows in logs]
    assert len(losses[0]) == 4 and losses[0] == losses[1]
