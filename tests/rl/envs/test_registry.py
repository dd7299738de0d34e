"""Environments by name."""

import gymnasium
import pytest
from torch.utils._pytree import tree_leaves

from tutti.rl.core import keys
from tutti.rl.core.env import Env
from tutti.rl.envs import registry


def test_each_name_makes_an_environment():
    for name in registry.names():
        env = registry.make(name)
        assert isinstance(env, Env)
        assert all(len(x) == 2 for x in tree_leaves(env.reset(keys.make(0), 2)[1]))
    assert len({registry.make(name).name for name in registry.names()}) > 20


def test_names_that_gymnasium_has_too_mean_the_same():
    shared = [name for name in registry.names() if name in gymnasium.registry]
    assert len(shared) == 7
    for name in shared:
        env, spec = registry.make(name), gymnasium.registry[name]
        assert env.limit == spec.max_episode_steps
        assert env.threshold == spec.reward_threshold or name == "Pendulum-v1"


def test_options_reach_the_class():
    assert len(registry.make("simple_spread_v3", count=5).agents) == 5
    assert registry.make("Battle-8m", jitter=0.0).name == "Battle-8m"
    assert registry.make("FrozenLake8x8-v1", slippery=False).observation_space.shape == (64,)


def test_unknown_names_and_options_are_named():
    with pytest.raises(ValueError, match=r"no environment 'CartPole'; did you mean 'CartPole-v1'"):
        registry.make("CartPole")
    with pytest.raises(ValueError, match="no environment 'simple_sprad_v3'; did you mean 'simple_spread_v3'"):
        registry.make("simple_sprad_v3")
    with pytest.raises(ValueError, match="no environment 'qqq'; names are Acrobot-v1, "):
        registry.make("qqq")
    with pytest.raises(ValueError, match="CartPole-v1 has no option 'n'; it has none"):
        registry.make("CartPole-v1", n=3)
    with pytest.raises(ValueError, match="simple_spread_v3 has no option 'agents'; its options are count, local"):
        registry.make("simple_spread_v3", agents=3)
