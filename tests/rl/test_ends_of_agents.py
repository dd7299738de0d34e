"""Ends belong to agents: one that terminates is not continued, one that is truncated is, and rows of agents that have
left teach nothing. The same mask holds for steps that a vector environment spends on its reset."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from pettingzoo import ParallelEnv

from rl_cases import CASES
from tutti.rl import DQN, PPO, adapt
from tutti.rl.adapt.native import Native
from tutti.rl.adapt.pettingzoo import PettingZoo
from tutti.rl.adapt.processes.workers import Workers
from tutti.rl.algorithms import algorithm
from tutti.rl.core.collect import of_episode
from tutti.rl.core.env import Env, ends
from tutti.rl.core.normalize import Normalizer
from tutti.rl.core.program import leaves
from tutti.rl.replay.priority import Prioritized
from tutti.rl.replay.ring import Ring

TEAMS = ["IPPO", "MAPPO", "VDN", "QMIX", "MADDPG", "COMA", "PPO", "A2C", "TRPO", "IMPALA", "RND", "RecurrentPPO"]


class Leaving(ParallelEnv):
    """a dies in step 2 of 4; in the last step b terminates and c is truncated. Dead agents see `noise`."""

    metadata = {"name": "leaving"}  # noqa: RUF012
    possible_agents = ["a", "b", "c"]  # noqa: RUF012

    def observation_space(self, agent):
        return spaces.Box(-9, 9, (2,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def seen(self):
        return {a: np.array([self.t, i], np.float32) for i, a in enumerate(self.agents)}

    def reset(self, seed=None, options=None):
        self.agents, self.t = list(self.possible_agents), 0
        return self.seen(), {a: {} for a in self.agents}

    def step(self, actions):
        self.t += 1
        seen, agents = self.seen(), self.agents
        dies = {"a": self.t == 2, "b": self.t == 4}
        ended = {a: dies.get(a, False) for a in agents}
        cut = {a: a == "c" and self.t == 4 for a in agents}
        self.agents = [a for a in agents if not ended[a] and not cut[a]]
        return seen, dict.fromkeys(agents, 1.0), ended, cut, {a: {} for a in agents}


class PureLeaving(Env):
    """The same as a pure environment."""

    observation_space, action_space = spaces.Box(-9, 9, (2,)), spaces.Discrete(2)
    agents, ends_by_agent = ("a", "b", "c"), True

    def reset(self, key, n):
        t = torch.zeros(n, dtype=torch.int64)
        return {"t": t}, self.seen(t)

    def seen(self, t):
        return torch.stack([t.float().unsqueeze(-1).expand(-1, 3), torch.arange(3.0).expand(len(t), 3)], -1)

    def alive(self, state):
        t = state["t"].unsqueeze(-1)
        return torch.cat([t < 2, t < 4, t < 4], -1)

    def step(self, state, action, key):
        before, t = self.alive(state), state["t"] + 1
        now = t.unsqueeze(-1)
        no = torch.zeros_like(now, dtype=torch.bool)
        return (
            {"t": t},
            self.seen(t),
            before.float(),
            torch.cat([now == 2, now == 4, no], -1),
            torch.cat([no, no, now == 4], -1),
        )


HOSTS = {"host": lambda n: PettingZoo(Leaving, n), "pure": lambda n: PureLeaving()}
VALID = [[1, 1, 1], [1, 1, 1], [0, 1, 1], [0, 1, 1]]
TERMINATED = [[0, 0, 0], [1, 0, 0], [0, 0, 0], [0, 1, 0]]
TRUNCATED = [[0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 1]]


def chunk_of(agent, steps=8):
    if isinstance(agent.env, Env):
        from tutti.rl.core import collect, keys

        state = agent.program.state()
        return collect.rollout(agent, agent.env, agent.acting(state["learner"]), state["actor"], keys.make(0), steps)[1]
    return agent.host.collect(agent, steps)


@pytest.mark.parametrize("how", HOSTS)
def test_chunks_say_who_takes_part_and_who_ends_how(how):
    agent = algorithm("IPPO")(HOSTS[how](1), n_envs=1, n_steps=8, batch_size=8, level="eager")
    chunk = chunk_of(agent)
    for name, wanted in (("valid", VALID), ("agent_terminated", TERMINATED), ("agent_truncated", TRUNCATED)):
        assert chunk[name][:, 0].int().tolist() == wanted * 2, name
    assert chunk["truncated"][:, 0].int().tolist() == [0, 0, 0, 1] * 2 and not chunk["terminated"].any()
    assert (
        chunk["last_valid"][:, 0].int().tolist()
        == [[1, 1, 1], [0, 1, 1], [0, 1, 1], [0, 0, 1 if how == "host" else 0]] * 2
    )
    terminated, done = ends(chunk, chunk["reward"])
    assert terminated[:4, 0].int().tolist() == TERMINATED
    assert done[:4, 0].int().tolist() == [[0, 0, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize("how", HOSTS)
def test_targets_of_an_agent_end_with_its_own_end(how, monkeypatch):
    """Rewards are 1 and all values 10: targets are sums that only the truncated agent's value continues."""
    agent = algorithm("IPPO")(
        HOSTS[how](1), n_envs=1, n_steps=4, batch_size=12, gamma=0.5, gae_lambda=1.0, level="eager"
    )
    chunk, seen = chunk_of(agent, 4), {}
    ten = torch.full((4, 1, 3), 10.0)
    monkeypatch.setattr(agent, "values", lambda learner, chunk: (ten, ten, *ends(chunk, chunk["reward"])))
    monkeypatch.setattr(agent, "epochs", lambda learner, rows, *_: (seen.update(rows), ({}, {}))[1])
    agent.update(agent.program.state()["learner"], chunk, torch.tensor(0))
    target = seen["target"].view(4, 3)
    assert target[:2, 0].tolist() == [1.5, 1.0]
    assert target[:, 1].tolist() == [1.875, 1.75, 1.5, 1.0]
    assert target[:, 2].tolist() == [1.875 + 10 / 16, 1.75 + 10 / 8, 1.5 + 10 / 4, 1.0 + 10 / 2]
    assert seen["valid"].view(4, 3).int().tolist() == VALID


