"""The same algorithm under every placement: equal bits on one and on several processes."""

from __future__ import annotations

import pytest
import torch

from gloo import Pool
from rl_cases import CASES as ALL
from rl_cases import with_expert
from tutti.rl.algorithms import ALGORITHMS, algorithm
from tutti.rl.algorithms.families.offline import Offline
from tutti.rl.core.agent import Agent
from tutti.rl.core.program import leaves
from tutti.rl.placement.placement import PLACEMENTS, Placed
from tutti.rl.placement.ranks import Ranks, mean_of_ranks

CASES = {
    "PPO": ("CartPole-v1", {"n_envs": 8, "n_steps": 8, "batch_size": 16, "n_epochs": 2, "hidden": (16,),
                            "normalize_obs": True}),
    "SAC": ("Pendulum-v1", {"n_envs": 4, "n_steps": 4, "gradient_steps": 2, "hidden": (16,), "batch_size": 16,
                            "learning_starts": 32, "buffer_size": 128}),
}  # fmt: skip
QUICK = ("CrossQ", "Dreamer", "MBPO")  # with statistics in their learners
SYNCHRONOUS = ("learners", "actors")


def learned(name: str, placement: str, ranks: int, level: str = "eager", steps: int = 192) -> dict[str, torch.Tensor]:
    """The learner of process 0 afterwards."""
    env, options = CASES[name]
    placed = Placed(name, env, placement, ranks, level=level, **options)
    placed.learn(steps)
    assert placed.num_timesteps == steps
    return leaves(placed.agent.program.state()["learner"])


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(x, two[name]) for name, x in one.items())


@pytest.mark.parametrize("placement", SYNCHRONOUS)
@pytest.mark.parametrize("name", CASES)
def test_four_processes_compute_the_bits_of_one(pool, name, placement):
    one = learned(name, placement, 4)
    assert same(one, pool.run(learned, name, placement, 4)[0])


@pytest.mark.slow
@pytest.mark.parametrize("placement", SYNCHRONOUS)
def test_two_processes_compute_the_bits_of_one(placement):
    workers = Pool(2)
    try:
        assert same(learned("PPO", placement, 4), workers.run(learned, "PPO", placement, 4)[0])
    finally:
        workers.close()


@pytest.mark.parametrize("placement", SYNCHRONOUS)
def test_captured_fragments_have_the_bits_of_plain_python(placement):
    assert same(learned("PPO", placement, 2), learned("PPO", placement, 2, "O0"))


@pytest.mark.parametrize(("name", "more"), [("PPO", {"target_kl": 1e-4}), ("TRPO", {})])
def test_all_learners_have_equal_weights(name, more):
    env, options = CASES["PPO"]
    options = {k: x for k, x in options.items() if name == "PPO" or k != "n_epochs"}
    placed = Placed(name, env, "learners", 4, level="eager", **options, **more).learn(128)
    first = leaves(placed.kind(env, level="eager", **{**options, **more, "n_envs": 2}).program.state())
    assert not torch.equal(first["learner.weights"], leaves(placed.learners[0].program.state())["learner.weights"])
    states = [leaves(agent.program.state()) for agent in placed.learners]
    for other in states[1:]:
        shared = [k for k in other if k.startswith("learner.") and "return" not in k]
        assert shared and all(torch.equal(states[0][k], other[k]) for k in shared)
        assert not torch.equal(states[0]["actor.env.x"], other["actor.env.x"])


def check_equal_learners(name):
    env, options = ALL[name]
    placed = Placed(name, env, "learners", 2, level="eager", **options, **with_expert(name)).learn(256)
    one, two = (leaves(agent.program.state()["learner"]) for agent in placed.learners)
    assert [k for k in one if "return" not in k and not torch.equal(one[k], two[k])] == []


@pytest.mark.parametrize("name", QUICK)
def test_all_that_is_learned_is_equal_on_all_ranks(name):
    check_equal_learners(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [x for x in ALGORITHMS if x not in QUICK])
def test_all_that_others_learn_is_equal_on_all_ranks(name):
    if issubclass(algorithm(name), Offline):
        pytest.skip("it has no environments to share out")
    check_equal_learners(name)


