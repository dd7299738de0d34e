"""Pure environments as environments of the host, so that worker processes can step them.

Instance i draws from keys of its own: what it does depends neither on the number of instances nor on who steps it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tutti.rl.core import keys
from tutti.rl.core.env import Env, where
from tutti.rl.core.vector import Moved, VectorEnv

Tree = dict[str, Any]


class Pure(VectorEnv):
    """n instances of a pure environment, stepped by plain PyTorch."""

    def __init__(self, env: Env, n: int):
        self.env, self.n, self.name = env, n, env.name
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.agents, self.limit, self.threshold = env.agents, env.limit, env.threshold
        self.reset(0)

    def reset(self, seed: int | None = None) -> Any:
        first = 0 if seed is None else seed
        self.keys = torch.stack([keys.make(first + i) for i in range(self.n)])
        with torch.no_grad():
            self.now, self.obs = self._begun(self._keys())
        return _arrays(self.obs)

    def _keys(self) -> Tensor:
        """A new key for each instance."""
        self.keys = keys.fold(self.keys, 0)
        return keys.fold(self.keys, 1)

    def _begun(self, of: Tensor) -> tuple[Tree, Any]:
        one = lambda key: pytree.tree_map(lambda x: x.squeeze(0), self.env.reset(key, 1))  # noqa: E731
        return torch.vmap(one)(of)

    def step(self, action: np.ndarray) -> Moved:
        def one(state: Tree, action: Tensor, key: Tensor) -> Any:
            moved = self.env.step(pytree.tree_map(lambda x: x.unsqueeze(0), state), action.unsqueeze(0), key)
            return pytree.tree_map(lambda x: x.squeeze(0), moved)

        with torch.no_grad():
            after, last, reward, terminated, truncated = torch.vmap(one)(
                self.now, torch.from_numpy(action), self._keys()
            )
            fresh, first = self._begun(self._keys())
            done = terminated | truncated
            self.now = {name: where(done, fresh[name], x) for name, x in after.items()}
            self.obs = pytree.tree_map(partial(where, done), first, last)
        return Moved(_arrays(self.obs), reward.numpy(), terminated.numpy(), truncated.numpy(), _arrays(last),
                     _arrays(self.env.masks(after)), _arrays(self.env.overview(after)))  # fmt: skip

    def masks(self) -> np.ndarray | None:
        return _arrays(self.env.masks(self.now))

    def overview(self) -> np.ndarray | None:
        return _arrays(self.env.overview(self.now))

    def draw(self, i: int = 0) -> np.ndarray | None:
        return self.env.draw(self.now, i)

    def state(self) -> Any:
        return pytree.tree_map(torch.clone, (self.now, self.obs, self.keys))

    def restore(self, state: Any) -> Any:
        self.now, self.obs, self.keys = pytree.tree_map(torch.clone, state)
        return _arrays(self.obs)


def in_workers(env: str | Env, n: int, workers: int, start: str = "forkserver") -> VectorEnv:
    """n instances in worker processes. start: how processes start, see `Workers`."""
    from tutti.rl.adapt.processes.workers import Workers

    return Workers(partial(_make_pure, env), n, workers, start=start)


def _make_pure(env: str | Env, n: int) -> Pure:
    if isinstance(env, str):
        from tutti.rl.envs.registry import make

        env = make(env)
    torch.set_num_threads(1)
    return Pure(env, n)


def _arrays(x: Any) -> Any:
    """Tensors as arrays; None as it is."""
    return pytree.tree_map(lambda t: None if t is None else t.numpy(), x)
