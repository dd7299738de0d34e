"""The driver loop of everything that learns by iterations."""

from dataclasses import dataclass

from tutti.rl.core.driver import drive
from tutti.rl.population import Population


@dataclass
class Counter:
    num_timesteps: int = 0

    def step(self) -> None:
        self.num_timesteps += 3


def test_it_ends_with_the_first_iteration_that_reaches_the_end():
    counter, calls = Counter(), []
    drive(counter, 7, counter.step, lambda: calls.append(counter.num_timesteps))
    assert counter.num_timesteps == 9 and calls == [3, 6, 9]
    drive(counter, 9, counter.step)
    assert counter.num_timesteps == 9


def test_it_ends_when_the_callback_returns_false():
    counter = Counter()
    drive(counter, 100, counter.step, lambda: counter.num_timesteps < 6)
    assert counter.num_timesteps == 6


def test_a_population_ends_when_its_callback_returns_false():
    population = Population("PPO", "CartPole-v1", seeds=range(2), level="eager", n_envs=2, n_steps=8, batch_size=16)
    steps = []
    population.learn(1000, lambda p: steps.append(p.num_timesteps) or len(steps) < 2)
    assert steps == [16, 32]
