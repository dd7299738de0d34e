"""Environments of gymnasium, stepped one after the other in this process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from tutti.rl.adapt import checked, layout, snapshot
from tutti.rl.core.vector import Moved, VectorEnv


class Gymnasium(VectorEnv):
    """n environments of gymnasium.

        env = Gymnasium("CartPole-v1", 8)
        obs = env.reset(seed=0)  # float32 (8, 4)

    env: an id of gymnasium's registry, or a function that returns a `gymnasium.Env`. kwargs: arguments of
        `gymnasium.make`, for an id. The environments must not share state.
    check: whether each observation is compared with its space. Shapes, dtypes and rewards always are.

    Observations keep the dtype of their space; `tutti.rl.adapt.layout` says how those of Dict and Tuple spaces are laid
    out, and that values of Discrete spaces begin at 0. Actions for Dict and Tuple spaces are dicts of arrays.

    infos: info of the last step of each instance, or of the reset after it. ended: infos of the steps in which an
    episode ended, by instance; wrappers such as `RecordEpisodeStatistics` report there.

    Masks are `info["action_mask"]` of the last step or reset, or what a method `action_masks()` of the environment
    returns. `draw` needs `render_mode="rgb_array"`.
    """

    def __init__(self, env: str | Callable[[], gymnasium.Env], n: int, *, check: bool = False, **kwargs: Any):
        if n < 1:
            raise ValueError(f"n is {n}; a vector of environments has at least 1 instance")
        if isinstance(env, str):
            kwargs.setdefault("disable_env_checker", True)
            self.envs = [gymnasium.make(env, **kwargs) for _ in range(n)]
        elif kwargs:
            raise ValueError(
                f"{sorted(kwargs)} are for gymnasium.make; pass them to the function that makes environments"
            )
        else:
            self.envs = [env() for _ in range(n)]
        if len({id(e) for e in self.envs}) < n:
            raise ValueError(f"{env} returned the same environment twice; it has to make a new one in each call")
        first = self.envs[0]
        self.name = env if isinstance(env, str) else first.spec.id if first.spec else type(first.unwrapped).__name__
        self.n, self.check, self.steps = n, check, 0
        self.spaces = first.observation_space, first.action_space  # as the environments have them
        self.observation_space = layout.plain(first.observation_space, f"{self.name}.observation_space")
        self.action_space = layout.plain(first.action_space, f"{self.name}.action_space")
        self.starts = layout.starts(self.spaces[0]), layout.starts(self.spaces[1])
        self.limit = first.spec.max_episode_steps if first.spec else None
        self.threshold = first.spec.reward_threshold if first.spec else None
        self.infos: list[dict[str, Any]] = [{} for _ in range(n)]
        self.ended: dict[int, dict[str, Any]] = {}

    def reset(self, seed: int | None = None) -> layout.Batch:
        self.steps = 0
        return self._gather([self._begin(i, None if seed is None else seed + i) for i in range(self.n)])

    def step(self, action: Any) -> Moved:
        values = layout.scatter(self.spaces[1], action, self.n)
        self.steps += 1
        reward: list[Any] = [0.0] * self.n
        terminated, truncated = [False] * self.n, [False] * self.n
        last, first, self.ended, masks = [], [], {}, {}
        for i, (env, value) in enumerate(zip(self.envs, values, strict=True)):
            try:
                moved = checked.stepped(self.name, i, env, value)
                obs, reward[i], terminated[i], truncated[i], self.infos[i] = moved
            except checked.Unfit:
                raise
            except Exception as error:
                raise checked.StepError(self.name, i, self.steps, value, checked.words(error)) from error
            terminated[i], truncated[i] = bool(terminated[i]), bool(truncated[i])
            if terminated[i] or truncated[i]:
                obs = copy.deepcopy(obs)  # the environment may write the next one to the same array
                self.ended[i] = self.infos[i]
                masks[i] = self._mask(i)
                first.append((i, self._begin(i)))
            last.append(obs)
        rewards = checked.rewards(self.name, reward, self.steps)
        before = after = self._gather(last)
        if first:
            for i, obs in first:
                last[i] = obs
            after = self._gather(last)
        return Moved(after, rewards, np.array(terminated, bool), np.array(truncated, bool), before,
                     self._last(masks, truncated))  # fmt: skip

    def masks(self) -> np.ndarray | None:
        all_masks = [self._mask(i) for i in range(self.n)]
        unlike = [i for i, mask in enumerate(all_masks) if (mask is None) != (all_masks[0] is None)]
        if unlike:
            has, lacks = (0, unlike[0]) if all_masks[0] is not None else (unlike[0], 0)
            raise ValueError(f"{self.name}: instance {lacks} has no info['action_mask'], unlike instance {has}")
        if isinstance(self.action_space, spaces.Discrete):
            for i, mask in enumerate(all_masks):
                if mask is not None and mask.shape != (self.action_space.n,):
                    raise ValueError(f"{self.name}: the mask of instance {i} has the shape {mask.shape}, and there are "
                                     f"{self.action_space.n} actions")  # fmt: skip
        return None if all_masks[0] is None else np.stack([x for x in all_masks if x is not None])

    def _mask(self, i: int) -> Any:
        """The mask of an instance, or None."""
        own: Any = self.envs[i].unwrapped
        if "action_mask" in self.infos[i]:
            return np.array(self.infos[i]["action_mask"], bool)
        return np.array(own.action_masks(), bool) if hasattr(own, "action_masks") else None

    def _last(self, ended: dict[int, Any], truncated: list[bool]) -> np.ndarray | None:
        """Masks of the last observations. ended: those of instances whose episode ended."""
        now = self.masks() if ended else None
        if now is None:
            return None
        for i, mask in ended.items():
            if mask is None and truncated[i]:
                raise ValueError(f"{self.name}: the step that ended the episode of instance {i} has no "
                                 "info['action_mask'], unlike the reset after it")  # fmt: skip
            now[i] = True if mask is None else mask
        return now

    def draw(self, i: int = 0) -> np.ndarray | None:
        return np.asarray(self.envs[i].render()) if self.envs[i].render_mode == "rgb_array" else None

    def state(self) -> dict[str, Any]:
        """Attributes of all environments, with their random generators (see `tutti.rl.adapt.snapshot`)."""
        infos = [{"action_mask": info["action_mask"]} if "action_mask" in info else {} for info in self.infos]
        return {"envs": [snapshot.save(e) for e in self.envs], "infos": infos, "steps": self.steps, "obs": self.obs}

    def restore(self, state: dict[str, Any]) -> layout.Batch:
        if len(state["envs"]) != self.n:
            raise ValueError(f"the state is of {len(state['envs'])} instances of {self.name}, not of {self.n}")
        for env, saved in zip(self.envs, state["envs"], strict=True):
            snapshot.load(env, saved)
        self.infos, self.steps, self.obs = copy.deepcopy((state["infos"], state["steps"], state["obs"]))
        return self.obs

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def _begin(self, i: int, seed: int | None = None) -> Any:
        try:
            obs, self.infos[i] = checked.begun(self.name, i, self.envs[i], seed)
        except checked.Unfit:
            raise
        except Exception as error:
            raise checked.StepError(self.name, i, self.steps, None, checked.words(error)) from error
        return obs

    def _gather(self, values: list[Any]) -> layout.Batch:
        self.obs = checked.observations(self.name, self.spaces[0], values, self.steps, self.check)
        return self.obs
