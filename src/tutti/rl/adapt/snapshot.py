"""What an environment of gymnasium or PettingZoo is at one moment: its attributes, those of its wrappers, and MuJoCo's
data.

Everything is saved by value with cloudpickle, past the environments' own `__getstate__`: gymnasium's `EzPickle` would
save the arguments of the constructor only. What belongs to the process and not to the episode is saved as a reference
to the attribute that holds it, and is left as it is in the environment that the snapshot is loaded into: spaces,
functions, models, windows and renderers.
"""

# mujoco is an extension module without stubs.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import io
import pickle
import types
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

KEPT_TYPES = (gymnasium.Env, spaces.Space, EnvSpec, types.FunctionType, types.MethodType, types.ModuleType, type)
KEPT_MODULES = ("pygame", "mujoco", "glfw", "OpenGL", "gymnasium.envs.mujoco.mujoco_rendering")


def save(env: Any) -> bytes:
    """A snapshot of an environment. Raises NotImplementedError where it holds what cannot be pickled."""
    chain = layers(env)
    data = [_save_data(x) for x in _mujoco_data(chain)]
    stream = io.BytesIO()
    try:
        _Pickler(stream, chain).dump((data, [vars(layer) for layer in chain]))
    except Exception as error:
        raise NotImplementedError(
            f"{env} cannot save its state: {error}. Keep what cannot be pickled out of the environment's attributes"
        ) from error
    return stream.getvalue()


def load(env: Any, snapshot: bytes) -> None:
    """Make an environment what the one was that `save` was called with. Both are made by the same call."""
    chain = layers(env)
    data, attributes = _Unpickler(io.BytesIO(snapshot), chain).load()
    for x, saved in zip(_mujoco_data(chain), data, strict=True):
        _load_data(x, saved)
    for layer, saved in zip(chain, attributes, strict=True):
        vars(layer).clear()
        vars(layer).update(saved)


def layers(env: Any) -> list[Any]:
    """An environment's wrappers, outermost first, and itself. PettingZoo's conversions hold theirs as `aec_env`."""
    chain = [env]
    while True:
        inner = vars(chain[-1]).get("env", vars(chain[-1]).get("aec_env"))
        if not hasattr(inner, "step") or any(inner is layer for layer in chain):
            return chain
        chain.append(inner)


class _Pickler(cloudpickle.Pickler):
    def __init__(self, stream: io.BytesIO, chain: list[Any]):
        super().__init__(stream)
        self.kept: dict[int, Any] = {id(layer): (depth, None) for depth, layer in enumerate(chain)}
        for depth, layer in enumerate(chain):
            for name, value in vars(layer).items():
                module = type(value).__module__
                if isinstance(value, KEPT_TYPES) or any(f"{module}.".startswith(f"{m}.") for m in KEPT_MODULES):
                    self.kept.setdefault(id(value), (depth, name))

    def persistent_id(self, obj: Any) -> Any:
        return self.kept.get(id(obj))


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, chain: list[Any]):
        super().__init__(stream)
        self.chain = chain

    def persistent_load(self, pid: tuple[int, str | None]) -> Any:
        depth, name = pid
        return self.chain[depth] if name is None else vars(self.chain[depth]).get(name)


def _mujoco_data(chain: list[Any]) -> list[Any]:
    """The MjData that an environment holds, of which there is at most one in gymnasium's own."""
    held = vars(chain[-1]).values()
    return [x for x in held if type(x).__module__.startswith("mujoco.") and type(x).__name__ == "MjData"]


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
    for name, value in fields.items():
        getattr(data, name)[...] = value


def _fields(data: Any) -> list[str]:
    """Names of the arrays of fixed size; those of contacts and constraints are made anew in each step."""
    import mujoco

    names = [n for n in dir(data) if not n.startswith("_")]
    fresh = mujoco.MjData(data.model)
    return [n for n in names if isinstance(x := getattr(fresh, n), np.ndarray) and x.size and x.flags.writeable]
