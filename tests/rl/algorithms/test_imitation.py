"""DAgger and GAIL against their definitions: who acts, what is remembered, and what discriminators converge to."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tutti.rl.adapt.minari import Episode
from tutti.rl.algorithms.imitation.dagger import DAgger
from tutti.rl.algorithms.imitation.gail import GAIL
from tutti.rl.algorithms.policy_gradient.ppo import PPO
from tutti.rl.core import collect, keys
from tutti.rl.experts import actions_of

SMALL = {"hidden": (16,), "level": "eager"}


def steer(obs: torch.Tensor) -> torch.Tensor:
    """Pushes the cart towards the side to which the pole falls."""
    return (3 * obs[:, 2] + obs[:, 3] > 0).long()


def shown(n: int = 64) -> list[Episode]:
    """Any observations of CartPole, with action 1."""
    obs = (0.05 * keys.normal(keys.make(0), (n + 1, 4))).numpy()
    end = np.arange(n) == n - 1
    return [Episode(obs, np.ones(n, np.int64), np.zeros(n), end, np.zeros(n, bool))]


def test_dagger_remembers_what_the_expert_said_where_the_learner_was():
    agent = DAgger("CartPole-v1", expert=steer, expert_share=0.0, gradient_steps=1, batch_size=8, **SMALL).learn(256)
    replay = agent.program.state()["replay"]
    rows = {name: x[: int(replay["size"])].flatten(0, 1) for name, x in replay["rows"].items()}
    assert len(rows["action"]) == 256
    assert torch.equal(rows["action"], steer(rows["obs"]))
    learner = agent.program.state()["learner"]
    own = agent.act(agent.policy(learner), {"obs": rows["obs"]}, {}, keys.make(0), False)[0]
    assert not torch.equal(own, rows["action"])  # which it has not learned


def test_the_experts_share_of_acting_falls_linearly():
    agent = DAgger("CartPole-v1", expert=lambda obs: torch.full((len(obs),), 1), expert_fraction=0.5, **SMALL)
    policy = agent.policy(agent.init(0))
    seen = {"obs": torch.zeros(20_000, 4)}
    own = float(agent.act(policy, seen, {}, keys.make(5), False)[0][0] == 1)
    assert own in (0.0, 1.0)
    for progress, share in ((0.0, 1.0), (0.25, 0.5), (0.5, 0.0), (0.9, 0.0)):
        scheduled = {**policy, "progress": torch.tensor(progress)}
        action, extra, _ = agent.act(scheduled, seen, {}, keys.make(1), True)
        alone, _, _ = agent.act({**policy, "progress": torch.tensor(1.0)}, seen, {}, keys.make(1), True)
        right = float(alone.float().mean())
        assert (extra["label"] == 1).all()
        assert float(action.float().mean()) == pytest.approx(share + (1 - share) * right, abs=0.02)


def test_dagger_becomes_its_expert():
    options = {"learning_rate": 0.005, "gradient_steps": 40, "batch_size": 64, "n_envs": 8}
    agent = DAgger("CartPole-v1", expert=steer, **options, **SMALL).learn(2_500)
    assert agent.metrics["agreement"] > 0.9
    assert agent.evaluate(8).mean > 150  # the expert's return is about 200, a random one 22


def test_an_agent_is_an_expert_as_it_was():
    ppo = PPO("Pendulum-v1", n_steps=16, n_envs=2, batch_size=16, **SMALL)
    dagger = DAgger("Pendulum-v1", expert=ppo, **SMALL)
    obs = keys.normal(keys.make(0), (5, 3))
    wanted = torch.from_numpy(ppo.predict(obs.numpy())[0])
    ppo.learn(32)
    assert dagger.expert_action is not None
    torch.testing.assert_close(dagger.to_env(dagger.expert_action({"obs": obs})), wanted)
    with pytest.raises(ValueError, match="no expert to ask"):
        DAgger("Pendulum-v1", **SMALL).learn(1)
    ppo.carry = lambda n: {"h": torch.zeros(n)}
    with pytest.raises(ValueError, match="cannot have a memory"):
        actions_of(ppo, dagger.distribution)


def gail(**options) -> GAIL:
    settings = {"n_envs": 4, "n_steps": 8, "batch_size": 32, "n_epochs": 1, **SMALL, **options}
    return GAIL("CartPole-v1", data=shown(), **settings)


def test_rewards_are_functions_of_the_discriminators_probability():
    for reward, formula in (("gail", lambda d: -(1 - d).log()), ("airl", lambda d: d.log() - (1 - d).log())):
        agent = gail(reward=reward)
        disc, pairs = agent.init(0)["disc"], keys.normal(keys.make(1), (7, 6))
        d = agent.disc(disc, pairs).squeeze(-1).sigmoid()
        torch.testing.assert_close(agent.imitation(disc, pairs), formula(d))
    with pytest.raises(ValueError, match="no reward 'fairl'"):
        gail(reward="fairl")


@pytest.mark.slow
def test_the_discriminator_finds_the_ratio_of_densities():
    """Its logit is log p_expert / p_policy: here for four observations, with known frequencies."""
    agent = gail(disc_steps=600, disc_lr=0.01, disc_batch_size=512, penalty=0.0, disc_hidden=(16,))
    corners = torch.eye(4)
    agent.expert = {"obs": corners[[0, 0, 0, 0, 1, 1, 2, 3]], "action": torch.ones(8, dtype=torch.int64)}
    policy = agent.pairs(corners[[0, 1, 1, 2, 2, 2, 2, 3]], torch.ones(8, dtype=torch.int64))
    learner, _ = agent.discriminate(agent.program.state()["learner"], policy, keys.make(0))
    logit = agent.disc(learner["disc"], agent.pairs(corners, torch.ones(4, dtype=torch.int64))).squeeze(-1)
    assert logit.tolist() == pytest.approx([math.log(4), 0, math.log(1 / 4), 0], abs=0.2)


def test_the_penalty_is_that_of_torchs_autograd():
    real, fake = keys.normal(keys.make(1), (7, 6)), keys.normal(keys.make(2), (7, 6))
    agents = [gail(penalty=x) for x in (0.0, 3.0)]
    disc = agents[0].init(0)["disc"]
    x = real.clone().requires_grad_()
    (slope,) = torch.autograd.grad(agents[0].disc(disc, x).sum(), x)
    without, with_ = (agent.disc_loss(disc, real, fake)[0] for agent in agents)
    torch.testing.assert_close(with_ - without, 1.5 * slope.square().sum(-1).mean())
    d = agents[0].disc(disc, torch.cat([real, fake])).sigmoid().squeeze(-1)
    torch.testing.assert_close(without, -d[:7].log().mean() - (1 - d[7:]).log().mean())


def test_the_environments_reward_is_not_learned_from():
    agent = gail()
    actor = agent.program.state()["actor"]
    learner = agent.program.state()["learner"]
    _, chunk = collect.rollout(agent, agent.env, agent.acting(learner), actor, keys.make(1), 8)
    other = {**chunk, "reward": chunk["reward"] * 100 - 3}
    a, b = (agent.update(learner, x, keys.make(2))[0]["weights"] for x in (chunk, other))
    assert torch.equal(a, b)
    assert not torch.equal(a, learner["weights"])


def test_gail_prefers_the_action_that_was_shown():
    agent = gail(n_steps=32, batch_size=128, n_epochs=4, disc_steps=20, learning_rate=0.01, disc_lr=0.01,
                 reward="airl", penalty=0.1)  # fmt: skip
    agent.learn(128 * 16)
    learner = agent.program.state()["learner"]
    outputs = agent.net(learner["weights"], 0.05 * keys.normal(keys.make(0), (200, 4)), None)[0]
    assert float(outputs.softmax(-1)[:, 1].mean()) > 0.75
