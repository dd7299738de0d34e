"""A worker process, which steps some of the instances on request.

A message is (command, argument), its answer ("done", result). Observations, rewards and actions are in shared memory. A
worker whose environment raises answers ("failed", error, traceback), one whose environment returned what is no reward
or observation ("unfit", error), and ends. What an environment does not implement is answered with ("cannot", words).
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np

from tutti.rl.adapt import layout
from tutti.rl.adapt.checked import StepError
from tutti.rl.adapt.processes.shared import Path, Shapes, Shared
from tutti.rl.core.vector import VectorEnv


@dataclass(frozen=True)
class About:
    """Description of an environment for the parent: its attributes, and the shapes of one instance's arrays."""

    attributes: dict[str, Any]
    shapes: Shapes


def serve(connection: Connection, factory: bytes, n: int, first: int) -> None:
    """Make an environment of n instances, of which the first has the number `first` for the parent, and obey."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    try:
        env = cloudpickle.loads(factory)(n)
        connection.send(("done", describe(env, n)))
        shapes, name = connection.recv()
        shared = Shared(shapes, name)
        mine = {path: x[first : first + n] for path, x in shared.arrays.items()}
        while True:
            command, argument = connection.recv()
            if command == "close":
                env.close()
                return
            try:
                answer = "done", COMMANDS[command](env, mine, argument)
            except NotImplementedError as error:
                answer = "cannot", str(error)
            connection.send(answer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent has ended
    except ValueError as error:
        connection.send(("unfit", error))
    except Exception as error:
        if isinstance(error, StepError):
            error.instance += first
        connection.send(("failed", f"{type(error).__name__}: {error}", traceback.format_exc()))


def describe(env: VectorEnv, n: int) -> About:
    if not isinstance(env, VectorEnv) or env.n != n:
        raise ValueError(f"the factory was asked for a VectorEnv of {n} instances and returned {env!r}")
    names = ("name", "observation_space", "action_space", "agents", "limit", "threshold", "starts", "gaps")
    obs, arrays = env.reset(), {}
    for path, x in layout.leaves(obs).items():
        arrays[("obs", *path)] = arrays[("last", *path)] = x
    agents = (len(env.agents),) if len(env.agents) > 1 else ()
    for path, x in layout.leaves(layout.zeros(env.action_space, n, *agents)).items():
        arrays[("action", *path)] = x
    arrays[("reward",)] = np.zeros((n, *agents), np.float32)
    arrays[("terminated",)] = arrays[("truncated",)] = np.zeros(n, bool)
    if env.gaps:
        for name in PARTS if agents else PARTS[:1]:
            arrays[(name,)] = np.ones((n, *agents), bool)
    for name, x in (("masks", env.masks()), ("overview", env.overview())):
        if x is not None:
            arrays[(name,)] = arrays[(f"last_{name}",)] = x
    shapes: Shapes = {path: (x.shape[1:], x.dtype.str) for path, x in arrays.items()}
    return About({name: getattr(env, name) for name in names}, shapes)


Arrays = dict[Path, np.ndarray]
PARTS = ("valid", "agent_terminated", "agent_truncated")  # which rows are steps, and which agents end


def write(mine: Arrays, name: str, batch: layout.Batch) -> None:
    for path, x in layout.leaves(batch).items():
        mine[(name, *path)][...] = x


def look(env: VectorEnv, mine: Arrays, obs: layout.Batch) -> None:
    write(mine, "obs", obs)
    if ("masks",) in mine:
        write(mine, "masks", env.masks())
    if ("overview",) in mine:
        write(mine, "overview", env.overview())


def reset(env: VectorEnv, mine: Arrays, seed: int | None) -> None:
    look(env, mine, env.reset(seed))


def step(env: VectorEnv, mine: Arrays, argument: None) -> bool:
    """Whether an episode ended: only then the last observations, with their masks and overview, are written."""
    action = layout.tree({path[1:]: x.copy() for path, x in mine.items() if path[0] == "action"})
    moved = env.step(action)
    look(env, mine, moved.obs)
    for name in ("reward", "terminated", "truncated"):
        mine[(name,)][...] = getattr(moved, name)
    for name in PARTS:
        if (name,) in mine:
            mine[(name,)][...] = getattr(moved, name)
    ended = bool((moved.terminated | moved.truncated).any())
    if ended:
        write(mine, "last", moved.last)
        for name in ("last_masks", "last_overview"):
            if (name,) in mine:
                write(mine, name, getattr(moved, name))
    return ended


def restore(env: VectorEnv, mine: Arrays, state: Any) -> None:
    look(env, mine, env.restore(state))


COMMANDS: dict[str, Callable[[VectorEnv, Arrays, Any], Any]] = {
    "reset": reset,
    "step": step,
    "restore": restore,
    "state": lambda env, mine, argument: env.state(),
    "draw": lambda env, mine, i: env.draw(i),
}