def poisoned(chunk):
    """The chunk with other observations, actions and rewards in rows that do not count."""
    off = ~chunk["valid"]
    altered = dict(chunk)
    altered["action"] = torch.where(off, 1 - chunk["action"], chunk["action"])
    altered["reward"] = torch.where(off, 50.0, chunk["reward"])
    for name in ("obs", "last"):
        wide = off.unsqueeze(-1).expand_as(chunk[name]) & (name == "obs")
        altered[name] = torch.where(wide, 3.0, chunk[name])
    if "log_prob" in chunk:
        altered["log_prob"] = torch.where(off, -3.0, chunk["log_prob"])
    return altered


@pytest.mark.parametrize("name", ["IPPO", "PPO", "A2C", "TRPO", "IMPALA", "RND"])
def test_nothing_is_learned_from_rows_of_agents_that_have_left(name):
    options = {"n_steps": 8, "hidden": (8,), "normalize_obs": True, "normalize_reward": True, "level": "eager"}
    options |= {"batch_size": 8} if name != "A2C" and name != "IMPALA" else {}
    one, two = (algorithm(name)(PettingZoo(Leaving, 2), **options) for _ in range(2))
    chunk = chunk_of(one)
    one.learn_from(dict(chunk))
    two.learn_from(poisoned(chunk))
    a, b = leaves(one.program.state()["learner"]), leaves(two.program.state()["learner"])
    for key in a:
        if not key.startswith("reward_norm.return"):
            torch.testing.assert_close(a[key], b[key], rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", ["VDN", "QMIX", "MADDPG"])
@pytest.mark.parametrize("n_step", [1, 3])
def test_the_replay_keeps_ends_of_agents(name, n_step):
    env = PettingZoo(Leaving, 1)
    agent = algorithm(name)(
        env, n_steps=8, learning_starts=8, buffer_size=64, batch_size=8, n_step=n_step, gamma=0.5, level="eager"
    )
    memory = agent.replay.add(agent.program.state()["replay"], chunk_of(agent))
    batch = agent.replay.transitions(memory, torch.arange(4), torch.zeros(4, dtype=torch.int64), 0.5)
    if n_step == 1:
        assert batch["discount"].tolist() == [[0.5] * 3, [0, 0.5, 0.5], [0.5] * 3, [0.5, 0, 0.5]]
    else:  # b: 3 steps, then to its end; a: to its death in step 2
        assert batch["reward"][:2, 0].tolist() == [1.5, 1.0] and batch["discount"][:2, 0].tolist() == [0, 0]
        assert batch["reward"][:, 1].tolist() == [1.75, 1.75, 1.5, 1.0]
        assert batch["discount"][:, 1].tolist() == [0.125, 0, 0, 0]
        assert batch["discount"][:, 2].tolist() == [0.125, 0.125, 0.25, 0.5]


@pytest.mark.parametrize("name", ["VDN", "QMIX"])
def test_joint_values_leave_out_agents_that_have_left(name):
    agent = algorithm(name)(
        PettingZoo(Leaving, 1), n_steps=8, learning_starts=8, buffer_size=64, batch_size=8, level="eager"
    )
    memory = agent.replay.add(agent.program.state()["replay"], chunk_of(agent))
    learner = {
        k: torch.randn(x.shape) if k in ("weights", "target") else x
        for k, x in agent.program.state()["learner"].items()
    }
    batch = agent.replay.transitions(memory, torch.arange(4), torch.zeros(4, dtype=torch.int64), 0.5)
    batch["weight"] = torch.ones(4)
    assert agent.discount(batch).tolist() == [0.5, 0.5, 0.5, 0.5]
    assert agent.stays(batch).int().tolist() == [[1, 1, 1], [0, 1, 1], [0, 1, 1], [0, 0, 1]]
    first = agent.loss(learner["weights"], learner, batch, None)[0]
    dead = torch.where(batch["valid"], batch["action"], 1 - batch["action"])
    assert torch.equal(first, agent.loss(learner["weights"], learner, {**batch, "action": dead}, None)[0])
    if name == "VDN":
        q = agent.values(learner["weights"], batch["obs"]).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
        best = agent.values(learner["weights"], batch["last"]).argmax(-1, keepdim=True)
        after = agent.values(learner["target"], batch["last"]).gather(-1, best).squeeze(-1)
        joint = (q * torch.tensor(VALID)).sum(-1)
        target = batch["reward"].mean(-1) + 0.5 * (
            after * torch.tensor([[1, 1, 1], [0, 1, 1], [0, 1, 1], [0, 0, 1]])
        ).sum(-1)
        torch.testing.assert_close(first, torch.nn.functional.smooth_l1_loss(joint, target))


@pytest.mark.parametrize("name", TEAMS)
@pytest.mark.parametrize("how", HOSTS)
def test_all_algorithms_of_teams_learn_where_agents_leave(name, how):
    own = {k: x for k, x in CASES[name][1].items() if k != "n_envs"}
    agent = algorithm(name)(
        HOSTS[how](2),
        **{
            "n_envs": 2,
            **own,
            **({"batch_size": 24} if name == "RecurrentPPO" else {}),
            **({"batch_size": 8} if name == "COMA" else {}),
        },
        level="eager",
    )
    agent.learn(96)
    assert all(x.isfinite().all() for x in leaves(agent.program.state()["learner"]).values())
    assert {length for _, length in agent.episodes} == {4.0}


def test_units_of_a_battle_that_have_fallen_teach_nothing():
    agent = algorithm("MAPPO")(
        "Battle-3m", n_envs=4, n_steps=60, batch_size=720, n_epochs=1, hidden=(8,), level="eager"
    )
    chunk = chunk_of(agent, 60)
    fallen = ~chunk["valid"]
    assert fallen.any() and not chunk["mask"][fallen][:, 1:].any()


def test_workers_pass_ends_on():
    env = Workers(lambda n: PettingZoo(Leaving, n), 2, 1)
    here = PettingZoo(Leaving, 2)
    try:
        env.reset(0), here.reset(0)
        for _ in range(5):
            one, two = (x.step(np.zeros((2, 3), np.int64)) for x in (env, here))
            for name in ("valid", "agent_terminated", "agent_truncated", "terminated", "truncated"):
                np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    finally:
        env.close()


def test_agents_that_disappear_have_terminated():
    class Gone(Leaving):
        def step(self, actions):
            seen, reward, ended, cut, infos = super().step(actions)
            return seen, reward, {a: x and a != "a" for a, x in ended.items()}, cut, infos

    env = PettingZoo(Gone, 1)
    env.reset(0)
    moved = [env.step(np.zeros((1, 3), np.int64)) for _ in range(4)]
    assert [m.agent_terminated[0].astype(int).tolist() for m in moved] == TERMINATED


def test_ends_of_episodes_from_those_of_agents():
    t = torch.tensor
    alive = t([[True, True], [True, False], [True, True], [False, True]])
    terminated, cut = (
        t([[True, False], [True, False], [True, True], [False, False]]),
        t([[False, True], [False, False]] * 2),
    )
    assert [x.int().tolist() for x in of_episode(alive, terminated, cut)] == [[0, 1, 1, 0], [1, 0, 0, 0]]


# -- steps that are spent on a reset --------------------------------------------------------------------------------


class Counting(gymnasium.Env):
    """Episodes of 3 steps. The observation counts steps of the instance."""

    observation_space, action_space = spaces.Box(-1, 99, (1,), np.float32), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.array([self.np_random.random()], np.float32), {}

    def step(self, action):
        self.t += 1
        return np.array([self.t], np.float32), 1.0 + action, self.t == 3, False, {}


class Foreign(SyncVectorEnv):
    """A vector environment of an unknown class, which spends a step on each reset."""

    def reset(self, *, seed=None, options=None):
        assert not options
        return super().reset(seed=seed)


def vector(kind, mode=AutoresetMode.NEXT_STEP, n=2):
    return kind([Counting] * n, autoreset_mode=mode)


def test_next_step_environments_give_the_episodes_of_same_step_ones():
    next_step, same = Native(vector(SyncVectorEnv)), Native(vector(SyncVectorEnv, AutoresetMode.SAME_STEP))
    assert not next_step.gaps
    np.testing.assert_array_equal(next_step.reset(3), same.reset(3))
    for t in range(10):
        a, b = (env.step(np.array([t % 2, 0])) for env in (next_step, same))
        for name in ("obs", "reward", "terminated", "truncated", "last"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def test_the_default_vector_environments_of_gymnasium_are_taken():
    env = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync")
    agent = PPO("MlpPolicy", env, n_steps=16, batch_size=32, n_epochs=1, level="eager").learn(128)
    assert agent.n_envs == 2 and agent.episodes
    for envs in (gymnasium.make_vec("Acrobot-v1", 2), gymnasium.make_vec("CartPole-v1", 2)):
        assert not PPO(envs, n_steps=16, batch_size=32, level="eager").env.gaps


def test_rows_of_resets_are_marked_and_teach_nothing():
    agent = PPO(Native(vector(Foreign)), n_steps=8, batch_size=16, n_epochs=1, level="eager")
    assert agent.env.gaps
    chunk = chunk_of(agent)
    assert chunk["valid"][:, 0].int().tolist() == [1, 1, 1, 0, 1, 1, 1, 0]
    assert chunk["length"][:, 0].tolist() == [0, 0, 3, 0, 0, 0, 3, 0]
    assert chunk["truncated"][:, 0].int().tolist() == [0, 0, 0, 1, 0, 0, 0, 1]
    other = PPO(Native(vector(Foreign)), n_steps=8, batch_size=16, n_epochs=1, level="eager")
    off = ~chunk["valid"]
    wrong = {
        **chunk,
        "reward": torch.where(off, 99.0, chunk["reward"]),
        "obs": torch.where(off.unsqueeze(-1), 5.0, chunk["obs"]),
        "action": torch.where(off, 1 - chunk["action"], chunk["action"]),
    }
    agent.learn_from(dict(chunk))
    other.learn_from(wrong)
    torch.testing.assert_close(*(x.program.state()["learner"]["weights"] for x in (agent, other)))
    with pytest.raises(ValueError, match=r"GAIL learns from every row, and .* spends steps on resets.*SAME_STEP"):
        algorithm("GAIL")(Native(vector(Foreign)), level="eager")


@pytest.mark.parametrize(
    ("name", "level"), [("DQN", "eager"), ("DQN", "O0"), ("PrioritizedDQN", "eager"), ("R2D2", "eager")]
)
def test_replays_do_not_sample_rows_of_resets(name, level):
    own = {k: x for k, x in CASES[name][1].items() if k != "n_envs"}
    agent = algorithm(name)(Native(vector(Foreign)), level=level, **own).learn(96)
    assert {length for _, length in agent.episodes} == {3.0}
    if name == "R2D2":
        return
    memory = agent.program.state()["replay"]
    for seed in range(20):
        batch, where = agent.replay.sample(memory, torch.tensor(seed), 32, 0.9)
        assert batch["valid"].all() and (batch["obs"] < 3).all() and where["weight"].min() > 0


def test_valid_rows_are_drawn_uniformly():
    for kind in (Ring, Prioritized):
        ring = kind(8, 2, 2)
        memory = ring.init(
            {
                "obs": ((1,), torch.float32),
                "last": ((1,), torch.float32),
                "reward": ((), torch.float32),
                "terminated": ((), torch.bool),
                "truncated": ((), torch.bool),
                "valid": ((), torch.bool),
            }
        )
        valid = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 0], [1, 1], [1, 0]]).bool()
        obs = torch.arange(12.0).view(6, 2, 1)
        no = torch.zeros(6, 2, dtype=torch.bool)
        memory = ring.add(
            memory, {"obs": obs, "last": obs, "reward": no.float(), "terminated": no, "truncated": no, "valid": valid}
        )
        batch, _ = ring.sample(memory, torch.tensor(1), 6000, 1.0)
        index, count = batch["obs"].unique(return_counts=True)
        wanted = obs[:5][valid[:5]]  # a row of the last step has no second one
        assert index.tolist() == wanted.flatten().tolist()
        assert (count - 1000).abs().max() < 130


