"""Members of a population, against agents that learn alone."""

import pytest
import torch

from rl_cases import CASES as ALL
from rl_cases import agent_of, steps, with_expert
from tutti.rl import PPO
from tutti.rl.algorithms import ALGORITHMS, algorithm
from tutti.rl.core.program import leaves
from tutti.rl.networks.distributions import Box
from tutti.rl.population import Population, variable

CASES = {
    "PPO": ("CartPole-v1", {"n_envs": 4, "n_steps": 16, "batch_size": 32, "n_epochs": 2, "hidden": (16,)}),
    "SAC": ("Pendulum-v1", {"n_envs": 2, "n_steps": 8, "gradient_steps": 2, "hidden": (16,), "batch_size": 16,
                            "learning_starts": 16, "buffer_size": 64}),
}  # fmt: skip


@pytest.mark.parametrize("level", ["eager", "O0"])
@pytest.mark.parametrize("name", CASES)
def test_each_member_learns_as_if_it_were_alone(name, level):
    env, options = CASES[name]
    rates = [1e-3, 3e-4]
    population = Population(name, env, range(2), level=level, learning_rate=rates, **options)
    population.learn(64)
    assert population.num_timesteps == 64
    for i, rate in enumerate(rates):
        alone = algorithm(name)(env, seed=i, level="eager", learning_rate=rate, **options).learn(64)
        member = population.agent(i, "eager")
        one, two = leaves(member.program.state()), leaves(alone.program.state())
        assert one.keys() == two.keys()
        for key in one:
            torch.testing.assert_close(one[key], two[key], rtol=1e-4, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}")


def test_what_a_population_cannot_be():
    with pytest.raises(ValueError, match="learning_rate has 3 values for 2 members"):
        Population(PPO, "CartPole-v1", range(2), learning_rate=[1e-3] * 3)
    with pytest.raises(ValueError, match=r"n_epochs cannot differ between members .* PPO gamma"):
        Population(PPO, "CartPole-v1", range(2), n_epochs=[1, 2])
    with pytest.raises(ValueError, match=r"max_grad_norm cannot differ .* PPO makes its networks"):
        Population(PPO, "CartPole-v1", range(2), max_grad_norm=[0.5, 1.0])
    with pytest.raises(ValueError, match="beta cannot differ"):
        Population("PrioritizedDQN", "CartPole-v1", range(2), beta=[0.4, 0.6])
    with pytest.raises(ValueError, match="stepped by the host"):
        Population(PPO, "gymnasium:CartPole-v1", range(2), n_envs=1, batch_size=128)


QUICK = ("CrossQ", "IQL", "MBPO", "TD3BC")


def check_each_option(name):
    """All options that may differ, at once: members are what agents alone become."""
    kind = algorithm(name)
    probe = agent_of(name)
    free = [x for x in variable(kind) if x not in probe.constants]
    if not isinstance(probe.distribution, Box):
        free = [x for x in free if x != "noise"]
    value = {x: getattr(probe.config, x) for x in free}
    values = {x: [float(v), 0.7 * float(v)] for x, v in value.items() if v is not None}
    values |= {x: FIRST[x] for x, v in value.items() if v is None and x in FIRST}
    env, own = ALL[name]
    rest = {x: v for x, v in own.items() if x not in values}
    population = Population(name, env, [0, 0], level="eager", **rest, **values, **with_expert(name)).learn(steps(name))
    for i in range(2):
        alone = agent_of(name, **{x: v[i] for x, v in values.items()}).learn(steps(name))
        one, two = leaves(population.agent(i, "eager").program.state()), leaves(alone.program.state())
        for key in one.keys() - {"key"}:
            torch.testing.assert_close(one[key], two[key], rtol=2e-3, atol=2e-4, msg=lambda m, key=key: f"{key}: {m}")


FIRST = {"target_entropy": [-1.0, -2.0]}


@pytest.mark.parametrize("name", QUICK)
def test_every_option_that_may_differ_does(name):
    check_each_option(name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of DT's attention under vmap
@pytest.mark.parametrize("name", [x for x in ALGORITHMS if x not in QUICK])
def test_every_option_of_the_others_that_may_differ_does(name):
    check_each_option(name)
