"""Algorithms for several agents against loops over agents, closed forms and brute force."""

from itertools import product

import pytest
import torch

from tutti.rl import teams
from tutti.rl.algorithms.multi_agent.coma import COMA, counterfactual
from tutti.rl.algorithms.multi_agent.ippo import IPPO
from tutti.rl.algorithms.multi_agent.maddpg import MADDPG
from tutti.rl.algorithms.multi_agent.mappo import MAPPO
from tutti.rl.algorithms.multi_agent.qmix import QMIX
from tutti.rl.algorithms.multi_agent.vdn import VDN
from tutti.rl.algorithms.policy_gradient.ppo import PPO
from tutti.rl.core import keys
from tutti.rl.core.collect import rollout
from tutti.rl.core.program import leaves
from tutti.rl.envs.registry import make

SMALL = {"n_envs": 4, "n_steps": 8, "hidden": (16,), "level": "eager"}


def chunk_of(agent):
    run = agent.program.state()
    with torch.no_grad():
        return run["learner"], rollout(agent, agent.env, agent.acting(run["learner"]), run["actor"], keys.make(3), 8)[1]


def test_ids_follow_observations():
    obs = torch.randn(5, 2, 3, 4)
    seen = teams.with_ids(obs)
    for i in range(3):
        assert torch.equal(seen[..., i, :4], obs[..., i, :])
        assert torch.equal(seen[..., i, 4:], torch.eye(3)[i].expand(5, 2, 3))


def test_ippo_without_ids_is_ppo():
    agents = [kind(make("simple_spread_v3"), batch_size=48, **SMALL, **more)
              for kind, more in ((PPO, {}), (IPPO, {"agent_ids": False}))]  # fmt: skip
    for agent in agents:
        agent.learn(64)
    a, b = (leaves(agent.program.state()) for agent in agents)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_one_agent_is_refused():
    with pytest.raises(ValueError, match="IPPO is for several agents, and CartPole has one"):
        IPPO(make("CartPole-v1"), level="eager")


def test_mappo_values_see_everything_and_policies_only_their_own():
    agent = MAPPO(make("Battle-3m"), batch_size=48, **SMALL)
    learner, chunk = chunk_of(agent)
    value = agent.values(learner, chunk)[0]
    critic = {k.removeprefix("critic."): x for k, x in agent.net.named(learner["weights"]).items() if "critic" in k}
    for i in range(3):
        ids = torch.eye(3)[i].expand(8, 4, 3)
        x = torch.cat([chunk["overview"], ids], -1)
        hidden = (x @ critic["0.weight"].T + critic["0.bias"]).tanh()
        expected = (hidden @ critic["2.weight"].T + critic["2.bias"])[..., 0]
        torch.testing.assert_close(value[..., i], expected)
    inputs = agent.inputs(chunk)
    outputs = agent.network(learner["weights"], inputs)[0]
    inputs["obs"] = inputs["obs"].clone()
    inputs["obs"][:, :, 1] += 1  # another agent's
    moved = agent.network(learner["weights"], inputs)[0]
    assert torch.equal(outputs[:, :, [0, 2]], moved[:, :, [0, 2]]) and not torch.equal(outputs[:, :, 1], moved[:, :, 1])


def test_the_team_is_rewarded_with_the_mean(monkeypatch):
    agent, seen = MAPPO(make("simple_spread_v3"), batch_size=96, **SMALL), {}
    monkeypatch.setattr(PPO, "update", lambda self, learner, chunk, key: seen.update(chunk) or (learner, {}))
    learner, chunk = chunk_of(agent)
    agent.update(learner, chunk, keys.make(0))
    expected = sum(chunk["reward"][..., i] for i in range(3)) / 3
    for i in range(3):
        torch.testing.assert_close(seen["reward"][..., i], expected)


@pytest.mark.parametrize("kind", [VDN, QMIX])
def test_best_actions_of_agents_are_the_best_joint_action(kind):
    """Individual-global-max (Son et al., 2019, definition 1), by trying all joint actions."""
    agent = kind(make("Battle-3m"), n_envs=4, hidden=(16,), level="eager")
    learner, chunk = chunk_of(agent)
    q = agent.values(learner["weights"], chunk["obs"][0])  # (4, 3, 9)
    seen = chunk["overview"][0]
    joint = torch.tensor(list(product(range(9), repeat=3)))  # (729, 3)
    values = torch.stack([agent.mix(learner["weights"], q[:, torch.arange(3), a], seen) for a in joint], -1)
    assert torch.equal(joint[values.argmax(-1)], q.argmax(-1))


