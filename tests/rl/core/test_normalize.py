"""Running statistics, against those of all data at once and against a loop."""

import numpy as np
import torch

from tutti.rl.core.normalize import Normalizer
from tutti.rl.placement.ranks import Ranks


def chunk(obs, reward=None, ended=None):
    none = torch.zeros(obs.shape[:2], dtype=torch.bool)
    return {"obs": obs, "last": obs + 1, "reward": torch.zeros(obs.shape[:2]) if reward is None else reward,
            "terminated": none if ended is None else ended, "truncated": none}  # fmt: skip


def test_observations_have_the_mean_and_deviation_of_all_that_were_seen():
    norm, whole = Normalizer(3, obs=True), torch.randn(5, 8, 4, 3) * 3 + 7
    learner = norm.init((4,))
    for part in whole:
        learner, normalized = norm.update(learner, chunk(part))
    rows = whole.reshape(-1, 3)
    torch.testing.assert_close(learner["obs_norm"]["mean"], rows.mean(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(learner["obs_norm"]["var"], rows.var(0, correction=0), rtol=1e-3, atol=1e-3)
    earlier = whole[:-1].reshape(-1, 3)  # the policy that acted knew these
    torch.testing.assert_close(normalized["obs"], (whole[-1] - earlier.mean(0)) / earlier.std(0), rtol=1e-2, atol=1e-2)
    assert float(norm.apply(learner, torch.full((3,), 1e9)).max()) == 10


def test_rewards_are_divided_by_the_deviation_of_returns():
    norm, steps = Normalizer(3, reward=True), 40
    reward, ended = torch.rand(steps, 2), torch.rand(steps, 2) < 0.1
    learner, normalized = norm.update(norm.init((2,)), chunk(torch.zeros(steps, 2, 3), reward, ended), 0.9)
    total, seen = np.zeros(2), []
    for t in range(steps):
        total = total * 0.9 + reward[t].numpy()
        seen.append(total)
        total = np.where(ended[t], 0, total)
    torch.testing.assert_close(normalized["reward"], reward / float(np.std(seen)), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(learner["reward_norm"]["return"], torch.from_numpy(total).float())


def test_without_options_nothing_changes():
    norm, rows = Normalizer(3), chunk(torch.randn(4, 2, 3))
    learner, normalized = norm.update({}, rows)
    assert learner == {} and all(normalized[name] is rows[name] for name in rows)


def test_ranks_with_unequally_many_valid_rows_have_the_statistics_of_all():
    norm, rows = Normalizer(3, obs=True, reward=True), torch.randn(2, 5, 4, 3) * 3 + 7
    valid = torch.arange(40).view(2, 5, 4) % 7 < torch.tensor([2, 6]).view(2, 1, 1)

    def work(rank: int):
        part = {**chunk(rows[rank], torch.rand(5, 4)), "valid": valid[rank]}
        return norm.update(norm.init((4,)), part)[0]

    first, second = Ranks(2).run(work)
    for kind in ("obs_norm", "reward_norm"):
        for name in ("count", "mean", "var"):
            assert torch.equal(first[kind][name], second[kind][name]), (kind, name)
    torch.testing.assert_close(first["obs_norm"]["mean"], rows[valid].mean(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(first["obs_norm"]["var"], rows[valid].var(0, correction=0), rtol=1e-3, atol=1e-3)
