"""gymnasium's MuJoCo tasks, with one model for all instances, in several threads, and all but the physics vectorised.

Each instance has an mjData of its own. `mujoco.rollout`, which steps a batch in one call, would be as fast, but returns
neither the solver's warm start, without which the next step is not equal to gymnasium's, nor contact forces.
"""

# mujoco is an extension module without stubs.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import copy
import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import gymnasium
import mujoco
import numpy as np
from gymnasium.utils import seeding

from tutti.rl.adapt import checked, layout
from tutti.rl.adapt.tasks import TASKS
from tutti.rl.core.vector import Moved, VectorEnv

STATE = mujoco.mjtState.mjSTATE_INTEGRATION
COMMON = ("xml_file", "frame_skip", "max_episode_steps")  # parameters of all tasks


class MuJoCo(VectorEnv):
    """n instances of a task of `tutti.rl.adapt.tasks.TASKS`.

        env = MuJoCo("HalfCheetah-v5", 64, threads=2)

    Equal seeds give the episodes of `gymnasium.make(id)`, equal to the bit. threads: number of threads that step
    physics, by default one for each CPU core that this process may use. kwargs: arguments of gymnasium's task, for
    example `ctrl_cost_weight=0`; `render_mode="rgb_array"` for `draw`.
    """

    def __init__(self, id: str, n: int, *, threads: int | None = None, **kwargs: Any):
        if id not in TASKS:
            raise ValueError(f"{id!r} is not one of {sorted(TASKS)}; use tutti.rl.adapt.gymnasium.Gymnasium")
        if n < 1 or (threads is not None and threads < 1):
            raise ValueError(f"n is {n} and threads {threads}; both are at least 1")
        task = TASKS[id]
        unknown = kwargs.keys() - task.parameters.keys() - {*COMMON, "render_mode", "width", "height"}
        if unknown:
            raise ValueError(f"{id} has no parameter {sorted(unknown)}; it has {sorted((*task.parameters, *COMMON))}")
        self.name, self.n, self.task, self.steps = id, n, task, 0
        self.one = gymnasium.make(id, disable_env_checker=True, **kwargs)  # model, spaces and pictures
        own: Any = self.one.unwrapped
        assert self.one.spec is not None
        self.observation_space, self.action_space = self.one.observation_space, self.one.action_space
        self.limit, self.threshold = self.one.spec.max_episode_steps, self.one.spec.reward_threshold
        self.model, self.skip = own.model, own.frame_skip
        weights = task.parameters | {k: v for k, v in kwargs.items() if k in task.parameters}
        starts = {"qpos": own.init_qpos.copy(), "qvel": own.init_qvel.copy()}
        self.constants = SimpleNamespace(**weights, **task.fixed, **starts, model=own.model, dt=own.dt)
        self.data = [mujoco.MjData(self.model) for _ in range(n)]
        self.controls = [data.ctrl for data in self.data]
        sources = [[getattr(data, name) for name in task.reads] for data in self.data]
        self.q = SimpleNamespace(
            **{name: np.zeros((n, *x.shape), x.dtype) for name, x in zip(task.reads, sources[0], strict=True)}
        )
        batches = [getattr(self.q, name) for name in task.reads]
        # (row of a batch, the array in mjData that it is copied from) of each instance
        self.copies = [[(batch[i], x) for batch, x in zip(batches, sources[i], strict=True)] for i in range(n)]
        self.t, self.rngs = np.zeros(n, np.int64), [np.random.default_rng() for _ in range(n)]
        self.place: Any = 0.0
        threads = min(n, threads or _cores())
        self.shares = [self.data[k * n // threads : (k + 1) * n // threads] for k in range(threads)]
        self.pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def reset(self, seed: int | None = None) -> np.ndarray:
        self.steps = 0
        if seed is not None:
            self.rngs = [seeding.np_random(seed + i)[0] for i in range(self.n)]
        for i in range(self.n):
            self._begin(i)
        return self._look()

    def step(self, action: np.ndarray) -> Moved:
        action = layout.restore(self.action_space, action, self.n)
        self.steps += 1
        for control, x in zip(self.controls, action, strict=True):
            control[:] = x
        if self.pool is None:
            self._advance(self.data)
        else:
            list(self.pool.map(self._advance, self.shares))
        for pairs in self.copies:
            for row, source in pairs:
                row[...] = source
        before, self.t = self.place, self.t + 1
        last = self._look()
        moved = self.place - before if self.task.place else None
        reward, terminated = self.task.judge(self.q, moved, action, self.constants)
        rewards = checked.rewards(self.name, reward, self.steps)
        truncated = self.t >= self.limit if self.limit else np.zeros(self.n, bool)
        obs, done = last, terminated | truncated
        if done.any():
            for i in np.flatnonzero(done).tolist():
                self._begin(i)
            obs = self._look()
        return Moved(obs, rewards, terminated, truncated, last)

    def draw(self, i: int = 0) -> np.ndarray | None:
        if self.one.render_mode != "rgb_array":
            return None
        own: Any = self.one.unwrapped
        own.set_state(self.data[i].qpos, self.data[i].qvel)
        return np.asarray(own.render())

    def state(self) -> dict[str, Any]:
        states = np.empty((self.n, mujoco.mj_stateSize(self.model, STATE)))
        for data, row in zip(self.data, states, strict=True):
            mujoco.mj_getState(self.model, data, row, STATE)
        return copy.deepcopy({"data": states, "q": vars(self.q), "t": self.t, "rngs": self.rngs, "steps": self.steps})

    def restore(self, state: dict[str, Any]) -> np.ndarray:
        if len(state["data"]) != self.n:
            raise ValueError(f"the state is of {len(state['data'])} instances of {self.name}, not of {self.n}")
        for data, row in zip(self.data, state["data"], strict=True):
            mujoco.mj_setState(self.model, data, row, STATE)
        for name, value in state["q"].items():
            getattr(self.q, name)[...] = value
        self.t, self.rngs, self.steps = state["t"].copy(), copy.deepcopy(state["rngs"]), state["steps"]
        return self._look()

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown()
        self.one.close()

    def _advance(self, share: list[Any]) -> None:
        """Steps physics of some instances, without the interpreter's lock."""
        step, forces, model, skip = mujoco.mj_step, self.task.forces, self.model, self.skip
        for data in share:
            step(model, data, skip)
            if forces:
                mujoco.mj_rnePostConstraint(model, data)

    def _begin(self, i: int) -> None:
        data = self.data[i]
        mujoco.mj_resetData(self.model, data)
        data.qpos[:], data.qvel[:] = self.task.begin(self.rngs[i], self.constants)
        mujoco.mj_forward(self.model, data)
        self.t[i] = 0
        for row, source in self.copies[i]:
            row[...] = source

    def _look(self) -> np.ndarray:
        if self.task.place:
            self.place = self.task.place(self.q, self.constants)
        return self.task.observe(self.q, self.constants)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