def test_qmix_is_monotonic():
    agent = QMIX(make("simple_spread_v3"), n_envs=2, level="eager")
    weights, (values, seen) = agent.init(0)["weights"], (torch.randn(50, 3) * 3, torch.randn(50, 54))
    slope = torch.func.grad(lambda v: agent.mix(weights, v, seen).sum())(values)
    assert slope.min() >= 0 and slope.max() > 0
    assert agent.mix(weights, values, seen).std() > 0


def test_value_targets_of_a_team():
    """y = mean reward + gamma Q_target(s', argmax_a Q), with a loop over the batch, actions masked."""
    agent = VDN(make("Battle-3m"), n_envs=4, hidden=(16,), level="eager", gamma=0.9)
    learner, chunk = chunk_of(agent)
    learner["target"] = agent.init(1)["weights"]
    batch = {name: x[3] for name, x in chunk.items()}
    batch |= {"discount": torch.full((4, 3), 0.9), "weight": torch.ones(4)}
    loss, (error, _) = agent.loss(learner["weights"], learner, batch, keys.make(0))
    errors = []
    for k in range(4):
        now, then, target = 0.0, 0.0, 0.0
        for i in range(3):
            own = torch.cat([batch["obs"][k, i], torch.eye(3)[i]])
            last = torch.cat([batch["last"][k, i], torch.eye(3)[i]])
            now += agent.q(learner["weights"], own)[batch["action"][k, i]]
            possible = agent.q(learner["weights"], last).masked_fill(~batch["last_mask"][k, i], -torch.inf)
            then += agent.q(learner["target"], last)[possible.argmax()]
        target = batch["reward"][k].mean() + 0.9 * then
        errors.append(now - target)
    torch.testing.assert_close(error, torch.stack(errors))
    torch.testing.assert_close(loss, torch.nn.HuberLoss()(torch.stack(errors), torch.zeros(4)))


def test_only_possible_actions_are_taken():
    agent = QMIX(make("Battle-3m"), n_envs=8, hidden=(16,), level="eager", learning_starts=40, batch_size=32)
    agent.learn(400)
    rows = agent.program.state()["replay"]["rows"]
    chosen = rows["mask"].gather(-1, rows["action"].unsqueeze(-1))
    assert chosen[:50].all()


