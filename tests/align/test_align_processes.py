"""Rewards and environments in a job of several processes: what one of them says counts for all."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

import align_models as small
from tutti.align.chat import Encoder
from tutti.align.rewards.scoring import Completed, Rewards
from tutti.align.rollouts.envs import begun, play
from tutti.align.rollouts.rollout import Rollout
from tutti.exec.runtimes.runtime import join_job


class Patience:
    """An environment that takes as many turns as the rank of its process says, and one more."""

    def reset(self, row: Any) -> str:
        self.turns = 0
        return "?"

    def step(self, completion: str) -> tuple[str, float, bool]:
        self.turns += 1
        return f"{dist.get_rank()}", float(dist.get_rank()), self.turns > dist.get_rank() + 1


class Says:
    """A sampler that says one token."""

    def each(self, prompts: Any, limits: Any, seed: int) -> list[Rollout]:
        return [Rollout(list(x), [10], [-1.0], True, "a") for x in prompts]


def _task() -> tuple[Any, Any]:
    join_job(torch.device("cpu"))

    def of_rank(completions: list[str]) -> list[float | None]:
        return [float(dist.get_rank()) if x else None for x in completions]

    rewards = Rewards(of_rank)(Completed(["", ""], ["a", ""], [[1]] * 2, [[2]] * 2, [{}, {}]))
    encoder = Encoder(small.tokenizer())
    row = begun(Patience, {})
    row["prompt_ids"] = encoder.prompt(row["prompt"])
    played = play(Patience, [row], 2, Says(), lambda row: encoder, 0, 20)  # pyright: ignore
    return str(rewards.tolist()), [dataclasses.asdict(x) for x in played]


def test_processes_agree(pool):
    by_rank = pool.run(_task)
    assert all(x == by_rank[0] for x in by_rank)
    assert by_rank[0][0] == "[[0.0], [nan]]" and [x["turns"] for x in by_rank[0][1]] == [2, 2]
