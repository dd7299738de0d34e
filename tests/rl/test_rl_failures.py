"""Fragments that fail, and processes that are killed: nobody waits, and nothing that was reported is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tutti.rl import Placed
from tutti.rl.core.program import leaves
from tutti.rl.placement import job
from tutti.rl.placement.exchange import Failed, gather, receive, send, send_error
from tutti.rl.placement.ranks import process

OPTIONS = {"n_envs": 8, "n_steps": 8, "batch_size": 16, "n_epochs": 1, "hidden": (8,)}
RUN = """
algorithm = "PPO"
env = "CartPole-v1"
steps = 6144
level = "eager"
evaluate = 512
checkpoint = 512

[options]
n_envs = 4
n_steps = 16
batch_size = 32
n_epochs = 4
hidden = [16]
"""


def failing(placement: str, where: int, what: str) -> str:
    """What each process raises if the learner, or an actor of one process, fails."""
    placed = Placed("PPO", "CartPole-v1", placement, 4, level="eager", **OPTIONS)

    def fail(*_):
        raise ZeroDivisionError(f"the {what} fails")

    if process() == where:
        learns = placed.learners if placement == "server" else [placed.agent]
        for agent in learns if what == "learner" else [actor.agent for actor in placed.actors]:
            agent.program.call = agent.program.ask = fail
    try:
        placed.learn(64 * 4096)  # nobody ends before it hears of the failure
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("placement", "where", "what"),
    [("async", 0, "learner"), ("actors", 0, "learner"), ("async", 2, "actor"), ("actors", 2, "actor"),
     ("actors", 0, "actor"), ("server", 2, "learner")],
)  # fmt: skip
def test_all_processes_end_with_the_error_of_one(pool, placement, where, what):
    errors = pool.run(failing, placement, where, what)
    own = f"ZeroDivisionError: the {what} fails"
    assert errors[where] == own
    message = f"Failed: process {where} has failed: {own}"
    assert all(text == message for i, text in enumerate(errors) if i != where), errors


def exchanged() -> list:
    x = {"a": torch.arange(3) + process(), "b": {"c": torch.tensor([True]), "d": torch.tensor(0.5)}}
    gathered = [y["a"].tolist() for y in gather([x])]
    if process() == 3:
        send_error(ValueError("a text"), x, 0, 7)
    if process() == 1:
        send(x, 0, 5)
    if process() == 0:
        y = receive(x, 1, 5)
        gathered += [y["a"].tolist(), y["b"]["c"].tolist(), y["b"]["d"].item()]
        with pytest.raises(Failed, match="process 3 has failed: ValueError: a text"):
            receive(x, 3, 7)
    return gathered


def test_messages_keep_shapes_and_values(pool):
    per_process = pool.run(exchanged)
    gathered = [[i, i + 1, i + 2] for i in range(4)]
    assert per_process == [[*gathered, [1, 2, 3], [True], 0.5], [], [], []]


@pytest.mark.parametrize("placement", ["learners", "actors", "async", "server"])
def test_a_run_continues_from_its_last_state(tmp_path, placement):
    def trained(steps: int, folder: Path) -> dict[str, torch.Tensor]:
        placed = Placed("PPO", "CartPole-v1", placement, 2, level="eager", **OPTIONS)
        job.train(placed, steps, [64], folder, [])
        assert placed.num_timesteps == placed.agent.num_timesteps == steps
        return leaves(placed.agent.program.state()["learner"])

    whole = trained(192, tmp_path / "whole")
    trained(128, tmp_path / "parts")
    parts = trained(192, tmp_path / "parts")
    assert {x.name for x in (tmp_path / "parts").iterdir()} == {"reported"} | {
        f"{what}-0000000{steps}.safetensors" for what in ("steps", "ranks") for steps in (128, 192)
    }
    if placement in ("learners", "actors"):  # others learn from chunks in any order; rates decay to the last step
        names = [name for name in whole if name != "progress"]
        assert all(torch.equal(whole[name], parts[name]) for name in names)


def test_a_report_that_was_not_complete_is_made_after_the_restart(tmp_path):
    reported = []

    def tell(agent):
        reported.append(agent.num_timesteps)
        if len(reported) == 2:
            raise KeyboardInterrupt

    def placed_agent() -> Placed:
        return Placed("PPO", "CartPole-v1", "actors", 2, level="eager", **OPTIONS)

    with pytest.raises(KeyboardInterrupt):
        job.train(placed_agent(), 192, [64], tmp_path, [tell])
    job.train(placed_agent(), 192, [64], tmp_path, [tell])
    assert reported == [64, 128, 128, 192]


def test_a_run_ends_where_ranks_cannot_share_its_steps_equally(tmp_path):
    placed = Placed("PPO", "CartPole-v1", "learners", 2, level="eager", n_envs=2, n_steps=2, batch_size=4, hidden=(4,))
    job.train(placed, 13, [8], tmp_path, [])  # after 12 steps one is left for two ranks
    assert placed.num_timesteps == 16


@pytest.mark.parametrize("placement", ["actors", "learners"])
def test_environments_of_the_host_do_not_begin_again_with_their_first_episodes(tmp_path, placement):
    def placed_agent() -> Placed:
        return Placed("PPO", "gymnasium:CartPole-v1", placement, 2, level="eager", **OPTIONS)

    def hosts(placed: Placed) -> list:
        return [agent.host for agent in (*(actor.agent for actor in placed.actors), *placed.learners)]

    job.train(placed_agent(), 64, [64], tmp_path, [])
    fresh, continued = placed_agent(), placed_agent()
    job.resume(continued, tmp_path)
    for one, two in zip(hosts(fresh), hosts(continued), strict=True):
        assert two.steps == 8 and not torch.equal(one.seen["obs"], two.seen["obs"])


@pytest.mark.parametrize(
    ("text", "message"),
    [("{}", 'needs "place" with placement, ranks, processes'), ("x", "is not a placement"),
     ('{"place": {"rank": 2}}', "not rank")],
)  # fmt: skip
def test_files_that_are_no_placement(tmp_path, text, message):
    path = tmp_path / "plan.json"
    with pytest.raises(ValueError, match="there is no file"):
        job.RunPlacement.load(path)
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        job.RunPlacement.load(path)


def command(config: Path, out: Path, placement: str) -> subprocess.Popen:
    words = ["rl", "train", config, "--out", out, "--placement", placement, "--ranks", "2"]
    return subprocess.Popen([sys.executable, "-m", "tutti.cli", *map(str, words)], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)  # fmt: skip


def rank_of(launcher: int, rank: int) -> int:
    """The process of a rank that a launcher has started."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher and f"RANK={rank}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                return int(folder.name)
        except OSError:
            continue
    raise ProcessLookupError(f"rank {rank} of {launcher}")


