"""Spellings of Stable-Baselines3 work where they mean the same, and are errors that name ours where they do not."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import re

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

import tutti.rl
from rl_cases import CASES, expert, with_expert
from tutti.rl import A2C, DQN, PPO, SAC, Agent, CheckpointCallback, EvalCallback, adapt, sb3
from tutti.rl.algorithms import ALGORITHMS, algorithm
from tutti.rl.core import files

SHARED: dict[str, Agent] = {}
SMALL = {"n_steps": 16, "batch_size": 16, "n_epochs": 1, "level": "eager"}
REPLAYED = {"learning_starts": 16, "batch_size": 8, "buffer_size": 64, "level": "eager"}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_policy_comes_first(name):
    env, options = CASES[name]
    kind, more = algorithm(name), with_expert(name)
    ways = [
        kind("MlpPolicy", env, level="eager", **options, **more),
        kind(policy="MlpPolicy", env=env, level="eager", **options, **more),
        kind(env, level="eager", **options, **more),
        kind(env=env, level="eager", **options, **more),
    ]
    assert all(files.equal(ways[0], other) for other in ways[1:])
    assert ways[0].observation_space == ways[0].env.observation_space and ways[0].n_envs == ways[0].config.n_envs
    with pytest.raises(ValueError, match=r"learning_rate=0.1"):
        kind("MlpPolicy", env, 0.1)
    with pytest.raises(ValueError, match=f"{name} needs an environment"):
        kind("MlpPolicy")
    with pytest.raises(ValueError, match="policy 'Mlp' is not one of MlpPolicy, CnnPolicy"):
        kind("Mlp", env)


def test_one_environment_is_taken_as_it_is(tmp_path):
    env = gymnasium.make("CartPole-v1")
    agent = PPO("MlpPolicy", env, **SMALL, seed=3, device="auto", verbose=0).learn(
        total_timesteps=32, progress_bar=False
    )
    assert agent.get_env().envs[0] is env and agent.n_envs == 1 and str(agent.device) == "cpu"
    path = agent.save(tmp_path / "ppo")
    again = PPO.load(path, env=gymnasium.make("CartPole-v1"), device="cpu")
    obs = np.zeros(4, np.float32)
    assert (
        again.predict(obs, deterministic=True)[0] == agent.predict(obs, state=None, episode_start=np.array([True]))[0]
    )
    assert agent.evaluate(2, env=gymnasium.make("CartPole-v1")).mean >= 8
    with pytest.raises(ValueError, match="n_envs is 4, and env is a vector of 1; leave it out"):
        PPO("MlpPolicy", env, n_envs=4)
    with pytest.raises(ValueError, match="custom_objects replace what is in a file"):
        PPO.load(path, custom_objects={"learning_rate": 0.0})


def test_networks_of_policy_kwargs():
    kwargs = {"net_arch": [24, 8], "activation_fn": nn.ReLU}
    agent = A2C("MlpPolicy", "CartPole-v1", policy_kwargs=kwargs, level="eager")
    assert agent.config.hidden == (24, 8) and agent.config.activation == "relu"
    assert PPO("CartPole-v1", policy_kwargs={"net_arch": {"pi": [8], "vf": [8]}}, level="eager").config.hidden == (8,)
    assert SAC("Pendulum-v1", policy_kwargs={"net_arch": {"pi": [8], "qf": [8]}}, level="eager").config.hidden == (8,)
    pendulum = PPO("Pendulum-v1", policy_kwargs={"log_std_init": -1.0}, level="eager")
    assert float(pendulum.net.module.log_std[0].detach()) == -1.0
    for wrong, message in (
        ({"net_arch": {"pi": [8], "vf": [4]}}, "layers of the same widths"),
        ({"net_arch": "x"}, "widths of layers"),
        ({"activation_fn": nn.GELU}, "activation_fn is GELU; it must be one of Tanh, ReLU, ELU, SiLU"),
        ({"optimizer_class": torch.optim.SGD}, "optimizers are those of the algorithms"),
        ({"x": 1}, "hidden and activation"),
        ([1], "must be a dict"),
    ):
        with pytest.raises(ValueError, match=message):
            PPO("CartPole-v1", policy_kwargs=wrong)
    with pytest.raises(ValueError, match="hidden is given as an option and in policy_kwargs"):
        PPO("CartPole-v1", hidden=(8,), policy_kwargs={"net_arch": [8]})


@pytest.mark.parametrize(
    ("name", "options", "wanted"),
    [
        ("DQN", {"train_freq": 8}, {"n_steps": 8}),
        ("SAC", {"train_freq": (2, "step")}, {"n_steps": 2}),
        ("SAC", {"ent_coef": "auto", "target_entropy": "auto"}, {"ent_coef": None, "target_entropy": None}),
        ("TD3", {"action_noise": None, "optimize_memory_usage": False}, {}),
        ("PPO", {"use_sde": False}, {}),
        ("PPO", {"clip_range_vf": 0.2, "normalize_advantage": False}, {"clip_range_vf": 0.2}),
        ("A2C", {"use_rms_prop": True, "rms_prop_eps": 1e-5}, {}),
    ],
)
def test_options_that_mean_the_same(name, options, wanted):
    agent = algorithm(name)(CASES[name][0], level="eager", **options)
    assert {key: getattr(agent.config, key) for key in wanted} == wanted


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("PPO", {"use_sde": True}, "use_sde is True, which PPO does not know here"),
        ("TD3", {"action_noise": object()}, "noise= is the standard deviation"),
        ("SAC", {"ent_coef": "auto_0.1"}, "ent_coef is 'auto_0.1'; it must be a number, or None"),
        ("DQN", {"train_freq": (1, "episode")}, "it must be a number of steps of each environment, n_steps here"),
        ("DQN", {"train_freq": 4, "n_steps": 4}, "leave one of them out"),
        ("PPO", {"train_freq": 4}, "n_steps says how long"),
        ("DQN", {"replay_buffer_class": dict}, "hindsight=4"),
        ("PPO", {"device": "cuda"}, "device is cuda; agents compute on the CPU"),
        ("PPO", {"verbose": -1}, "verbose is -1"),
        ("A2C", {"policy": "MlpLstmPolicy"}, "use RecurrentPPO"),
    ],
)
def test_options_that_are_not_here_name_ours(name, options, message):
    with pytest.raises(ValueError, match=message):
        algorithm(name)(env=CASES[name][0], level="eager", **options)


def test_an_lstm_is_that_of_recurrent_ppo():
    agent = algorithm("RecurrentPPO")("MlpLstmPolicy", "CartPole-v1", level="eager")
    assert agent.config.cell == "lstm"
    _, state = agent.predict(np.zeros((2, 4)), episode_start=np.ones(2, bool))
    assert agent.predict(np.zeros((2, 4)), state=state, episode_start=np.array([True, False]))[1]["memory"].shape == (
        2,
        128,
    )


@pytest.mark.parametrize("name", ["PPO", "DQN", "SAC", "BC"])
def test_numbers_of_steps(name):
    agent = algorithm(name)(CASES[name][0], level="eager", **CASES[name][1], **with_expert(name))
    for wrong in (-5, 0.5, float("nan"), "many", True):
        with pytest.raises(ValueError, match=r"total_timesteps is .*; it must be a whole number from 0 on"):
            agent.learn(wrong)
    assert agent.learn(0).num_timesteps == 0
    done = agent.learn(total_timesteps=6.4e1, reset_num_timesteps=True).num_timesteps
    assert agent.learn(1, reset_num_timesteps=False).num_timesteps > done
    assert agent.learn(64, reset_num_timesteps=True).num_timesteps == done
    assert float(agent.program.state()["learner"]["progress"]) == 1.0


def test_metrics_are_printed_each_log_interval(capsys, tmp_path):
    PPO("CartPole-v1", n_envs=2, verbose=1, tensorboard_log=tmp_path, **SMALL).learn(192, log_interval=2)
    said = capsys.readouterr().out
    assert said.count("time/total_timesteps") == 3 and "train/value_loss" in said
    assert [x.name for x in tmp_path.iterdir()] == ["PPO_1"] and list((tmp_path / "PPO_1").glob("events*"))
    agent = DQN("CartPole-v1", verbose=1, tensorboard_log=tmp_path, **REPLAYED).learn(
        400, log_interval=3, tb_log_name="PPO"
    )
    said = capsys.readouterr().out
    assert 1 <= said.count("time/total_timesteps") <= agent.episodes_done // 3 and (tmp_path / "PPO_2").exists()
    PPO("CartPole-v1", n_envs=2, **SMALL).learn(64, log_interval=1)
    assert capsys.readouterr().out == ""


def test_evaluations_by_their_names(tmp_path):
    scores = EvalCallback(
        gymnasium.make("CartPole-v1"),
        eval_freq=16,
        n_eval_episodes=2,
        verbose=0,
        best_model_save_path=tmp_path,
        log_path=tmp_path,
        deterministic=False,
        render=False,
    )
    saved = CheckpointCallback(save_freq=16, save_path=tmp_path / "files")
    PPO("CartPole-v1", n_envs=2, **SMALL).learn(160, [scores, saved])
    assert [steps for steps, _ in scores.evaluations] == [32, 64, 96, 128, 160]  # 16 steps in each of 2
    assert len(list((tmp_path / "files").iterdir())) == 5 and files.about(tmp_path / "best_model.safetensors")
    with np.load(tmp_path / "evaluations.npz") as log:
        assert log["timesteps"].tolist() == [32, 64, 96, 128, 160] and log["results"].shape == (5, 2)
    for make, message in (
        (lambda: EvalCallback(render=True), "does not know render=True"),
        (lambda: EvalCallback(every=1, eval_freq=2), "same option"),
        (lambda: EvalCallback(nosuch=1), "nosuch=1"),
        (lambda: CheckpointCallback(), "needs a folder"),
        (lambda: CheckpointCallback("x", name_prefix="y"), "name_prefix='y'"),
        (lambda: EvalCallback(episodes=-1), "episodes is -1"),
        (lambda: CheckpointCallback("x", keep=0), "keep is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            PPO("CartPole-v1", n_envs=2, **SMALL).learn(32, make())


@pytest.mark.parametrize("wrong", [object(), [1], EvalCallback, 3])
def test_callbacks_are_functions_of_the_agent(wrong):
    with pytest.raises(ValueError, match=r"callback is .*; it must be a function of the agent"):
        PPO("CartPole-v1", n_envs=2, **SMALL).learn(32, wrong)


def test_names_that_are_not_here_are_errors_that_say_what_is():
    agent = PPO("CartPole-v1", n_envs=2, **SMALL)
    with pytest.raises(
        AttributeError, match=r"PPO has no attribute 'save_replay_buffer'; Agent.save\(path, replay=True\)"
    ):
        agent.save_replay_buffer("x")
    with pytest.raises(AttributeError, match=r"has no attribute 'nosuch'$"):
        _ = agent.nosuch
    with pytest.raises(ImportError, match="no 'StopTrainingOnRewardThreshold'; here it is StopOnReturn"):
        from tutti.rl import StopTrainingOnRewardThreshold  # noqa: F401
    with pytest.raises(ImportError, match=r"no 'evaluate_policy'; here it is agent.evaluate\(episodes=10\)$"):
        _ = tutti.rl.evaluate_policy
    with pytest.raises(AttributeError, match="has no attribute 'nosuch'"):
        _ = tutti.rl.nosuch


@pytest.mark.parametrize("name", sb3.ABSENT)
def test_what_takes_the_place_of_their_names_exists(name):
    """Every expression between backticks names something, and its arguments are those of its function."""
    assert not hasattr(importlib.import_module("tutti.rl.sb3"), name) and name not in dir(tutti.rl)
    agent = SHARED.setdefault("agent", PPO("CartPole-v1", **SMALL))
    for text in re.findall("`([^`]*)`", sb3.ABSENT[name]):
        node = ast.parse(text, mode="eval").body
        called = node.func if isinstance(node, ast.Call) else node
        first, *rest = ast.unparse(called).split(".")
        target = functools.reduce(getattr, rest, agent if first == "agent" else getattr(tutti.rl, first))
        if isinstance(node, ast.Call):
            names = inspect.signature(target).parameters.keys()
            if isinstance(target, type) and issubclass(target, Agent):
                names = {*names, *(f.name for f in dataclasses.fields(target.Config))} - set(target.unused)
            if target is adapt.make:
                names = {*names, *inspect.signature(adapt.gymnasium.Gymnasium).parameters}
            assert {x.arg for x in node.keywords} <= set(names), text


@pytest.mark.parametrize("name", ["PPO", "DQN"])
@pytest.mark.parametrize("to", ["CartPole-v1", "gymnasium:CartPole-v1"])
def test_environments_are_replaced(name, to):
    options = {**(SMALL if name == "PPO" else REPLAYED), "n_envs": 2}
    agent = algorithm(name)("CartPole-v1", **options).learn(64)
    before = agent.predict(np.ones((4, 4)))[0]
    agent.set_env(to)
    np.testing.assert_array_equal(agent.predict(np.ones((4, 4)))[0], before)
    assert agent.env_name == to and agent.learn(64).num_timesteps == 128
    agent.set_env(adapt.make("gymnasium:CartPole-v1", 2))
    assert agent.get_env().n == 2 and agent.learn(32).num_timesteps == 160
    with pytest.raises(ValueError, match="is a vector of 3 environments, and the agent has 2"):
        agent.set_env(adapt.make("gymnasium:CartPole-v1", 3))
    with pytest.raises(ValueError, match="Acrobot has the observation_space"):
        agent.set_env("Acrobot-v1")


def test_a_seed_of_none_is_drawn():
    one, two = (PPO("CartPole-v1", seed=None, n_envs=2, **SMALL) for _ in range(2))
    assert one.seed != two.seed and not files.equal(one, two)
    assert expert(torch.zeros(1, 4)).tolist() == [0] and isinstance(one, Agent)
