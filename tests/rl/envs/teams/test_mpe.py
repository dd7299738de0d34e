"""Particle scenarios: those of `mpe2` from equal states, in float64."""

import numpy as np
import pytest
import torch
from mpe2 import simple_adversary_v3, simple_speaker_listener_v4, simple_spread_v3, simple_tag_v3

from tutti.rl.core import keys
from tutti.rl.envs.teams.mpe import SimpleAdversary, SimpleSpeakerListener, SimpleSpread, SimpleTag

SCENARIOS = {
    "simple_spread_v3": (simple_spread_v3, SimpleSpread, {}, {}),
    "simple_spread_v3, 5 agents": (
        simple_spread_v3,
        SimpleSpread,
        {"N": 5, "local_ratio": 0.2},
        {"count": 5, "local": 0.2},
    ),
    "simple_tag_v3": (simple_tag_v3, SimpleTag, {}, {}),
    "simple_tag_v3, 2 prey": (
        simple_tag_v3,
        SimpleTag,
        {"num_good": 2, "num_adversaries": 4, "num_obstacles": 3},
        {"prey": 2, "predators": 4, "obstacles": 3},
    ),
    "simple_adversary_v3": (simple_adversary_v3, SimpleAdversary, {}, {}),
    "simple_speaker_listener_v4": (simple_speaker_listener_v4, SimpleSpeakerListener, {}, {}),
}
INSTANCES, STEPS, TOLERANCE = 8, 100, 1e-10


def put(world, state, i):
    """Give mpe2's world the state of instance i."""
    for agent, position, velocity in zip(world.agents, state["position"][i], state["velocity"][i], strict=True):
        agent.state.p_pos, agent.state.p_vel = position.numpy().copy(), velocity.numpy().copy()
    for landmark, position in zip(world.landmarks, state["landmarks"][i], strict=True):
        landmark.state.p_pos = position.numpy().copy()
    if "goal" in state:
        goal = world.landmarks[int(state["goal"][i])]
        for agent in world.agents:
            if "said" not in state:
                agent.goal_a = goal
        if "said" in state:
            world.agents[0].goal_b = goal
            world.agents[0].state.c = state["said"][i].numpy().copy()


def crowd(state, generator):
    """Bring agents near each other, near landmarks and to the border, where forces, rewards and fines are."""
    n, agents, _ = state["position"].shape
    scale = torch.tensor([0.2, 0.5, 1.0, 1.6], dtype=torch.float64)[torch.arange(n) % 4].reshape(-1, 1, 1)
    state["position"] = (torch.rand(n, agents, 2, generator=generator, dtype=torch.float64) * 2 - 1) * scale
    state["velocity"] = torch.randn(n, agents, 2, generator=generator, dtype=torch.float64)
    if "said" in state:
        state["velocity"][:, 0] = 0
    return state