def test_statistics_leave_rows_out():
    norm = Normalizer(2, obs=True)
    rows, valid = torch.randn(6, 2), torch.tensor([1, 1, 0, 1, 0, 1]).bool()
    chunk = {"obs": rows, "last": rows}
    one, _ = norm.update(norm.init((1,)), {**chunk, "valid": valid})
    two, _ = norm.update(norm.init((1,)), {"obs": rows[valid], "last": rows[valid]})
    for key in ("mean", "var", "count"):
        torch.testing.assert_close(one["obs_norm"][key], two["obs_norm"][key])


@pytest.mark.parametrize("wrong", [np.zeros(2), "x", None])
def test_rewards_are_single_numbers(wrong):
    class Odd(Counting):
        def step(self, action):
            return np.zeros(1, np.float32), wrong, False, False, {}

    env = adapt.make(Odd, 1)
    env.reset(0)
    with pytest.raises(
        ValueError, match=r"Odd: instance 0 returned the reward .*; rewards are numbers, or arrays with one"
    ):
        env.step(np.zeros(1, np.int64))


def test_rewards_may_be_arrays_with_one_number():
    class Arrays(Counting):
        def step(self, action):
            obs, reward, *more = super().step(action)
            return obs, np.array([reward]), *more

    agent = DQN(adapt.make(Arrays, 2), learning_starts=8, buffer_size=64, batch_size=4, level="eager").learn(32)
    assert agent.episodes and {3.0 <= r <= 6.0 for r, _ in agent.episodes} == {True}
