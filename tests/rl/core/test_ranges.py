"""Every number that an algorithm takes has a range, and what is not finite stops a run with its name."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest
import torch

from rl_cases import CASES, agent_of
from tutti.rl import DQN, PPO, Population
from tutti.rl.algorithms import ALGORITHMS, algorithm
from tutti.rl.core.options import configured
from tutti.rl.core.ranges import RANGES
from tutti.rl.core.returns import explained, mean_of, standardized

WHOLE = ("int", "int | None")
SMALL = {"n_envs": 2, "n_steps": 4, "batch_size": 8, "n_epochs": 1, "hidden": (4,), "level": "eager"}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_numbers_outside_of_their_range_are_errors(name):
    kind = algorithm(name)
    for f in fields(kind.Config):
        if f.type in ("bool", "str") or f.name in kind.unused:
            continue
        own = kind.ranges.get(f.name, RANGES.get(f.name))
        assert own is not None, f"{f.name} has no range"
        wrong = [math.nan, -math.inf, *([] if own.infinite else [math.inf])]
        wrong += [own.low - 1] if own.low > -math.inf else []
        wrong += [own.low] if own.above else []
        wrong += [own.high + 1] if own.high < math.inf else []
        if f.type in WHOLE or f.type.startswith("tuple"):
            wrong = [int(x) for x in wrong if math.isfinite(x)]
        for x in wrong:
            x = (x,) if f.type.startswith("tuple") else x
            with pytest.raises(ValueError, match=rf"{f.name} is .*{'' if isinstance(x, tuple) else x}.* must be"):
                configured(kind, {f.name: x})


def test_defaults_and_the_cases_of_tests_are_in_range():
    for name in ALGORITHMS:
        configured(algorithm(name), {})
        configured(algorithm(name), CASES[name][1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": math.nan}, r"learning_rate is nan; it must be at least 0 \(of an update\)"),
        ({"clip_range": -1.0}, r"clip_range is -1.0; it must be above 0 \(of the ratio"),
        ({"gae_lambda": 5}, r"gae_lambda is 5; it must be from 0 to 1"),
        ({"gamma": 2.0}, "gamma is 2.0; it must be from 0 to 1"),
        ({"hidden": (8, 0)}, r"hidden is 0 in \[8, 0\]; it must be at least 1 \(units of a layer\)"),
        ({"learning_rate": lambda left: 1e-3 / left}, "learning_rate is inf where 0 of the progress remains"),
        ({"learning_rate": lambda left: left - 1}, r"learning_rate is -0.5 where 0.5 of the progress remains"),
        ({"gamma": torch.tensor([0.9, 1.5])}, "gamma is 1.5"),
        ({"gamma": np.float32(-0.5)}, "gamma is -0.5"),
        ({"threads": 0}, "threads is 0; it must be a whole number from 1 on"),
        ({"seed": 0.5}, "seed is 0.5; it must be a whole number"),
    ],
)
def test_errors_name_the_option_its_value_and_the_range(options, message):
    with pytest.raises(ValueError, match=message):
        PPO("CartPole-v1", level="eager", **options)


def test_options_that_belong_together():
    with pytest.raises(ValueError, match=r"v_min is 5.0 and v_max is 1.0; v_min must be less"):
        configured(algorithm("C51"), {"v_min": 5.0, "v_max": 1.0})
    with pytest.raises(ValueError, match="drop is 4 and n_quantiles is 4; drop must be less"):
        configured(algorithm("TQC"), {"drop": 4, "n_quantiles": 4})
    with pytest.raises(ValueError, match=r"gamma is 1.5"):
        Population("PPO", "CartPole-v1", seeds=range(2), gamma=[0.9, 1.5], level="eager")


def test_one_row_is_not_normalized():
    one = torch.tensor([3.0])
    assert torch.equal(standardized(one), one) and float(explained(one, one)) == 0.0
    x = torch.tensor([1.0, 5.0, 9.0, 100.0])
    torch.testing.assert_close(standardized(x), (x - x.mean()) / x.std())
    valid = torch.tensor([True, True, True, False])
    torch.testing.assert_close(standardized(x, valid)[:3], (x[:3] - 5) / 4.0)
    assert standardized(x, valid)[3] == 0 and float(mean_of(x, valid)) == 5
    alone = torch.tensor([False, True, False, False])
    assert standardized(x, alone).tolist() == [0, 5, 0, 0]
    assert float(mean_of(torch.full((2,), math.nan), torch.zeros(2, dtype=torch.bool))) == 0


@pytest.mark.parametrize("name", ["PPO", "A2C", "TRPO", "RND", "RecurrentPPO"])
def test_rollouts_of_one_row_leave_finite_weights(name):
    options = {**CASES[name][1], "n_envs": 1, "n_steps": 1}
    options |= {"batch_size": 1} if "batch_size" in options else {}
    agent = algorithm(name)("CartPole-v1", level="eager", **options).learn(8)
    assert all(x.isfinite().all() for x in [agent.program.state()["learner"]["weights"]])


def test_minibatches_of_one_row_learn():
    agent = PPO("CartPole-v1", n_envs=1, n_steps=8, batch_size=1, n_epochs=1, level="eager").learn(64)
    assert agent.program.state()["learner"]["weights"].isfinite().all()


def test_metrics_that_are_not_finite_stop_a_run_with_their_name():
    agent = PPO("CartPole-v1", **SMALL)
    agent.program.own["learner"]["weights"].fill_(math.nan)
    with pytest.raises(ValueError, match=r"PPO: \w+ is nan by step 8.* Lower learning_rate"):
        agent.learn(64)
    agent = DQN("CartPole-v1", n_envs=1, learning_starts=4, batch_size=4, hidden=(4,), level="eager")
    agent.program.own["learner"]["target"].fill_(math.inf)
    with pytest.raises(ValueError, match=r"DQN: loss is (inf|nan) by step"):
        agent.learn(64)
    offline = agent_of("BC")
    offline.program.own["learner"]["weights"].fill_(math.nan)
    with pytest.raises(ValueError, match=r"BC: \w+ is nan by step"):
        offline.learn(12)


def test_weights_are_checked_when_learning_ends():
    agent = PPO("CartPole-v1", **SMALL)
    step = agent.step

    def broken():
        step()
        agent.program.own["learner"]["weights"][0] = math.inf

    agent.step = broken
    with pytest.raises(ValueError, match="PPO: weights is not finite after 8 steps"):
        agent.learn(8)


def test_members_of_a_population_that_diverge_are_named():
    population = Population("PPO", "CartPole-v1", seeds=range(2), **{**SMALL, "n_steps": 4})
    population.program.own["learner"]["weights"][1] = math.nan
    with pytest.raises(ValueError, match=r"\w+ of member 1 is nan by step 0"):
        population.learn(64)
