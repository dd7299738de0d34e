"""Environments of dm_control and others with DeepMind's interface, `dm_env`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from tutti.rl.adapt import checked, layout
from tutti.rl.adapt.packages import package
from tutti.rl.core.vector import Moved, VectorEnv


class DmControl(VectorEnv):
    """n environments with the interface of `dm_env`, stepped one after the other in this process.

        env = DmControl("walker-walk", 8)

    env: "domain-task" of dm_control's suite, whose instance i gets the random seed of `reset` + i, or a function
        `make(seed)` that returns a `dm_env.Environment`. seed is an int or None; a reset with a seed makes new ones.
    flat: whether observations that are dicts become one float32 array, parts in the order of `observation_spec()`.
    limit: steps of an episode, by default the environment's own. kwargs: arguments of `dm_control.suite.load`.

    Actions are between -1 and 1 and are scaled to the bounds of `action_spec()`, where these are finite; a spec with
    `num_values` is a Discrete space. An episode that ends with discount 0 terminated; with another discount it was
    truncated. `draw` needs an environment with `physics`.
    """

    def __init__(
        self,
        env: str | Callable[[int | None], Any],
        n: int,
        *,
        flat: bool = True,
        limit: int | None = None,
        **kwargs: Any,
    ):
        if n < 1:
            raise ValueError(f"n is {n}; a vector of environments has at least 1 instance")
        if isinstance(env, str):
            self.make, self.name = _suite(env, kwargs), env
        elif kwargs:
            raise ValueError(f"{sorted(kwargs)} are for dm_control.suite.load; pass them to the function that makes it")
        else:
            self.make, self.name = env, getattr(env, "__name__", type(env).__name__)
        self.n, self.flat, self.steps = n, flat, 0
        self.envs = [self.make(None) for _ in range(n)]
        steps = getattr(self.envs[0], "_step_limit", np.inf)
        self.limit = limit if limit is not None else int(steps) if np.isfinite(steps) else None
        self.space = _space(self.envs[0].observation_spec(), f"{self.name}.observation_spec()")
        size = sum(int(np.prod(x.shape[1:])) for x in layout.leaves(layout.zeros(self.space, 1)).values())
        self.observation_space = spaces.Box(-np.inf, np.inf, (size,), np.float32) if flat else self.space
        self.spec = self.envs[0].action_spec()
        self.action_space = _actions(self.spec, self.name)
        if isinstance(self.action_space, spaces.Box):
            self.scale = _scales(self.spec)
        self.t = np.zeros(n, np.int64)

    def reset(self, seed: int | None = None) -> layout.Batch:
        self.steps = 0
        if seed is not None:
            self.close()
            self.envs = [self.make(seed + i) for i in range(self.n)]
        return self._gather([self._begin(i) for i in range(self.n)])

    def step(self, action: np.ndarray) -> Moved:
        values = layout.scatter(self.action_space, action, self.n)
        self.steps += 1
        self.t += 1
        reward, terminated, truncated = np.zeros(self.n), np.zeros(self.n, bool), np.zeros(self.n, bool)
        last, first = [], []
        for i, (env, value) in enumerate(zip(self.envs, values, strict=True)):
            try:
                moved = env.step(self._scale(value))
            except Exception as error:
                raise checked.StepError(self.name, i, self.steps, value, checked.words(error)) from error
            reward[i], obs = np.nan if moved.reward is None else moved.reward, moved.observation
            terminated[i] = moved.last() and moved.discount == 0
            late = self.limit is not None and self.t[i] >= self.limit
            truncated[i] = late or (moved.last() and not terminated[i])
            if terminated[i] or truncated[i]:
                obs = copy.deepcopy(obs)  # the environment may write the next one to the same arrays
                first.append((i, self._begin(i)))
            last.append(obs)
        rewards = checked.rewards(self.name, reward, self.steps)
        before = after = self._gather(last)
        if first:
            for i, obs in first:
                last[i] = obs
            after = self._gather(last)
        return Moved(after, rewards, terminated, truncated, before)

    def draw(self, i: int = 0) -> np.ndarray | None:
        physics = getattr(self.envs[i], "physics", None)
        return None if physics is None else np.asarray(physics.render())

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def _begin(self, i: int) -> Any:
        self.t[i] = 0
        try:
            return self.envs[i].reset().observation
        except Exception as error:
            raise checked.StepError(self.name, i, self.steps, None, checked.words(error)) from error

    def _scale(self, value: np.ndarray) -> np.ndarray:
        if isinstance(self.action_space, spaces.Discrete):
            return value
        half, middle = self.scale
        scaled = value.astype(np.float64) * half + middle
        return np.clip(scaled, self.spec.minimum, self.spec.maximum).astype(self.spec.dtype)

    def _gather(self, values: list[Any]) -> layout.Batch:
        obs = checked.observations(self.name, self.space, values, self.steps)
        if not self.flat:
            return obs
        parts = [x.reshape(self.n, -1).astype(np.float32, copy=False) for x in layout.leaves(obs).values()]
        return np.concatenate(parts, axis=1)


def _suite(name: str, kwargs: dict[str, Any]) -> Callable[[int | None], Any]:
    domain, _, task = name.partition("-")
    if not task:
        raise ValueError(f"{name!r} is not of the form domain-task, as in 'walker-walk'")

    def make(seed: int | None) -> Any:
        suite: Any = package("dm_control.suite")
        of_task = {**kwargs.get("task_kwargs", {}), "random": seed}
        return suite.load(domain, task, **{**kwargs, "task_kwargs": of_task})

    return make


def _space(spec: Any, name: str) -> spaces.Space:
    if isinstance(spec, dict):  # in the order of the spec, which spaces.Dict would sort
        return spaces.Dict([(str(key), _space(part, f"{name}[{key!r}]")) for key, part in spec.items()])
    if hasattr(spec, "num_values"):
        return spaces.Discrete(int(spec.num_values))
    if not hasattr(spec, "shape"):
        raise ValueError(f"{name} is {spec!r}, not an array or a dict of arrays; wrap the environment")
    dtype = np.dtype(spec.dtype)
    if dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, spec.shape, dtype.type)
    if dtype.kind == "b":
        return spaces.Box(0, 1, spec.shape, np.uint8)
    bounds = np.iinfo(dtype)
    return spaces.Box(bounds.min, bounds.max, spec.shape, dtype.type)


def _actions(spec: Any, name: str) -> spaces.Space:
    if hasattr(spec, "num_values"):
        return spaces.Discrete(int(spec.num_values))
    if not hasattr(spec, "minimum"):
        raise ValueError(f"{name}.action_spec() is {spec!r}; only bounded arrays and discrete ones are understood")
    high = np.where(_bounded(spec), 1.0, np.inf).astype(np.float32)
    return spaces.Box(-high, high, dtype=np.float32)


def _bounded(spec: Any) -> np.ndarray:
    return np.broadcast_to(np.isfinite(spec.minimum) & np.isfinite(spec.maximum), spec.shape)


def _scales(spec: Any) -> tuple[np.ndarray, np.ndarray]:
    """Half of the range of each action, and its middle; 1 and 0 where there are no bounds."""
    bounded = _bounded(spec)
    low, high = np.where(bounded, spec.minimum, -1.0), np.where(bounded, spec.maximum, 1.0)
    return (high - low) / 2, (high + low) / 2
