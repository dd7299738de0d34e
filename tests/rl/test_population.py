"""Members of a population, against agents that learn alone."""

import pytest
import torch

from tutti.rl import PPO
from tutti.rl.algorithms import algorithm
from tutti.rl.population import Population
from tutti.rl.program import leaves

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
    with pytest.raises(ValueError, match="n_epochs cannot differ between members"):
        Population(PPO, "CartPole-v1", range(2), n_epochs=[1, 2])
    with pytest.raises(ValueError, match="stepped by the host"):
        Population(PPO, "gymnasium:CartPole-v1", range(2), n_envs=1, batch_size=128)
