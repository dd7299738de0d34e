"""One function for all adapters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv as GymnasiumVectorEnv

from tutti.rl.core.vector import VectorEnv


def make(env: Any, n: int = 1, processes: int = 0, **kwargs: Any) -> VectorEnv:
    """n instances of an environment, with the adapter that fits.

    env:
        "CartPole-v1", "module:Env-v0"   an id of gymnasium; its MuJoCo tasks are made by `MuJoCo`, which is faster
        "gymnasium:Ant-v5"               the same, always made by `Gymnasium`
        "native:CartPole-v1"             an id of gymnasium with a vector environment of its own
        "envpool:Pong-v5"                an id of EnvPool
        "dm_control:walker-walk"         a domain and a task of dm_control's suite
        a function without arguments     returns a gymnasium.Env or an environment of PettingZoo
        a gymnasium.Env                  with n = 1, as an environment of PettingZoo
        a gymnasium vector environment   whose `num_envs` is n
    processes: worker processes to spread the instances over; 0 steps them in this process.
    kwargs: arguments of the adapter, see its class.

    Adapters: `Gymnasium`, `MuJoCo`, `Native`, `PettingZoo`, `EnvPool`, `DmControl`, and `Workers` with processes.
    """
    if isinstance(env, VectorEnv):
        raise ValueError(f"{env.name} is a VectorEnv already")
    if processes:
        from tutti.rl.adapt.processes.workers import Workers

        if not isinstance(env, str) and not _is_factory(env):
            raise ValueError(f"{env} is in this process; for worker processes give its id or a function that makes it")
        of_workers = {key: kwargs.pop(key) for key in ("timeout", "start") if key in kwargs}
        return Workers(partial(_in_worker, env, kwargs), n, processes, **of_workers)
    if isinstance(env, str):
        return _named(env, n, kwargs)
    if isinstance(env, GymnasiumVectorEnv):
        from tutti.rl.adapt.native import Native

        if env.num_envs != n:
            raise ValueError(f"{env} has {env.num_envs} instances, not {n}")
        return Native(env, **kwargs)
    if isinstance(env, gymnasium.Env):
        from tutti.rl.adapt.gymnasium import Gymnasium

        if n != 1:
            raise ValueError(f"{env} is one environment; for {n} of them give its id or a function that makes it")
        return Gymnasium(lambda: env, 1, **kwargs)
    if of_pettingzoo(env):
        if n != 1:
            raise ValueError(f"{env} is one environment; for {n} of them give a function that makes it")
        return _adapt(lambda: env, 1, kwargs)
    if _is_factory(env):
        return _adapt(env, n, kwargs)
    raise ValueError(f"{env!r} is not an id, a function that makes environments, or an environment of gymnasium")


def _named(name: str, n: int, kwargs: dict[str, Any]) -> VectorEnv:
    prefix, _, env_id = name.partition(":")
    if prefix == "envpool":
        from tutti.rl.adapt.envpool import EnvPool

        return EnvPool(env_id, n, **kwargs)
    if prefix == "dm_control":
        from tutti.rl.adapt.dm_control import DmControl

        return DmControl(env_id, n, **kwargs)
    if prefix == "native":
        from tutti.rl.adapt.native import Native

        return Native(env_id, n, **kwargs)
    if prefix != "gymnasium":
        from tutti.rl.adapt.tasks import TASKS

        if name in TASKS:
            from tutti.rl.adapt.mujoco import MuJoCo

            return MuJoCo(name, n, **kwargs)
    from tutti.rl.adapt.gymnasium import Gymnasium

    return Gymnasium(env_id if prefix == "gymnasium" else name, n, **kwargs)


def _adapt(factory: Callable[[], Any], n: int, kwargs: dict[str, Any]) -> VectorEnv:
    first = [factory()]  # says which adapter fits, and is the first instance

    def following() -> Any:
        return first.pop() if first else factory()

    env = first[0]
    if isinstance(env, gymnasium.Env):
        from tutti.rl.adapt.gymnasium import Gymnasium

        return Gymnasium(following, n, **kwargs)
    if hasattr(env, "possible_agents"):
        from tutti.rl.adapt.pettingzoo import PettingZoo

        return PettingZoo(following, n, **kwargs)
    if hasattr(env, "action_spec"):
        raise ValueError(f"{env!r} has dm_env's interface; use tutti.rl.adapt.dm_control.DmControl, which gives seeds")
    raise ValueError(f"the function returned {env!r}, not an environment of gymnasium or PettingZoo")


def of_pettingzoo(env: Any) -> bool:
    """Whether an object is an environment of PettingZoo."""
    return hasattr(env, "possible_agents") and hasattr(env, "step") and not isinstance(env, type)


def _in_worker(env: Any, kwargs: dict[str, Any], n: int) -> VectorEnv:
    from tutti.rl.adapt.tasks import TASKS

    return make(env, n, **({"threads": 1} if isinstance(env, str) and env in TASKS else {}) | kwargs)


def _is_factory(env: Any) -> bool:
    return callable(env) and not isinstance(env, gymnasium.Env | GymnasiumVectorEnv)