def test_actors_give_the_learner_what_all_have_done():
    env, options = CASES["PPO"]
    placed = Placed("PPO", env, "actors", 2, level="eager", **options)
    seen = []
    update = placed.agent.update
    placed.agent.update = lambda learner, chunk, key: (seen.append(chunk), update(learner, chunk, key))[1]
    placed.learn(64)
    (chunk,) = seen
    assert chunk["reward"].shape == (8, 8)
    assert len(chunk["obs"][0].unique(dim=0)) == 8, "environments of unlike actors begin differently"


@pytest.mark.parametrize("placement", ["async", "server"])
def test_placements_that_do_not_wait_learn(pool, placement):
    """Chunks come in any order. Weights move, and stay finite; all steps are learned from."""
    first = learned("PPO", placement, 4, steps=64)
    for state in (learned("PPO", placement, 4), pool.run(learned, "PPO", placement, 4)[0]):
        assert torch.isfinite(state["weights"]).all() and not torch.equal(state["weights"], first["weights"])


def test_worker_processes_step_environments_alike():
    """What an instance does depends neither on the number of workers nor on that of their instances."""
    env, options = CASES["PPO"]
    one, two = (Placed("PPO", env, "environments", ranks, level="eager", **options) for ranks in (1, 2))
    for placed in (one, two):
        placed.learn(128)
        placed.agent.env.close()
    assert same(*(leaves(p.agent.program.state()["learner"]) for p in (one, two)))


def test_a_mean_is_that_of_all_ranks():
    def work(rank):
        return mean_of_ranks(torch.tensor([float(rank), 1.0]))

    for mean in Ranks(4).run(work):
        assert mean.tolist() == [1.5, 1.0]
    assert mean_of_ranks(torch.tensor(3.0)) == 3


def test_an_error_of_one_rank_ends_all():
    def work(rank):
        if rank == 2:
            raise RuntimeError("rank 2 fails")
        return mean_of_ranks(torch.zeros(1))

    with pytest.raises(RuntimeError, match="rank 2 fails"):
        Ranks(4).run(work)


def test_what_cannot_be_placed():
    with pytest.raises(ValueError, match=f"'else' is not one of {', '.join(PLACEMENTS)}"):
        Placed("PPO", "CartPole-v1", "else")
    with pytest.raises(ValueError, match="async is for on-policy algorithms, and SAC has a replay"):
        Placed("SAC", "Pendulum-v1", "async", 2, n_envs=2)
    with pytest.raises(ValueError, match="fused has one rank, not 2"):
        Placed("PPO", "CartPole-v1", "fused", 2)
    with pytest.raises(ValueError, match="n_envs is 8, which 3 ranks cannot share equally"):
        Placed("PPO", "CartPole-v1", "actors", 3, n_envs=8)


def test_rounds_of_an_offline_algorithm_are_counted_in_updates():
    env, options = ALL["BC"]
    placed = Placed("BC", env, level="eager", **{**options, "gradient_steps": 4}, **with_expert("BC"))
    for updates in (12, 24):
        placed.learn(10)  # up to the end of an iteration
        assert placed.num_timesteps == placed.agent.num_timesteps == int(placed.agent.program.state()["steps"])
        assert placed.num_timesteps == updates


def test_episodes_of_learners_are_reported_once():
    placed = Placed("PPO", "CartPole-v1", "learners", 2, level="eager", **CASES["PPO"][1])
    for _ in range(4):
        placed.learn(256)
    assert 0 < sum(length for _, length in placed.agent.episodes) <= placed.num_timesteps == 1024


def test_metrics_of_learners_are_means_over_all_ranks(monkeypatch):
    per_learner, real = [], Agent._note

    def note(agent, metrics, start):
        real(agent, metrics, start)
        per_learner.append(agent.metrics)

    monkeypatch.setattr(Agent, "_note", note)
    placed = Placed("PPO", "CartPole-v1", "learners", 2, n_envs=4, n_steps=8, batch_size=16, n_epochs=1, hidden=(8,),
                    level="eager").learn(32)  # fmt: skip
    one, two = per_learner
    assert one["value_loss"] != two["value_loss"] and placed.agent.metrics.keys() == one.keys()
    for name, x in placed.agent.metrics.items():
        scale = 1 if name == "steps_per_second" else 2
        assert x == pytest.approx((one[name] + two[name]) / scale)
