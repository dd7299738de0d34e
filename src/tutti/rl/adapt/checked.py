"""Checks of what environments return, with errors that say which instance failed, where, and what to do.

Rewards are always checked: one `isfinite` over all of them. Observations are checked for shape and dtype when they are
put into a batch, and with `check=True` for being finite and in their space too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from tutti.rl.adapt import layout

OLD = ("Environments of the API of gym before 0.26 are not stepped: derive it from gymnasium.Env, with reset(self, *, "
       "seed=None, options=None) that returns (observation, info), and step(self, action) that returns (observation, "
       "reward, terminated, truncated, info); shimmy.GymV21CompatibilityV0(env=env) wraps one as it is")  # fmt: skip


class StepError(RuntimeError):
    """An environment raised while it was stepped or reset.

    name: name of the environment. instance: number of the instance, from 0 on. step: steps since the last `reset` of
    all instances. action: what the environment was given, None in a reset. cause: what it raised, in words.
    """

    def __init__(self, name: str, instance: int, step: int, action: Any, cause: str):
        super().__init__(name, instance, step, action, cause)
        self.name, self.instance, self.step, self.action, self.cause = name, instance, step, action, cause

    def __str__(self) -> str:
        when = "while it was reset" if self.action is None else f"when it was given the action {self.action!r}"
        return f"{self.name}: instance {self.instance} raised {self.cause} in step {self.step}, {when}"


class Unfit(ValueError):
    """Raised if an instance returns invalid values. name: name of the environment. problem: the fault and its
    remedy."""

    def __init__(self, name: str, instance: int, problem: str):
        super().__init__(name, instance, problem)
        self.name, self.instance, self.problem = name, instance, problem

    def __str__(self) -> str:
        return f"{self.name}: instance {self.instance}{self.problem}"


def rewards(name: str, reward: Any, step: int) -> np.ndarray:
    """Rewards as float32. Raises `Unfit` where one is not finite. Dim 0 of `reward` is the instance."""
    if isinstance(reward, list):
        reward = [number(name, i, None, x) for i, x in enumerate(reward)]
    array: np.ndarray = np.asarray(reward, np.float32)
    if not np.isfinite(array).all():
        i, *agent = (int(x) for x in np.argwhere(~np.isfinite(array))[0])
        who = f", agent {agent[0]}," if agent else ""
        raise Unfit(
            name,
            i,
            f"{who} returned the reward {array[i, *agent]} in step {step}; rewards must be finite. Clip the "
            "observations and actions that it is computed from, or end the episode before they diverge",
        )
    return array


def begun(name: str, instance: int, env: gymnasium.Env, seed: int | None) -> tuple[Any, dict[str, Any]]:
    """Reset an instance. Returns (observation, info). Raises `Unfit` for an environment of gym's old API."""
    try:
        result: Any = env.reset(seed=seed)
    except TypeError as error:
        if "unexpected keyword argument 'seed'" not in str(error):
            raise
        raise Unfit(name, instance, f": its reset takes no seed. {OLD}") from error
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise Unfit(name, instance, f": its reset returned {_kind(result)}, not (observation, info). {OLD}")
    return result


def stepped(name: str, instance: int, env: gymnasium.Env, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
    """Step an instance. Returns what gymnasium's `step` returns. Raises `Unfit` for an environment of gym's old API."""
    result: Any = env.step(action)
    if not (isinstance(result, tuple) and len(result) == 5):
        raise Unfit(name, instance, f": its step returned {_kind(result)}, not (observation, reward, terminated, "
                                    f"truncated, info). {OLD}")  # fmt: skip
    return result


def _kind(x: Any) -> str:
    return f"a tuple of {len(x)}" if isinstance(x, tuple) else f"a value of the type {type(x).__name__}"


def number(name: str, instance: int, agent: Any, reward: Any) -> float:
    """A reward as a number: a scalar, or an array or tensor with one element. Raises `Unfit` for others."""
    if isinstance(reward, float | int):
        return reward
    try:
        array = np.zeros(0) if reward is None else np.asarray(reward, np.float64)
    except (TypeError, ValueError):
        array = np.zeros(0)
    if array.size != 1:
        who = "" if agent is None else f", agent {agent},"
        raise Unfit(name, instance, f"{who} returned the reward {reward!r}; rewards are numbers, or arrays with one")
    return float(array.reshape(()))


def observations(name: str, space: spaces.Space, values: Sequence[Any], step: int, check: bool = False) -> layout.Batch:
    """The batch of n observations. Raises `Unfit` for the first that does not fit its space.

    check: observations must be finite and in their space too, which takes several microseconds for each.
    """
    batch = None
    try:
        batch = layout.gather(space, values)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        cause = str(error)
    if batch is not None and not check:
        return batch
    for i, value in enumerate(values):
        wrong = layout.misfit(space, value, "observation", strict=check)
        if wrong:
            raise Unfit(
                name,
                i,
                f" returned a wrong observation in step {step}: {wrong}. Correct its observation_space or what it "
                "returns, or wrap it with gymnasium.wrappers.TransformObservation",
            )
    if batch is None:
        raise ValueError(f"{name}: the observations of step {step} do not fit together: {cause}")
    return batch


def batch(name: str, space: spaces.Space, obs: Any, step: int) -> layout.Batch:
    """The observations that a vector environment returned as a batch. Raises ValueError where they do not fit."""
    try:
        return layout.arrange(space, obs)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{name} returned wrong observations in step {step}: {error}") from error


def words(error: BaseException) -> str:
    """An exception and its location, in one line."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = f" ({frame.tb_frame.f_code.co_filename}:{frame.tb_lineno})" if frame is not None else ""
    return f"{type(error).__name__}: {error}{where}"
