"""Discrete spaces whose values do not begin at 0: agents speak the language of the environment, whoever adapts it."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from pettingzoo import ParallelEnv

from tutti.rl import BC, PPO, adapt
from tutti.rl.adapt import layout
from tutti.rl.adapt.native import Native
from tutti.rl.adapt.processes.halves import Halves
from tutti.rl.adapt.pure import Pure
from tutti.rl.algorithms import algorithm
from tutti.rl.core.env import Env
from tutti.rl.offline_data import episodes, record

SMALL = {"level": "eager", "hidden": (16,), "n_steps": 32, "batch_size": 32, "n_epochs": 4, "learning_rate": 0.03}
MULTI = spaces.MultiDiscrete([3, 2], start=[5, -1])


class Echo(gymnasium.Env):
    """The reward is 1 for the action that the observation says, in the values of the spaces."""

    def __init__(self, kind="Discrete"):
        self.kind = kind
        self.action_space = spaces.Discrete(3, start=5) if kind == "Discrete" else MULTI
        self.observation_space = spaces.Discrete(3, start=-7) if kind == "Discrete" else MULTI

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.seen(), {}

    def seen(self):
        n = [3] if self.kind == "Discrete" else [3, 2]
        self.side = np.array([self.np_random.integers(k) for k in n])
        return np.int64(self.side[0] - 7) if self.kind == "Discrete" else self.side + MULTI.start

    def step(self, action):
        assert self.action_space.contains(action), action
        right = np.all(action == self.side + (5 if self.kind == "Discrete" else MULTI.start))
        self.t += 1
        return self.seen(), float(right), False, self.t >= 8, {}


class PureEcho(Env):
    def __init__(self, kind="Discrete"):
        one = Echo(kind)
        self.kind, self.action_space, self.observation_space, self.limit = (
            kind,
            one.action_space,
            one.observation_space,
            8,
        )

    def reset(self, key, n):
        t = torch.zeros(n, dtype=torch.int64)
        side = torch.stack([(t + i) % 2 for i in range(1 if self.kind == "Discrete" else 2)], -1)
        return {"t": t, "side": side}, self.seen(side)

    def seen(self, side):
        return side[:, 0] - 7 if self.kind == "Discrete" else side + torch.tensor([5, -1])

    def step(self, state, action, key):
        start = torch.tensor([5] if self.kind == "Discrete" else [5, -1])
        own = action.reshape(len(action), -1) - start
        right = (own == state["side"]).all(-1).float()
        t, side = state["t"] + 1, (state["side"] + 1) % 2
        return {"t": t, "side": side}, self.seen(side), right, torch.zeros_like(t, dtype=torch.bool), self.truncated(t)


VECTORS = {
    "gymnasium": lambda kind, n: adapt.make(lambda: Echo(kind), n),
    "native": lambda kind, n: Native(gymnasium.vector.SyncVectorEnv([lambda: Echo(kind)] * n)),
    "pure": lambda kind, n: PureEcho(kind),
    "pure on the host": lambda kind, n: Pure(PureEcho(kind), n),
}


@pytest.mark.parametrize("kind", ["Discrete", "MultiDiscrete"])
@pytest.mark.parametrize("how", VECTORS)
def test_predictions_are_what_the_environment_takes_and_evaluation_is_of_the_same_policy(how, kind):
    agent = PPO(VECTORS[how](kind, 4), **SMALL, **({"n_envs": 4} if how == "pure" else {})).learn(1024)
    env, obs = VECTORS[how](kind, 2), Echo(kind).observation_space
    assert agent.evaluate(4, env=env).mean >= 7
    for side in ((0, 1), (1, 0)):
        seen = np.int64(side[0] - 7) if kind == "Discrete" else np.array(side) + MULTI.start
        assert obs.contains(seen)
        action, _ = agent.predict(seen)
        wanted = side[0] + 5 if kind == "Discrete" else np.array(side) + MULTI.start
        np.testing.assert_array_equal(action, wanted)
        assert Echo(kind).action_space.contains(action)
        many, _ = agent.predict(np.stack([seen, seen]))
        np.testing.assert_array_equal(many, np.stack([wanted, wanted]))


class Two(ParallelEnv):
    metadata = {"name": "two"}  # noqa: RUF012
    possible_agents = ["a", "b"]  # noqa: RUF012

    def observation_space(self, agent):
        return spaces.Discrete(2, start=3 if agent == "a" else 0)

    def action_space(self, agent):
        return spaces.Discrete(2 if agent == "a" else 3, start=10 if agent == "a" else -4)

    def reset(self, seed=None, options=None):
        self.agents, self.t = list(self.possible_agents), 0
        return {a: self.observation_space(a).start for a in self.agents}, {a: {} for a in self.agents}

    def step(self, actions):
        self.t += 1
        assert all(self.action_space(a).contains(x) for a, x in actions.items()), actions
        rewards = {"a": float(actions["a"] == 11), "b": np.array([float(actions["b"] == -2)])}
        agents, end = self.agents, self.t >= 4
        obs = {a: self.observation_space(a).start for a in agents}
        self.agents = [] if end else agents
        return obs, rewards, dict.fromkeys(agents, False), dict.fromkeys(agents, end), {a: {} for a in agents}


def test_each_agent_of_pettingzoo_has_its_own_start():
    agent = algorithm("IPPO")(adapt.make(Two, 2), **SMALL).learn(512)
    action, _ = agent.predict(np.array([3, 0]))
    assert action.tolist() == [11, -2]
    assert algorithm("IPPO")(Two(), level="eager", n_steps=8, batch_size=16).config.n_envs == 1
    assert agent.evaluate(2, env=Two()).mean == 4


def test_workers_and_halves_pass_starts_on():
    env = adapt.make(Echo, 2)
    one = type(
        "W",
        (),
        {
            "n": 1,
            "name": "w",
            "limit": None,
            "threshold": None,
            "agents": env.agents,
            "gaps": False,
            "observation_space": env.observation_space,
            "action_space": env.action_space,
            "starts": env.starts,
        },
    )()
    assert Halves(one, one).starts == env.starts
    from tutti.rl.adapt.processes.worker import describe

    assert describe(env, 2).attributes["starts"] == env.starts == (np.int64(-7), np.int64(5))


def test_starts_of_nested_spaces():
    space = spaces.Dict({"a": spaces.Discrete(3, start=5), "b": spaces.Tuple([spaces.Box(0, 1), MULTI])})
    starts = layout.starts(space)
    batch = layout.gather(space, [space.sample() for _ in range(3)])
    raw = layout.restore(space, batch, 3)
    again = layout.shifted({"a": raw["a"], "b": {"0": raw["b"][0], "1": raw["b"][1]}}, starts, -1)
    np.testing.assert_array_equal(again["a"], batch["a"])
    np.testing.assert_array_equal(again["b"]["1"], batch["b"]["1"])
    assert layout.starts(spaces.Discrete(3)) is None and layout.starts(spaces.Dict({"x": spaces.Box(0, 1)})) is None


@pytest.mark.parametrize("how", ["gymnasium", "pure"])
def test_recorded_data_clone_what_was_done(how, tmp_path):
    teacher = PPO(VECTORS[how]("Discrete", 4), **SMALL, **({"n_envs": 4} if how == "pure" else {})).learn(1024)
    env = VECTORS[how]("Discrete", 2)
    record(teacher, tmp_path / "echo-v0", 8, "best", env=env)
    for data in (tmp_path / "echo-v0", episodes(teacher, 8, "best", env=env)):
        student = BC(VECTORS[how]("Discrete", 2), data=data, level="eager", learning_rate=0.03).learn(200)
        for side in (0, 1):
            assert student.predict(np.int64(side - 7))[0] == side + 5
    raw = {name: x + 5 if name == "action" else x for name, x in _arrays(teacher, env).items()}
    with pytest.raises(ValueError, match=r"action has values from 5 to .* outside of .*begin at 0"):
        BC(VECTORS[how]("Discrete", 2), data=raw, level="eager")


def _arrays(teacher, env):
    from tutti.rl.dataset import arrays_of

    return arrays_of(episodes(teacher, 2, "best", env=env))


@pytest.mark.parametrize("how", ["gymnasium", "pure"])
def test_experts_speak_the_language_of_the_environment(how):
    expert = lambda features: features.argmax(-1) + 5  # noqa: E731
    dagger = algorithm("DAgger")
    options = {"level": "eager", "n_steps": 32, "learning_rate": 0.03, "batch_size": 64, "gradient_steps": 100}
    agent = dagger(VECTORS[how]("Discrete", 4), expert=expert, **options).learn(256)
    assert [int(agent.predict(np.int64(x))[0]) for x in (-7, -6)] == [5, 6]
    student = dagger(VECTORS["gymnasium"]("Discrete", 4), expert=agent, **options).learn(256)
    assert [int(student.predict(np.int64(x))[0]) for x in (-7, -6)] == [5, 6]


def test_environments_of_other_spaces_are_not_evaluated_in():
    agent = PPO(VECTORS["gymnasium"]("Discrete", 2), **SMALL)
    with pytest.raises(
        ValueError, match=r"PureEcho has the observation_space Discrete\(3, start=-7\), and .*Discrete\(3\)"
    ):
        agent.evaluate(1, env=PureEcho())
    with pytest.raises(ValueError, match="has the observation_space MultiDiscrete"):
        agent.evaluate(1, env=VECTORS["gymnasium"]("MultiDiscrete", 2))