def test_counterfactual_advantages():
    """With a critic that is a known table of joint actions, by trying all actions of an agent."""
    agent = COMA(make("Battle-3m"), batch_size=32, **SMALL)
    learner, chunk = chunk_of(agent)
    table = torch.randn(9, 9, 9)
    action = chunk["action"]
    a = list(action.unbind(-1))
    q = torch.stack([torch.stack([table[tuple([*a[:i], torch.full_like(a[i], k), *a[i + 1 :]])] for k in range(9)], -1)
                     for i in range(3)], -2)  # fmt: skip
    logits = agent.logits(learner["actor"], chunk)
    advantages = counterfactual(q, logits, action)
    chance = logits.softmax(-1)
    for i in range(3):
        mean = sum(chance[..., i, k] * q[..., i, k] for k in range(9))
        torch.testing.assert_close(advantages[..., i], table[tuple(a)] - mean)
    # The baseline does not depend on the agent's action: the expected advantage is 0 (Foerster et al., lemma 1).
    expected = sum(chance[..., k] * counterfactual(q, logits, torch.full_like(action, k)) for k in range(9))
    torch.testing.assert_close(expected, torch.zeros_like(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("normalized", [False, True])
def test_the_loss_of_coma(normalized):
    """-mean(log pi(a) A) - ent_coef H, with A of unit deviation if it is normalized."""
    agent = COMA(make("Battle-3m"), batch_size=32, normalize_advantage=normalized, ent_coef=0.3, **SMALL)
    learner, chunk = chunk_of(agent)
    logits = agent.logits(learner["actor"], chunk)
    q = torch.randn(logits.shape)
    loss, metrics = agent.actor_loss(learner["actor"], chunk, q)
    policy = torch.distributions.Categorical(logits=logits)
    taken = q.gather(-1, chunk["action"].unsqueeze(-1)).squeeze(-1)
    advantage = taken - (policy.probs * q).sum(-1)
    advantage = advantage / advantage.std() if normalized else advantage
    policy_loss, entropy = -(policy.log_prob(chunk["action"]) * advantage).mean(), policy.entropy().mean()
    torch.testing.assert_close(metrics["policy_loss"], policy_loss)
    torch.testing.assert_close(loss, policy_loss - 0.3 * entropy)


def test_the_central_critic_of_coma_ignores_the_own_action():
    agent = COMA(make("simple_spread_v3"), batch_size=32, **SMALL)
    _, chunk = chunk_of(agent)
    before = agent.critic_input(chunk)
    action = chunk["action"].clone()
    action[..., 1] = (action[..., 1] + 1) % 5
    after = agent.critic_input({**chunk, "action": action})
    assert torch.equal(before[..., 1, :], after[..., 1, :])
    assert not torch.equal(before[..., 0, :], after[..., 0, :])
    assert torch.equal(
        agent.others(torch.tensor([1, 2, 0]))[0].view(3, 5), torch.eye(5)[[1, 2, 0]] * torch.tensor([[0.0], [1], [1]])
    )


@pytest.mark.parametrize("continuous", [False, True])
def test_maddpg_is_a_ddpg_for_each_agent(continuous):
    """Losses and gradients of three separate actors and critics, with torch.autograd."""
    agent = MADDPG(make("simple_spread_v3", continuous=continuous), n_envs=4, hidden=(16,), level="eager")
    learner, chunk = chunk_of(agent)
    learner |= {"target_actor": agent.pi.init(5), "target_critic": agent.q.init(6)}
    batch = {name: x[2] for name, x in chunk.items()} | {"discount": torch.full((4, 3), 0.9), "weight": torch.ones(4)}
    key, best = keys.make(1), (torch.tanh if continuous else lambda x: torch.eye(5)[x.argmax(-1)])
    taken = batch["action"] if continuous else torch.eye(5)[batch["action"]]
    next_action = torch.stack(
        [best(agent.pi.one(learner["target_actor"][i], batch["last"][:, i])) for i in range(3)], 1
    )

    gradient = torch.func.grad(lambda w: agent.critic_loss(w, learner, batch)[0])(learner["critic"])
    slope = torch.func.grad(lambda w: agent.actor_loss(w, learner["critic"], batch, key))(learner["actor"])
    logits = agent.outputs(learner["actor"], batch["obs"], None)
    noise = torch.zeros_like(logits) if continuous else keys.gumbel(key, logits.shape)
    for i in range(3):
        critic, actor = (learner[name][i].clone().requires_grad_() for name in ("critic", "actor"))
        after = agent.q.one(
            learner["target_critic"][i], torch.cat([batch["last"].flatten(1), next_action.flatten(1)], -1)
        )
        target = batch["reward"][:, i] + 0.9 * after[:, 0]
        q = agent.q.one(critic, torch.cat([batch["obs"].flatten(1), taken.flatten(1)], -1))[:, 0]
        torch.nn.functional.mse_loss(q, target).backward()
        torch.testing.assert_close(gradient[i], critic.grad)

        outputs = agent.pi.one(actor, batch["obs"][:, i])
        if continuous:
            own = outputs.tanh()
        else:
            soft = (outputs + noise[:, i]).softmax(-1)
            own = torch.nn.functional.one_hot(soft.argmax(-1), 5) + soft - soft.detach()
        joint = torch.stack([own if k == i else taken[:, k] for k in range(3)], 1)
        q = agent.q.one(critic.detach(), torch.cat([batch["obs"].flatten(1), joint.flatten(1)], -1))
        (-q.mean() + 1e-3 * outputs.square().mean()).backward()
        torch.testing.assert_close(slope[i], actor.grad)


def test_maddpg_explores_with_possible_actions():
    agent = MADDPG(make("Battle-3m"), n_envs=8, n_steps=1, hidden=(16,), level="eager", learning_starts=40)
    agent.learn(400)
    rows = agent.program.state()["replay"]["rows"]
    assert rows["mask"].gather(-1, rows["action"].unsqueeze(-1))[:50].all()


def test_gumbel_noise_is_finite_and_has_the_right_mean():
    noise = keys.gumbel(keys.make(0), (1 << 16,))
    assert abs(noise.mean() - 0.5772) < 0.02 and abs(noise.std() - 1.2825) < 0.02
    u = torch.tensor([0.0, 1 - 2**-24])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "_uniform", lambda key, shape: u)
        assert keys.gumbel(keys.make(0), (2,)).isfinite().all()
        assert keys.categorical(keys.make(0), torch.tensor([0.0, -1e9])) == 0
