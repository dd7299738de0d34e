"""Vector environments of gymnasium: those that step all instances in one call of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from tutti.rl.adapt import checked, layout, snapshot
from tutti.rl.core.vector import Moved, VectorEnv


def _begin_cartpole(env: Any, done: np.ndarray) -> np.ndarray:
    env.state[:, done] = env.np_random.uniform(env.low, env.high, (4, int(done.sum())))
    env.steps[done] = 0
    env.prev_done[done] = False
    return env.state.T.astype(np.float32)


def _begin_masked(env: Any, done: np.ndarray) -> Any:
    return env.reset(options={"reset_mask": done.copy()})[0]


# How to begin episodes of environments that would only do so in the next step: (environment, done) -> observations of
# all instances.
BEGIN: dict[str, Callable[[Any, np.ndarray], Any]] = {
    "CartPoleVectorEnv": _begin_cartpole,
    "SyncVectorEnv": _begin_masked,
    "AsyncVectorEnv": _begin_masked,
}


class Native(VectorEnv):
    """n instances of an environment whose registration has a `vector_entry_point`, such as CartPole-v1.

        env = Native("CartPole-v1", 1024)

    env: an id, or a `gymnasium.vector.VectorEnv`, whose `num_envs` is then n. kwargs: arguments of
    `gymnasium.make_vec`.

    New episodes begin in the step in which one ends, whatever the autoreset mode: with SAME_STEP the environment does
    it, with DISABLED a `reset_mask` is given to it, and with NEXT_STEP what `BEGIN` has for its class. Other classes of
    NEXT_STEP spend a step on each reset, whose action they ignore: that row is not `valid`, and nothing is learned from
    it. The seed of `reset` is given to the environment as it is: unlike elsewhere, instance i does not begin with
    seed + i.
    """

    def __init__(self, env: str | gymnasium.vector.VectorEnv, n: int = 1, **kwargs: Any):
        if isinstance(env, str):
            if gymnasium.spec(env).vector_entry_point is None:
                raise ValueError(f"{env} has no vector_entry_point; use tutti.rl.adapt.gymnasium.Gymnasium")
            env = gymnasium.make_vec(env, n, vectorization_mode="vector_entry_point", **kwargs)
        self.env, self.n, self.steps = env, env.num_envs, 0
        spec, kind = env.spec, type(env.unwrapped).__name__
        self.name = spec.id if spec else kind
        self.mode = env.metadata.get("autoreset_mode")
        self.begin = BEGIN.get(kind)
        self.gaps = self.mode not in (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED) and self.begin is None
        self.resetting = np.zeros(self.n, bool)  # the next step is spent on a reset
        self.spaces = env.single_observation_space, env.single_action_space
        self.observation_space = layout.plain(self.spaces[0], f"{self.name}.observation_space")
        self.action_space = layout.plain(self.spaces[1], f"{self.name}.action_space")
        self.starts = layout.starts(self.spaces[0]), layout.starts(self.spaces[1])
        self.limit = spec.max_episode_steps if spec else None
        self.threshold = spec.reward_threshold if spec else None

    def reset(self, seed: int | None = None) -> layout.Batch:
        self.steps, self.resetting = 0, np.zeros(self.n, bool)
        self.obs = self._arrange(self.env.reset(seed=seed)[0])
        return self.obs

    def step(self, action: Any) -> Moved:
        action = layout.restore(self.spaces[1], action, self.n)
        self.steps += 1
        obs, reward, terminated, truncated, info = self.env.step(action)
        rewards = checked.rewards(self.name, reward, self.steps)
        terminated, truncated = (np.array(x, bool).reshape(self.n) for x in (terminated, truncated))
        valid = ~self.resetting if self.gaps else None
        before = after = self._arrange(obs)
        done = terminated | truncated
        if self.gaps:
            self.resetting = done
        elif done.any():
            if self.mode == AutoresetMode.SAME_STEP:
                before = layout.put(before, done, layout.gather(self.spaces[0], list(info["final_obs"][done])))
            elif self.begin is not None:
                after = self._arrange(self.begin(self._stepped(), done))
            else:
                after = self._arrange(self.env.reset(options={"reset_mask": done})[0])
        self.obs = after
        return Moved(after, rewards, terminated, truncated, before, valid=valid)

    def _stepped(self) -> Any:
        """The environment that begins episodes: the wrapped one, since wrappers may change observations; for CartPole
        the innermost one, because its row of `BEGIN` writes into it."""
        return self.env.unwrapped if self.begin is _begin_cartpole else self.env

    def draw(self, i: int = 0) -> np.ndarray | None:
        pictures = self.env.render() if self.env.render_mode == "rgb_array" else None
        return None if pictures is None else np.asarray(pictures[i])

    def state(self) -> dict[str, Any]:
        """Attributes of the environment, with its random generators (see `tutti.rl.adapt.snapshot`)."""
        return {"env": snapshot.save(self.env), "obs": copy.deepcopy(self.obs), "steps": self.steps,
                "resetting": self.resetting.copy()}  # fmt: skip

    def restore(self, state: dict[str, Any]) -> layout.Batch:
        snapshot.load(self.env, state["env"])
        self.obs, self.steps = copy.deepcopy(state["obs"]), state["steps"]
        self.resetting = state["resetting"].copy()
        return self.obs

    def close(self) -> None:
        self.env.close()

    def _arrange(self, obs: Any) -> layout.Batch:
        own = copy.deepcopy(obs)  # it may be a buffer that the environment writes again
        return checked.batch(self.name, self.spaces[0], own, self.steps)
