"""What holds for every environment: functions are pure, trace without values, map over keys, and compile in a scan."""

import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import tutti
from rl_cases import stepped
from tutti.rl.core import keys
from tutti.rl.envs import registry
from tutti.rl.envs.teams.mpe import SimpleTag

N = 6
ENVS = [registry.make(name) for name in registry.names() if not name.startswith("Battle-")]
ENVS += [registry.make("Battle-2s3z"), SimpleTag(scripted=True, continuous=True)]
each = pytest.mark.parametrize("env", ENVS, ids=lambda env: env.name)


def act(env, state, key):
    """Random actions, of those that are possible."""
    n = len(state["t"])
    shape = (n,) if len(env.agents) == 1 else (n, len(env.agents))
    if isinstance(env.action_space, spaces.Box):
        assert env.action_space.shape is not None
        shape = (*shape, *env.action_space.shape)
        return keys.uniform(key, shape, float(env.action_space.low.min()), float(env.action_space.high.max()))
    masks = env.masks(state)
    if masks is None:
        return keys.integers(key, shape, int(env.action_space.n))
    return keys.categorical(key, torch.where(masks, 0.0, -1e9))


def tree(x):
    return torch.utils._pytree.tree_leaves(x)


def parts(env, obs):
    """Pairs of a space and the observations that are in it."""
    space = env.observation_space
    return [(space[k], obs[k]) for k in space] if isinstance(space, spaces.Dict) else [(space, obs)]


def rollout(env, key, length=30):
    """All states, observations, actions and what steps return."""
    state, obs = env.reset(key, N)
    rows = [(state, obs)]
    for i in range(length):
        of_action, of_step = keys.split(keys.fold(key, i))
        state, *rest = stepped(env, state, act(env, state, of_action), of_step)
        rows.append((state, *rest))
    return rows


@each
def test_shapes_and_dtypes_are_those_of_the_contract(env):
    rows = rollout(env, keys.make(0))
    first, obs = rows[0]
    agents = () if len(env.agents) == 1 else (len(env.agents),)
    for space, x in parts(env, obs):
        assert x.shape == (N, *agents, *space.shape) and x.dtype == torch.float32
    assert first["t"].dtype == torch.int64
    count = first["t"]
    for state, after, reward, terminated, truncated, last in rows[1:]:
        count = torch.where(terminated | truncated, 0, count + 1)
        assert torch.equal(state["t"], count)
        assert {k: (x.shape, x.dtype) for k, x in state.items()} == {k: (x.shape, x.dtype) for k, x in first.items()}
        for (_, a), (_, b), (_, c) in zip(parts(env, after), parts(env, last), parts(env, obs), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype) == (c.shape, c.dtype)
        assert (reward.shape, reward.dtype) == ((N, *agents), torch.float32)
        assert (terminated.shape, terminated.dtype) == (truncated.shape, truncated.dtype) == ((N,), torch.bool)
        assert all(x.isfinite().all() for x in (*tree(after), reward))
        for space, x in parts(env, last):
            low, high = torch.tensor(space.low), torch.tensor(space.high)
            done = (terminated | truncated).reshape(-1, *[1] * (x.ndim - 1))
            assert (((x >= low) & (x <= high)) | done).all()
        masks = env.masks(state)
        if masks is not None:
            assert (masks.shape, masks.dtype) == ((N, *agents, int(env.action_space.n)), torch.bool)
            assert masks.any(-1).all()
        overview = env.overview(state)
        if overview is not None:
            assert overview.shape[0] == N
            assert (overview.ndim, overview.dtype) == (2, torch.float32)


@each
def test_results_depend_on_arguments_only_and_arguments_are_not_written(env):
    def copy(x):
        return torch.utils._pytree.tree_map_only(Tensor, torch.clone, x)

    key = keys.make(1)
    state, obs = env.reset(key, N)
    state, obs = copy(state), copy(obs)
    action = act(env, state, keys.make(2))
    before = copy((state, action, key))
    one = copy(env.step(state, action, key))
    masks, overview = copy(env.masks(state)), copy(env.overview(state))
    for a, b in zip(tree(before), tree((state, action, key)), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(tree(one), tree(env.step(state, action, key)), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(tree((masks, overview)), tree((env.masks(state), env.overview(state))), strict=True):
        assert a is b is None or torch.equal(a, b)
    for a, b in zip(tree((state, obs)), tree(env.reset(key, N)), strict=True):
        assert torch.equal(a, b)


@each
def test_functions_need_no_values(env):
    with FakeTensorMode(allow_non_fake_inputs=True):
        rows = rollout(env, torch.zeros((), dtype=torch.int64), 2)
    assert all(isinstance(x, Tensor) for x in tree(rows))


@each
def test_functions_map_over_keys(env):
    seeds = torch.arange(3)

    def run(key):
        rows = rollout(env, key, 4)
        return [x for x in tree(rows) if isinstance(x, Tensor)]

    together = torch.func.vmap(run)(seeds)
    for i in range(3):
        for many, one in zip(together, run(seeds[i]), strict=True):
            torch.testing.assert_close(many[i], one, rtol=1e-5, atol=1e-6)


class Rollouts(nn.Module):
    """A policy that adds a learned number to every reward: the sum of a rollout, in one scan."""

    def __init__(self, env):
        super().__init__()
        self.env, self.bonus = env, nn.Parameter(torch.ones(()))

    def forward(self, key):
        env = self.env

        def body(carry, i):
            state, obs = carry
            of_action, of_step = keys.split(keys.fold(key, i))
            state, obs, reward, terminated, truncated, _ = stepped(env, state, act(env, state, of_action), of_step)
            return (state, obs), (
                sum(x.flatten(1).sum(-1) for x in tree(obs)),
                reward.reshape(N, -1).sum(-1),
                terminated | truncated,
            )

        _, (seen, reward, done) = tutti.scan(body, env.reset(key, N), torch.arange(12))
        return (seen + reward + done).mean() * self.bonus


QUICK = ["Acrobot", "ConnectFour-greedy", "SpaceInvaders", "SimpleSpeakerListener", "Battle-2s3z"]
slow = [pytest.param(env, marks=[] if env.name in QUICK else [pytest.mark.slow]) for env in ENVS]


@pytest.mark.starts
@pytest.mark.parametrize("env", slow, ids=lambda env: env.name)
def test_rollouts_are_one_scan(env):
    model = Rollouts(env)
    batch = {"key": keys.make(3)}
    expected = model(**batch).detach()
    step = tutti.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.0), batch, cluster="cpu:1", level="O0")
    torch.testing.assert_close(step(batch).detach().reshape(()), expected, rtol=1e-5, atol=1e-5)
