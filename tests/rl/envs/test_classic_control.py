"""Classic control: gymnasium's environments, one step at a time from equal states."""

import math

import gymnasium
import numpy as np
import pytest
import torch
from scipy.linalg import solve_discrete_are

from tutti.rl.core import keys
from tutti.rl.core.env import where
from tutti.rl.envs.acrobot import Acrobot
from tutti.rl.envs.cartpole import CartPole
from tutti.rl.envs.lqr import LQR
from tutti.rl.envs.mountain_car import MountainCar, MountainCarContinuous
from tutti.rl.envs.pendulum import Pendulum

REFERENCES = {
    # environment: (id, how far a state may be from the reference's, which is float32 for the last)
    CartPole: ("CartPole-v1", 1e-12),
    Pendulum: ("Pendulum-v1", 1e-12),
    Acrobot: ("Acrobot-v1", 1e-10),
    MountainCar: ("MountainCar-v0", 1e-12),
    MountainCarContinuous: ("MountainCarContinuous-v0", 1e-7),
}


@pytest.mark.parametrize("make", REFERENCES, ids=lambda make: make.__name__)
def test_steps_are_those_of_gymnasium(make):
    name, tolerance = REFERENCES[make]
    env, n, steps = make(), 16, 1000
    reference = gymnasium.make(name, disable_env_checker=True)
    assert env.observation_space == reference.observation_space
    assert env.action_space == reference.action_space
    assert reference.spec is not None
    assert env.limit == reference.spec.max_episode_steps
    if make is not Pendulum:
        assert env.threshold == reference.spec.reward_threshold
    reference.reset(seed=0)
    inner, timer = reference.unwrapped, reference
    state, _ = env.reset(keys.make(1), n)
    first = state["x"].double()
    state = {"x": first, "t": torch.arange(n) * (env.limit // n)}  # episodes end at different times
    generator, key = torch.Generator().manual_seed(2), keys.make(3)
    ends, transitions, wanted = 0, [], []
    for _ in range(steps):
        if isinstance(env.action_space, gymnasium.spaces.Discrete):
            action = torch.randint(int(env.action_space.n), (n,), generator=generator)
        else:  # also beyond what is allowed
            action = (torch.rand(n, 1, generator=generator) * 2.4 - 1.2) * float(env.action_space.high[0])
        after, last, reward, terminated, truncated = env.step(state, action, key)
        rows = []
        for x, t, a in zip(state["x"].numpy(), state["t"].tolist(), action.numpy(), strict=True):
            inner.state = x
            inner.steps_beyond_terminated = None
            timer._elapsed_steps = t
            rows.append((*timer.step(a.astype(np.float64) if a.ndim else int(a))[:4], np.array(inner.state)))
        obs, r, term, trunc, xs = (np.stack(column) for column in zip(*rows, strict=True))
        transitions.append((last, after["x"], reward.double(), terminated, truncated))
        wanted.append((obs, xs, r.astype(np.float64), term, trunc))
        done = terminated | truncated
        ends += int(done.sum())
        state = {"x": where(done, first, after["x"]), "t": where(done, torch.zeros_like(after["t"]), after["t"])}
    assert ends >= n
    mine = [torch.stack(column).numpy() for column in zip(*transitions, strict=True)]
    theirs = [np.stack(column) for column in zip(*wanted, strict=True)]
    tolerances = [
        (1e-6, 2e-7),
        (tolerance, tolerance),
        (1e-12, 1e-12),
        (0, 0),
        (0, 0),
    ]  # their observations are float32
    for a, b, (rtol, atol) in zip(mine, theirs, tolerances, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def test_starts_are_in_the_ranges_of_gymnasium():
    for make, low, high in (
        (Pendulum, [-math.pi, -1], [math.pi, 1]),
        (Acrobot, [-0.1] * 4, [0.1] * 4),
        (MountainCar, [-0.6, 0], [-0.4, 0]),
    ):
        x = make().reset(keys.make(3), 4096)[0]["x"]
        low, high = torch.tensor(low), torch.tensor(high)
        assert (x >= low).all()
        assert (x <= high).all()
        torch.testing.assert_close(x.amin(0), low, atol=0.01, rtol=0)
        torch.testing.assert_close(x.amax(0), high, atol=0.01, rtol=0)


def test_lqr_costs_converge_to_the_algebraic_riccati_equation():
    env = LQR(limit=2000)
    gains, costs = env.riccati()
    p = solve_discrete_are(env.a, env.b, env.q, env.r)
    np.testing.assert_allclose(costs[0], p, rtol=1e-10)
    np.testing.assert_allclose(gains[0], np.linalg.solve(env.r + env.b.T @ p @ env.b, env.b.T @ p @ env.a), rtol=1e-10)


def test_lqr_best_gains_return_what_is_said_and_others_less():
    env = LQR(noise=0.3, limit=20)
    gains = torch.tensor(env.riccati()[0])

    def returns(scale):
        state, _ = env.reset(keys.make(4), 40_000)
        state["x"], total = state["x"].double(), torch.zeros(40_000, dtype=torch.float64)
        for i in range(20):
            action = -scale * state["x"] @ gains[i].T
            state, _, reward, terminated, truncated = env.step(state, action, keys.fold(keys.make(5), i))
            assert not terminated.any()
            assert truncated.all() == (i == 19)
            total += reward
        return total

    best = returns(1.0)
    assert abs(best.mean().item() - env.optimal_return()) < 4 * best.std().item() / 200
    assert all(returns(scale).mean() < best.mean() for scale in (0.7, 1.4))


def test_lqr_names_matrices_that_do_not_fit():
    with pytest.raises(ValueError, match=r"b has shape \(2, 1\), and a, q, r \(3, 3\)"):
        LQR(a=np.eye(3))
    with pytest.raises(ValueError, match="not positive definite"):
        LQR(r=[[0.0]])
