"""The verb `tutti rl`, as a user calls it."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys

import pytest
from PIL import Image

from tutti import cli
from tutti.rl import run
from tutti.rl.core.agent import Agent

CONFIG = """
algorithm = "PPO"
env = "CartPole-v1"
steps = 512
level = "eager"
evaluate = 256
checkpoint = 128

[options]
n_envs = 4
n_steps = 16
batch_size = 32
n_epochs = 2
hidden = [16]
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(CONFIG)
    return path


def test_train_continue_evaluate_and_record(config, tmp_path, capsys):
    out = tmp_path / "run"
    assert cli.main(["rl", "train", str(config), "--out", str(out), "--steps", "256"]) == 0
    first = json.loads((out / "curve.json").read_text())
    assert cli.main(["rl", "train", str(config), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "continuing after 256 steps" in said and "256 steps  return" in said
    curve = json.loads((out / "curve.json").read_text())
    assert curve[: len(first)] == first and curve[-1][0] == 512
    assert {x.name for x in out.iterdir()} >= {"agent.safetensors", "best.safetensors", "config.json", "curve.svg"}
    assert cli.main(["rl", "eval", str(out), "--episodes", "3"]) == 0
    assert "over 3 episodes" in capsys.readouterr().out
    picture = tmp_path / "play.gif"
    assert cli.main(["rl", "play", str(out), "--to", str(picture), "--steps", "5"]) == 0
    with Image.open(picture) as image:
        assert image.n_frames == 5  # pyright: ignore[reportAttributeAccessIssue]


def test_a_killed_run_keeps_its_curve(config, tmp_path, monkeypatch):
    """Up to the checkpoint from which it continues, and no point twice."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert cli.main(["rl", "train", str(config), "--out", str(whole)]) == 0

    class Killed(BaseException):
        pass

    def dies(agent):
        if agent.num_timesteps >= 320:
            monkeypatch.setattr(Agent, "save", lambda *args: None)  # as if the process were gone
            monkeypatch.setattr(run.CurveFile, "run", lambda *args: None)
            raise Killed

    with monkeypatch.context() as patches:
        patches.setattr(run, "_says", lambda scores: dies)
        with pytest.raises(Killed):
            cli.main(["rl", "train", str(config), "--out", str(killed)])
    monkeypatch.undo()
    assert not (killed / "agent.safetensors").exists()
    points = json.loads((killed / "curve.json").read_text())
    assert points[-1][0] == 256
    (killed / "curve.json").write_text(json.dumps([*points, [320, 0.0]]))  # written, and the checkpoint was not
    assert cli.main(["rl", "train", str(config), "--out", str(killed)]) == 0
    assert json.loads((killed / "curve.json").read_text()) == json.loads((whole / "curve.json").read_text())


def test_environments_in_workers_are_evaluated_by_name(config, tmp_path, capsys):
    out = tmp_path / "run"
    placed = ["--placement", "environments", "--ranks", "2", "--steps", "256"]
    assert cli.main(["rl", "train", str(config), "--out", str(out), *placed]) == 0
    assert "256 steps  return" in capsys.readouterr().out
    assert cli.main(["rl", "eval", str(out), "--episodes", "3"]) == 0
    assert "over 3 episodes" in capsys.readouterr().out


def test_another_run_in_the_same_folder_is_refused(config, tmp_path, capsys):
    out = tmp_path / "run"
    assert cli.main(["rl", "train", str(config), "--out", str(out), "--steps", "64"]) == 0
    assert cli.main(["rl", "train", str(config), "--out", str(out), "--option", "gamma=0.9"]) == 2
    assert "has another run: gamma was not given and is 0.9; choose another --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train ppo-cartpole --lernig_rate 3", "no option --lernig_rate; did you mean --option learning_rate=...? "
         "tutti rl train --help lists all"),
        ("train ppo-cartpole --batch-size=3", "no option --batch-size; did you mean --option batch_size=...?"),
        ("train ppo-cartpole --stepz 3", "no option --stepz; did you mean --steps?"),
        ("train ppo-cartpole --zzz", "no option --zzz; tutti rl train --help lists all"),
        ("list --x", "no option --x; tutti rl list --help lists all"),
        ("eval out --episode 3", "no option --episode; did you mean --episodes?"),
        ("play out --no-steps", "no option --no-steps"),
    ],
)  # fmt: skip
def test_unknown_options_name_the_nearest(capsys, line, message):
    assert cli.main(["rl", *line.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('algorithm = "PPO"\nenv = "CartPole-v1"', "the file needs steps"),
        (CONFIG.replace("evaluate", "evalute"), "there is no key evalute"),
        (CONFIG.replace("PPO", "PPOO"), "did you mean PPO?"),
        (CONFIG.replace("n_epochs", "epochs"), "did you mean 'n_epochs'?"),
        (CONFIG.replace("CartPole-v1", "CartPole"), "did you mean 'CartPole-v1'?"),
        (CONFIG.replace("CartPole-v1", "NoSuch-v0"), "NoSuch"),
        (CONFIG.replace('"PPO"', "PPO"), "Invalid value"),
        (CONFIG.replace("512", '"many"'), "steps = 'many' should be a whole number"),
        (CONFIG + 'level = "eager"\n', "level is not an option of the algorithm: write it above [options]"),
        (CONFIG.replace("n_envs = 4", "n_envs = 4.5"), "n_envs is 4.5; it must be a whole number"),
        (CONFIG.replace("[16]", "16"), "hidden is 16; it must be whole numbers in brackets"),
        (CONFIG.replace("evaluate", "evalute"), "did you mean evaluate?"),
        (
            CONFIG.replace("CartPole-v1", "CartPoll-v1"),
            "doesn't exist. Near are CartPole-v1 or CartPole-v0",
        ),
        (CONFIG.replace("CartPole-v1", "ALE/Pong-v5"), "pip install ale-py"),
        (CONFIG.replace("CartPole-v1", "nosuchmodule:X-v0"), "names the module nosuchmodule, which cannot be imported"),
        (CONFIG.replace("steps = 512", "steps = 0"), "steps is 0; it must be at least 1"),
        (CONFIG.replace("evaluate = 256", "evaluate = -1"), "evaluate is -1; it must be at least 1"),
        (CONFIG.replace('"eager"', '"O9"'), "level is 'O9'; it must be one of eager, O0"),
        (CONFIG.replace("n_envs = 4", "gamma = nan"), "gamma is nan; it must be from 0 to 1"),
    ],
)
def test_configs_with_an_error(config, capsys, text, message):
    config.write_text(text)
    assert cli.main(["rl", "train", str(config)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["envpool:Pong-v5", "dm_control:walker-walk"])
def test_a_missing_package_is_named_with_its_remedy(config, capsys, name, monkeypatch):
    monkeypatch.setitem(sys.modules, name.partition(":")[0], None)
    config.write_text(CONFIG.replace("CartPole-v1", name))
    assert cli.main(["rl", "train", str(config)]) == 2
    assert f"there is no package {name.partition(':')[0]}; pip install" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["train", "nosuch"], ["train", "nosuch.toml"], ["nosuch"], ["eval", "nosuch"]])
def test_errors_are_one_line(words, capsys):
    assert cli.main(["rl", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("tutti rl: there is no") and said.count("\n") == 1 and len(said) < 160
    assert "near" in said or "did you mean" in said or words[0] == "eval"


def test_help_does_not_import_torch():
    code = "import sys, tutti.cli; tutti.cli.main(['rl', 'train', '--help'])"
    heavy = "{'torch', 'gymnasium'} & sys.modules.keys()"
    check = f"try:\n    {code}\nexcept SystemExit: pass\nassert not {heavy}, {heavy}"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--placement" in done.stdout


@pytest.mark.parametrize("name", ["curve.json", "config.json"])
@pytest.mark.parametrize("content", ["{", "3", '[["a", 1]]', "\x80\x05"])
def test_files_of_a_run_that_are_damaged_are_named(config, tmp_path, capsys, name, content):
    out = tmp_path / "run"
    assert cli.main(["rl", "train", str(config), "--out", str(out), "--steps", "64"]) == 0
    (out / name).write_bytes(content.encode("latin-1"))
    assert cli.main(["rl", "train", str(config), "--out", str(out), "--steps", "128"]) == 2
    assert f"{out / name} " in capsys.readouterr().err


def test_a_config_that_is_no_text(tmp_path, capsys):
    path = tmp_path / "bad.toml"
    path.write_bytes(b"\x80\x05")
    assert cli.main(["rl", "train", str(path)]) == 2
    assert f"{path} is not TOML" in capsys.readouterr().err


def test_what_is_interrupted_is_said_and_saved(config, tmp_path, capsys, monkeypatch):
    def interrupted(agent, total, callbacks, progress_bar):
        raise KeyboardInterrupt

    monkeypatch.setattr("tutti.rl.core.agent.Agent.learn", interrupted)
    with contextlib.suppress(KeyboardInterrupt):
        cli.main(["rl", "train", str(config), "--out", str(tmp_path)])
    assert "stopped after 0 steps; the same command continues" in capsys.readouterr().out
    assert (tmp_path / "agent.safetensors").exists()


@pytest.mark.parametrize("more", [[], ["--placement", "actors", "--ranks", "2", "--processes", "1"]])
def test_sigterm_ends_it_after_an_iteration_with_its_state(config, tmp_path, capsys, monkeypatch, more):
    """And the same command goes on, to the agent of a run that was left alone."""
    words = ["rl", "train", str(config), *more, "--out"]
    assert cli.main([*words, str(tmp_path / "alone")]) == 0
    note, count = Agent._note, 0

    def stopped(self, metrics, start):
        nonlocal count
        count += 1
        if count == 2:
            signal.raise_signal(signal.SIGTERM)
        return note(self, metrics, start)

    monkeypatch.setattr(Agent, "_note", stopped)
    assert cli.main([*words, str(tmp_path / "run")]) == 128 + signal.SIGTERM
    monkeypatch.setattr(Agent, "_note", note)
    capsys.readouterr()
    assert cli.main([*words, str(tmp_path / "run")]) == 0
    assert "continuing after 128 steps" in capsys.readouterr().out
    points = [json.loads((tmp_path / x / "curve.json").read_text()) for x in ("alone", "run")]
    assert points[0] == points[1]


def test_presets_are_known_by_name(capsys):
    assert cli.main(["rl", "list"]) == 0
    assert "ppo-cartpole" in capsys.readouterr().out
    assert cli.main(["rl", "train", "ppo-cartpol"]) == 2
    assert "near are ppo-cartpole" in capsys.readouterr().err
    assert cli.main(["rl", "eval", "nowhere"]) == 2
    assert "there is no file nowhere" in capsys.readouterr().err