@pytest.mark.parametrize("continuous", [False, True], ids=["discrete", "continuous"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_steps_are_those_of_mpe2(name, continuous):
    module, make, theirs, ours = SCENARIOS[name]
    reference = module.raw_env(continuous_actions=continuous, **theirs)
    reference.reset(seed=0)
    world, scenario = reference.world, reference.scenario
    env = make(continuous=continuous, **ours)
    assert list(env.agents) == reference.possible_agents
    assert env.limit == reference.max_cycles
    spaces = [reference.observation_space(agent) for agent in env.agents]
    assert env.widths == tuple(space.shape[0] for space in spaces)
    of_actions = [reference.action_space(agent) for agent in env.agents]
    sizes = [space.shape[0] if continuous else int(space.n) for space in of_actions]

    n, agents = INSTANCES, len(env.agents)
    state, _ = env.reset(keys.make(0), n)
    masks = env.masks(state)
    if not continuous:
        assert sizes == (masks[0].sum(-1).tolist() if masks is not None else [5] * agents)
    state = {k: x.double() if x.is_floating_point() else x for k, x in state.items()}
    generator = torch.Generator().manual_seed(1)
    rewards = 0.0
    for step in range(STEPS):
        if step % 20 == 0:
            state = crowd(state, generator)
        if continuous:
            action = torch.rand(n, agents, 5, generator=generator) * 1.2 - 0.1
        else:
            action = torch.stack([torch.randint(size, (n,), generator=generator) for size in sizes], 1)
        after, obs, reward, terminated, truncated = env.step(state, action, keys.make(2))
        assert not terminated.any()
        assert torch.equal(truncated, after["t"] >= 25)
        overview = env.overview(after)
        for i in range(n):
            put(world, state, i)
            if continuous:
                clipped = action[i].double().clamp(0, 1).numpy()
                reference.current_actions = [a[:size] for a, size in zip(clipped, sizes, strict=True)]
            else:
                reference.current_actions = action[i].tolist()
            reference._execute_world_step()
            wanted = [scenario.observation(agent, world) for agent in world.agents]
            np.testing.assert_allclose(overview[i].numpy(), np.concatenate(wanted), rtol=TOLERANCE, atol=TOLERANCE)
            for seen, row, width in zip(wanted, obs[i].numpy(), env.widths, strict=True):
                np.testing.assert_allclose(row[:width], seen, rtol=TOLERANCE, atol=TOLERANCE)
                assert not row[width:].any()
            theirs = [reference.rewards[agent] for agent in env.agents]
            np.testing.assert_allclose(reward[i].numpy(), theirs, rtol=TOLERANCE, atol=TOLERANCE)
            rewards += abs(theirs[0])
        state = after
    assert rewards > 0


def test_scripted_prey_flees_and_is_no_agent():
    whole, env = SimpleTag(), SimpleTag(scripted=True)
    assert env.agents == whole.agents[:3]
    state, obs = env.reset(keys.make(3), 256)
    assert torch.equal(obs, whole.reset(keys.make(3), 256)[1][:, :3])
    assert obs.shape == (256, 3, 16)
    waiting = torch.zeros(256, 3, dtype=torch.int64)
    for _ in range(100):
        state, obs, reward, _, _ = env.step(state, waiting, keys.make(4))
    assert reward.shape == (256, 3)
    assert (reward > 0).float().mean() < 0.02  # predators that wait catch nothing
    prey = state["position"][:, 3]
    assert prey.abs().max() < 1.4
    near = (prey.unsqueeze(1) - state["position"][:, :3]).norm(dim=-1).amin(-1)
    assert near.mean() > 0.6

    state, _ = env.reset(keys.make(3), 256)
    caught = torch.zeros(256)
    for _ in range(100):  # predators that run straight to it catch it
        apart = state["position"][:, 3:] - state["position"][:, :3]
        along = apart.abs().argmax(-1)
        ahead = apart.gather(-1, along.unsqueeze(-1)).squeeze(-1) > 0
        state, _, reward, _, _ = env.step(state, 1 + 2 * along + ahead, keys.make(4))
        caught += reward[:, 0] > 0
    assert (caught > 0).float().mean() > 0.5


def test_agents_of_spread_can_be_exchanged():
    env, order = SimpleSpread(), torch.tensor([2, 0, 1])
    state, _ = env.reset(keys.make(5), 32)
    action = keys.integers(keys.make(6), (32, 3), 5)
    exchanged = {**state, "position": state["position"][:, order], "velocity": state["velocity"][:, order]}
    one, _, reward, *_ = env.step(state, action, keys.make(7))
    other, _, moved, *_ = env.step(exchanged, action[:, order], keys.make(7))
    torch.testing.assert_close(other["position"], one["position"][:, order])
    torch.testing.assert_close(moved, reward[:, order])


def test_numbers_of_agents_are_checked():
    with pytest.raises(ValueError, match="at least one predator"):
        SimpleTag(predators=0)
    with pytest.raises(ValueError, match="count is 0"):
        SimpleSpread(0)
    with pytest.raises(ValueError, match="at least one agent"):
        SimpleAdversary(0)
