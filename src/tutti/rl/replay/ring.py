"""The last steps of several environments, sampled uniformly: transitions, n-step returns, and sequences.

A memory is a dict of tensors. `rows` holds what is stored, (length, n, ...): time first, then environments. New rows
replace the oldest ones, in place.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from tutti.rl.core import keys
from tutti.rl.core.env import ends, over

Tree = dict[str, Any]
Number = float | Tensor
ENDS = ("terminated", "truncated", "agent_terminated", "agent_truncated")
Shape = tuple[tuple[int, ...], torch.dtype]


class Ring:
    """A memory of `length` steps of `n` environments.

    steps: number of steps of n-step returns (Sutton 1988; Watkins 1989).
    """

    def __init__(self, length: int, n: int, steps: int = 1):
        if length < steps + 1:
            raise ValueError(f"a replay of {length} steps cannot hold returns of {steps} steps; enlarge buffer_size to "
                             f"at least {(steps + 1) * n}")  # fmt: skip
        self.length, self.n, self.steps = length, n, steps

    def bytes(self, shapes: dict[str, Shape]) -> int:
        """Memory of the replay, for rows of these shapes and dtypes."""
        return sum(self.length * self.n * prod(shape) * dtype.itemsize for shape, dtype in shapes.values())

    def init(self, shapes: dict[str, Shape]) -> Tree:
        """An empty memory. shapes: shapes and dtypes of one row of one environment."""
        rows = {name: torch.zeros(self.length, self.n, *shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
        zero = torch.zeros((), dtype=torch.int64)
        return {"rows": rows, "at": zero, "size": zero.clone()}

    def add(self, memory: Tree, chunk: Tree) -> Tree:
        """The memory with a chunk (time, n, ...) more. Writes into the tensors of the memory."""
        count = chunk["reward"].shape[0]
        if count > self.length:
            raise ValueError(f"a chunk of {count} steps does not fit into a replay of {self.length}")
        index = (memory["at"] + torch.arange(count)) % self.length
        for name, rows in memory["rows"].items():
            rows.index_put_((index,), chunk[name].to(rows.dtype))
        return {**memory, "at": (memory["at"] + count) % self.length,
                "size": (memory["size"] + count).clamp(max=self.length)}  # fmt: skip

    def sample(self, memory: Tree, key: Tensor, count: int, gamma: Number = 1.0) -> tuple[Tree, Tree]:
        """`count` transitions, and where they are: (batch, {"index", "weight"}). gamma: the discount.

        A batch has the stored names and "discount", (count, ...) as rewards: what the value of `last` counts, 0 where
        the episode terminated. reward: the discounted sum of `steps` rewards, or of those to the end of the episode.
        """
        of_time, of_env = keys.split(key)
        if "valid" in memory["rows"]:
            start, env = self._valid(memory, of_time, count)
        else:
            start = keys.integers(of_time, (count,), memory["size"] - self.steps + 1)
            env = keys.integers(of_env, (count,), self.n)
        return self.transitions(memory, start, env, gamma), {"weight": torch.ones(count)}

    def _valid(self, memory: Tree, key: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """(ages, environments) of `count` rows, drawn uniformly from those in which an agent took part."""
        age = (torch.arange(self.length) - memory["at"] + memory["size"]) % self.length
        old = age < memory["size"] - self.steps + 1
        rows = (memory["rows"]["valid"].flatten(2).any(-1) if memory["rows"]["valid"].ndim > 2
                else memory["rows"]["valid"]) & old.unsqueeze(-1)  # fmt: skip
        upto = rows.flatten().cumsum(0)
        drawn = keys.uniform(key, (count,)) * upto[-1]
        at = torch.searchsorted(upto, torch.minimum(drawn.long(), upto[-1] - 1), right=True).clamp(
            max=self.length * self.n - 1
        )
        return age[at // self.n], at % self.n

    def transitions(self, memory: Tree, start: Tensor, env: Tensor, gamma: Number) -> Tree:
        """Transitions that begin at these ages (0 is the oldest row) in these environments."""
        flat = {name: x.flatten(0, 1) for name, x in memory["rows"].items()}
        first = (memory["at"] - memory["size"] + start) % self.length * self.n + env
        batch = {name: x[first] for name, x in flat.items()}
        reward, like, last = batch["reward"], batch["reward"], batch["last"]
        going, discount = torch.ones_like(like, dtype=torch.bool), torch.full_like(like, 1.0) * gamma
        terminated, ended = ends(batch, like)
        for i in range(1, self.steps):
            going = going & ~ended
            at = (memory["at"] - memory["size"] + start + i) % self.length * self.n + env
            reward = reward + discount * going * flat["reward"][at]
            ends_here = ends({name: flat[name][at] for name in ENDS if name in flat}, like)
            terminated, ended = (
                torch.where(going, new, x) for new, x in zip(ends_here, (terminated, ended), strict=True)
            )
            last = torch.where(over(going, last), flat["last"][at], last)
            for name in ("last_mask", "last_valid", "last_overview"):
                if name in batch:
                    more = flat[name][at]
                    of = going if more.shape[: going.ndim] == going.shape else going.flatten(1).any(1)
                    batch[name] = torch.where(over(of, more), more, batch[name])
            discount = torch.where(going, discount * gamma, discount)
        return {**batch, "reward": reward, "last": last, "terminated": terminated,
                "discount": torch.where(terminated, 0.0, discount)}  # fmt: skip

    def sequences(self, memory: Tree, key: Tensor, count: int, length: int) -> Tree:
        """`count` runs of `length` consecutive rows of one environment: (length, count, ...)."""
        of_time, of_env = keys.split(key)
        start = keys.integers(of_time, (count,), memory["size"] - length + 1)
        env = keys.integers(of_env, (count,), self.n)
        at = (memory["at"] - memory["size"] + start + torch.arange(length).unsqueeze(-1)) % self.length * self.n + env
        return {name: x.flatten(0, 1)[at] for name, x in memory["rows"].items()}

    def learned(self, memory: Tree, where: Tree, error: Tensor) -> Tree:
        """The memory after a batch was learned from with these temporal-difference errors (count,)."""
        return memory
