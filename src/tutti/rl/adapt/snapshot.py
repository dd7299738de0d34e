"""Snapshots of environments of gymnasium or PettingZoo: their attributes, those of their wrappers, and MuJoCo's data,
in the format of `tutti.rl.core.plain`.

What belongs to the process and not to the episode is not saved, and is left as it is in the environment that the
snapshot is loaded into: spaces, functions, models, windows and renderers.
"""

# mujoco is an extension module without stubs.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import json
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from tutti.rl.core import plain

STAY_MODULES = ("pygame", "mujoco", "glfw", "OpenGL", "gymnasium.envs.mujoco.mujoco_rendering")


def save(env: Any) -> dict[str, Any]:
    """A snapshot of an environment: {"words": JSON, "arrays": uint8 arrays by name}. Raises NotImplementedError where
    it holds what is not data."""
    try:
        words, arrays = plain.pack(([_save_data(x) for x in _mujoco_data(env)], env), _stays)
    except (plain.Unstorable, RecursionError) as error:
        raise NotImplementedError(
            f"{env} cannot save its state: {error}. Keep what is not data out of the environment's attributes"
        ) from error
    return {"words": json.dumps(words), "arrays": arrays}


def load(env: Any, snapshot: dict[str, Any]) -> None:
    """Make an environment what the one was that `save` was called with. Both are made by the same call.

    Raises ValueError for a snapshot that is damaged, or of another environment.
    """
    if not isinstance(snapshot, dict) or not isinstance(snapshot.get("words"), str):
        raise ValueError(f"the state of {env} is damaged: it is not a snapshot")
    data, loaded = plain.unpack(json.loads(snapshot["words"]), snapshot["arrays"], (None, env))
    if loaded is not env:
        raise ValueError(f"the state is of another environment than {env}")
    for x, saved in zip(_mujoco_data(env), data, strict=True):
        _load_data(x, saved)


def layers(env: Any) -> list[Any]:
    """An environment's wrappers, outermost first, and itself. PettingZoo's conversions hold theirs as `aec_env`."""
    chain = [env]
    while True:
        inner = vars(chain[-1]).get("env", vars(chain[-1]).get("aec_env"))
        if not hasattr(inner, "step") or any(inner is layer for layer in chain):
            return chain
        chain.append(inner)


def _stays(x: Any) -> bool:
    module = type(x).__module__
    return isinstance(x, spaces.Space | EnvSpec) or any(f"{module}.".startswith(f"{m}.") for m in STAY_MODULES)


def _mujoco_data(env: Any) -> list[Any]:
    """The MjData that an environment holds, of which there is at most one in gymnasium's own."""
    values = vars(layers(env)[-1]).values()
    return [x for x in values if type(x).__module__.startswith("mujoco.") and type(x).__name__ == "MjData"]


def _save_data(data: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """MuJoCo's state, and all quantities derived from it: environments read those of the step before."""
    import mujoco

    full = mujoco.mjtState.mjSTATE_INTEGRATION
    state = np.empty(mujoco.mj_stateSize(data.model, full))
    mujoco.mj_getState(data.model, data, state, full)
    return state, {name: np.array(getattr(data, name)) for name in _fields(data)}


def _load_data(data: Any, saved: tuple[np.ndarray, dict[str, np.ndarray]]) -> None:
    import mujoco

    state, fields = saved
    mujoco.mj_setState(data.model, data, state, mujoco.mjtState.mjSTATE_INTEGRATION)
    for name in _fields(data):
        getattr(data, name)[...] = fields[name]


def _fields(data: Any) -> list[str]:
    """Names of the arrays of fixed size; those of contacts and constraints are made anew in each step."""
    import mujoco

    names = [n for n in dir(data) if not n.startswith("_")]
    fresh = mujoco.MjData(data.model)
    return [n for n in names if isinstance(x := getattr(fresh, n), np.ndarray) and x.size and x.flags.writeable]
