"""All algorithms reach their presets' returns with three seeds, and compiled iterations equal plain Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tutti.rl.algorithms import ALGORITHMS, algorithm
from tutti.rl.core.agent import Agent
from tutti.rl.core.callbacks import EvalCallback
from tutti.rl.core.program import leaves
from tutti.rl.population import Population
from tutti.rl.presets import PRESETS, Preset

SEEDS = (0, 1, 2)
SMALL = {"n_envs": 4, "n_steps": 16, "batch_size": 32, "n_epochs": 2, "hidden": (16,)}


def options_of(p: Preset) -> dict[str, Any]:
    return {**p.options, **({"data": p.data} if p.data else {})}


def reaches(name: str, seed: int) -> None:
    """An evaluation of 20 episodes reaches the threshold within the preset's steps."""
    p = PRESETS[name]
    agent = algorithm(p.algorithm)(p.env, seed=seed, level="eager", **options_of(p))
    scores = EvalCallback(every=max(p.steps // 20, 1), episodes=20, threshold=p.threshold)
    agent.learn(p.steps, scores)
    best = max(evaluation.mean for _, evaluation in scores.evaluations)
    assert best >= p.threshold, f"{name}, seed {seed}: {best:.1f} after {agent.num_timesteps} steps"


def test_ppo_solves_cartpole():
    reaches("ppo-cartpole", 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", PRESETS)
def test_presets_reach_their_returns(name, seed):
    reaches(name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_coma_learns(seed):
    """Greedy policies of the first updates pass the preset's threshold by chance; drawn actions earn 2.4 then."""
    p = PRESETS["coma-battle"]
    agent = algorithm(p.algorithm)(p.env, seed=seed, level="eager", **options_of(p)).learn(p.steps)
    assert agent.evaluate(40, deterministic=False).mean > 5


def test_each_algorithm_has_a_preset():
    assert {p.algorithm for p in PRESETS.values()} == set(ALGORITHMS)


@pytest.mark.slow
def test_hindsight_is_what_reaches_goals():
    p = PRESETS["dqn-bitflip"]
    agent = algorithm(p.algorithm)(p.env, level="eager", **{**p.options, "hindsight": 0}).learn(p.steps)
    assert agent.evaluate(100).mean < -11.5  # no episode, or hardly one, reaches its goal


def near(one: Agent, two: Agent) -> None:
    a, b = leaves(one.program.state()), leaves(two.program.state())
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


def test_a_compiled_iteration_equals_plain_python():
    plain, compiled = (algorithm("PPO")("CartPole-v1", level=level, **SMALL).learn(64) for level in ("eager", "O2"))
    near(plain, compiled)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PRESETS])
def test_compiled_iterations_equal_plain_python(name):
    """One iteration that learns, from the state after the warm-up."""
    p = PRESETS[name]
    kind = algorithm(p.algorithm)
    plain = kind(p.env, level="eager", **options_of(p))
    plain.total = p.steps
    plain.prepare()
    while plain.num_timesteps < getattr(plain.config, "learning_starts", 0):
        plain.step()
    compiled = kind(p.env, level="O2", **options_of(p))
    compiled.program.load(plain.program.state())
    compiled.num_timesteps, compiled.total = plain.num_timesteps, plain.total
    for agent in (plain, compiled):
        agent.step()
    one, two = leaves(plain.program.state())["steps"], leaves(compiled.program.state())["steps"]
    assert int(one) == int(two)
    weights = [{k: x for k, x in leaves(a.program.state()["learner"]).items() if x.is_floating_point()}
               for a in (plain, compiled)]  # fmt: skip
    for key, x in weights[0].items():
        torch.testing.assert_close(weights[1][key], x, rtol=1e-2, atol=2e-2, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.slow
def test_a_compiled_population_equals_its_members():
    population = Population("PPO", "CartPole-v1", range(3), level="O2", learning_rate=[1e-3, 3e-4, 1e-4], **SMALL)
    population.learn(128)
    for i, rate in enumerate((1e-3, 3e-4, 1e-4)):
        alone = algorithm("PPO")("CartPole-v1", seed=i, level="eager", learning_rate=rate, **SMALL).learn(128)
        near(alone, population.agent(i, "eager"))