def reports(out: str) -> list[str]:
    return [line.strip() for line in out.splitlines() if " steps  return" in line]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds processes in /proc")
@pytest.mark.parametrize("placement", ["learners", "actors", "async"])
def test_a_killed_actor_loses_nothing_that_was_reported(tmp_path, placement):
    config = tmp_path / "run.toml"
    config.write_text(RUN)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    running = command(config, killed, placement)
    assert running.stdout and running.stderr
    before = [running.stdout.readline()]
    while " steps  return" not in before[-1] or "1,024" not in before[-1]:
        before.append(running.stdout.readline())
        assert before[-1], running.stderr.read()
    time.sleep(0.2)  # into the next segment
    os.kill(rank_of(running.pid, 1), signal.SIGKILL)
    out, errors = running.communicate(timeout=240)
    assert running.returncode == 0, errors
    assert "restart 1 of 3, in 2 processes" in errors
    assert ("lost rank 1 after" in errors) == (placement != "learners")
    first, then = reports("".join(before)), reports(out)
    curve = json.loads((killed / "curve.json").read_text())
    assert len(first) == 2 and [steps for steps, _ in curve] == list(range(512, 6145, 512))
    assert "continuing after" in out
    done = sorted({int(line.split()[0].replace(",", "")) for line in first + then})
    assert done == list(range(512, 6145, 512)), "each interval is reported, and none twice with other numbers"
    if placement != "async":
        other = command(config, whole, placement)
        printed, errors = other.communicate(timeout=240)
        assert other.returncode == 0, errors
        assert set(first) | set(then) == set(reports(printed))
        one, two = (load_file(folder / "agent.safetensors") for folder in (whole, killed))
        assert one.keys() == two.keys() and all(torch.equal(x, two[name]) for name, x in one.items())
