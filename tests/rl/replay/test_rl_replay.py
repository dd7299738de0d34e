"""What is remembered and what is sampled, against lists of steps."""

import pytest
import torch

from tutti.rl.core import keys
from tutti.rl.replay import Hindsight, Prioritized, Ring

GAMMA = 0.9
SHAPES = {
    "obs": ((2,), torch.float32), "last": ((2,), torch.float32), "action": ((), torch.int64),
    "reward": ((), torch.float32), "terminated": ((), torch.bool), "truncated": ((), torch.bool),
}  # fmt: skip


def chunks(count: int, steps: int, n: int, ends: float = 0.15):
    """Steps of episodes: `obs` is (number of the step, environment), so that samples tell where they come from."""
    generator = torch.Generator().manual_seed(0)
    for c in range(count):
        t = torch.arange(c * steps, (c + 1) * steps).float().view(-1, 1).expand(steps, n)
        env = torch.arange(n).float().expand(steps, n)
        ended = torch.rand(2, steps, n, generator=generator) < ends
        yield {"obs": torch.stack([t, env], -1), "last": torch.stack([t + 1, env], -1), "action": t.long(),
               "reward": torch.rand(steps, n, generator=generator), "terminated": ended[0],
               "truncated": ended[1] & ~ended[0]}  # fmt: skip


def filled(replay: Ring, count: int, steps: int):
    memory, whole = replay.init(SHAPES), []
    for chunk in chunks(count, steps, replay.n):
        memory = replay.add(memory, chunk)
        whole.append(chunk)
    return memory, {name: torch.cat([c[name] for c in whole]) for name in SHAPES}


@pytest.mark.parametrize("steps", [1, 3])
def test_returns_of_several_steps_end_with_the_episode(steps):
    replay = Ring(20, 3, steps)
    memory, all_of = filled(replay, 7, 5)
    batch, _ = replay.sample(memory, keys.make(0), 400, GAMMA)
    assert batch["obs"][:, 0].min() == 15 and batch["obs"][:, 0].max() == 35 - steps  # the last 20 of 35 rows
    for i in range(400):
        t, env = (int(x) for x in batch["obs"][i])
        reward, discount = 0.0, 1.0
        for s in range(t, t + steps):
            reward += discount * float(all_of["reward"][s, env])
            discount *= GAMMA
            if all_of["terminated"][s, env] or all_of["truncated"][s, env]:
                break
        assert abs(float(batch["reward"][i]) - reward) < 1e-5
        assert batch["last"][i].tolist() == [s + 1, env]
        over = bool(all_of["terminated"][s, env])
        assert bool(batch["terminated"][i]) == over
        assert abs(float(batch["discount"][i]) - (0.0 if over else discount)) < 1e-6


def test_sequences_are_consecutive_rows_of_one_environment():
    replay = Ring(20, 3)
    memory, _ = filled(replay, 6, 5)
    obs = replay.sequences(memory, keys.make(1), 50, 8)["obs"]
    assert obs.shape == (8, 50, 2)
    assert torch.equal(obs[1:, :, 0] - obs[:-1, :, 0], torch.ones(7, 50))
    assert torch.equal(obs[:, :, 1], obs[:1, :, 1].expand(8, 50))


def test_memory_is_known_beforehand():
    replay = Ring(100, 4)
    tensors = replay.init(SHAPES)["rows"].values()
    assert replay.bytes(SHAPES) == sum(x.nbytes for x in tensors) == 400 * (8 + 8 + 8 + 4 + 1 + 1)


def test_what_does_not_fit():
    with pytest.raises(ValueError, match="enlarge buffer_size to at least 8"):
        Ring(3, 2, 3)
    replay = Ring(4, 3)
    with pytest.raises(ValueError, match="a chunk of 5 steps does not fit"):
        replay.add(replay.init(SHAPES), next(chunks(1, 5, 3)))


@pytest.mark.parametrize("steps", [1, 3])
def test_priorities_are_probabilities(steps):
    replay = Prioritized(10, 2, steps, alpha=1.0, beta=1.0)
    memory, _ = filled(replay, 3, 5)
    tree = memory["tree"]
    inner = torch.arange(1, replay.leaves)
    torch.testing.assert_close(tree[inner], tree[2 * inner] + tree[2 * inner + 1])
    assert int((tree[replay.leaves :] > 0).sum()) == 2 * (10 - steps + 1)  # returns of the last rows are not known
    possible = tree[replay.leaves :].nonzero().squeeze(-1)
    priority = torch.rand(len(possible), generator=torch.Generator().manual_seed(0)) + 0.1
    memory = replay.learned(memory, {"index": possible}, priority)
    batch, where = replay.sample(memory, keys.make(2), 8000)
    counts = torch.stack([(where["index"] == leaf).sum() for leaf in possible])
    chance = priority / priority.sum()
    assert (counts / 8000 - chance).abs().max() < 0.003  # one from each of equal parts
    torch.testing.assert_close(where["weight"], (1 / memory["tree"][where["index"] + replay.leaves]) / (
        1 / memory["tree"][where["index"] + replay.leaves]).max())  # fmt: skip
    expected = torch.stack([where["index"] // 2, where["index"] % 2], -1).float()
    assert torch.equal(batch["obs"][:, 0] % 10, expected[:, 0]) and torch.equal(batch["obs"][:, 1], expected[:, 1])


def test_hindsight_takes_goals_from_the_same_episode():
    """Observations are (what was reached, goal); here what is reached is the number of the step."""

    def reward(x, goal):
        there = (x == goal).squeeze(-1)
        return there.float(), there

    replay = Hindsight(30, 2, slice(0, 1), slice(1, 2), reward, later=4, horizon=6)
    memory, all_of = filled(replay, 5, 5)
    memory["rows"]["obs"][..., 1] = memory["rows"]["last"][..., 1] = -1.0
    batch, _ = replay.sample(memory, keys.make(3), 2000, GAMMA)
    goal = batch["obs"][:, 1]
    changed = goal != -1
    assert abs(float(changed.float().mean()) - 0.8) < 0.04
    assert torch.equal(batch["last"][:, 1], goal)
    steps = goal - batch["obs"][:, 0]
    assert steps[changed].min() == 1 and steps[changed].max() <= 6
    reached = (batch["last"][:, 0] == goal) & changed
    assert torch.equal(batch["reward"][changed], reached[changed].float())
    assert torch.equal(batch["terminated"][changed], reached[changed])
    ends = all_of["terminated"] | all_of["truncated"]
    for i in changed.nonzero().squeeze(-1)[:300].tolist():
        t, until = int(batch["obs"][i, 0]), int(goal[i])
        crossed = [bool(ends[t : until - 1, env].any()) for env in (0, 1)]
        assert not all(crossed), "the goal lies in another episode"
