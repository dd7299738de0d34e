"""Environments by name."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

import gymnasium

from tutti.rl.core.env import Env
from tutti.rl.core.vector import VectorEnv
from tutti.rl.envs import registry


def make(name: str, n: int = 1, processes: int = 0, **options: Any) -> Env | VectorEnv:
    """An environment by name: a pure one of ours if there is one, else one of gymnasium and others (`tutti.rl.adapt`).

    `gymnasium:CartPole-v1` is gymnasium's own CartPole. processes: worker processes, for environments of the host.

    Raises ValueError for a name that nobody knows.
    """
    if name in registry.ENVS and not processes:
        return registry.make(name, **options)
    if versions := [full_name for full_name in registry.ENVS if full_name.startswith(f"{name}-v")]:
        raise ValueError(f"there is no environment {name!r}; did you mean {versions[0]!r}?")
    from tutti.rl.adapt.make import make as adapted

    try:
        return adapted(name, n, processes, **options)
    except ModuleNotFoundError as error:
        module = name.removeprefix("gymnasium:").rpartition(":")[0]
        if not module:
            raise
        raise ValueError(f"{name} names the module {module}, which cannot be imported: {error}") from error
    except gymnasium.error.Error as error:
        text = str(error).partition(" Did you mean")[0].rstrip(".?")  # `_remedy` knows more names
        raise ValueError(f"{text}. {_remedy(name, error)}") from error


def _remedy(name: str, error: Exception) -> str:
    """Advice for a name that gymnasium does not have, or lacks a package for."""
    if isinstance(error, gymnasium.error.DependencyNotInstalled):
        return "`tutti rl list` shows environments that need no package"
    if name.removeprefix("gymnasium:").startswith("ALE/"):
        return f"pip install ale-py, and write ale_py:{name}"
    names = list(dict.fromkeys([*registry.ENVS, *gymnasium.registry]))
    near = " or ".join(get_close_matches(name, names, 3, 0.5))
    return f"Near are {near}" if near else "`tutti rl list` shows environments"


def adapted(env: Any) -> Env | VectorEnv:
    """An environment that was given as an object: ours as it is, those of gymnasium and PettingZoo by their adapter.

    Raises ValueError for other objects.
    """
    if isinstance(env, Env | VectorEnv):
        return env
    from tutti.rl.adapt.checked import OLD
    from tutti.rl.adapt.make import make, of_pettingzoo

    if isinstance(env, gymnasium.vector.VectorEnv):
        return make(env, env.num_envs)
    if isinstance(env, gymnasium.Env) or of_pettingzoo(env):
        return make(env, 1)
    if hasattr(env, "reset") and hasattr(env, "step") and not isinstance(env, type):
        raise ValueError(f"env is a {type(env).__name__}, which is no gymnasium.Env. {OLD}")
    raise ValueError(f"env is a {type(env).__name__}; pass a name, an environment of gymnasium or PettingZoo, a "
                     "tutti.rl.Env or a tutti.rl.VectorEnv. tutti.rl.adapt.make(function, n) makes n environments with "
                     "a function that returns one")  # fmt: skip
