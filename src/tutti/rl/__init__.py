"""Reinforcement learning: environments, replay and algorithms as pure functions, compiled together.

from tutti.rl import PPO

agent = PPO("CartPole-v1").learn(100_000)
print(agent.evaluate(20))
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tutti.extras import extra
from tutti.rl.algorithms import ALGORITHMS, algorithm

NAMES = {
    "Agent": "core.agent",
    "CheckpointCallback": "core.callbacks",
    "Curve": "core.callbacks",
    "Env": "core.env",
    "EvalCallback": "core.callbacks",
    "Placed": "placement.placement",
    "Population": "population",
    "StopOnReturn": "core.callbacks",
    "TensorBoard": "core.callbacks",
    "VectorEnv": "core.vector",
    "make": "by_name",
    "preset": "presets",
}


__all__ = list(NAMES | ALGORITHMS)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    with extra("rl"):
        if name in ALGORITHMS:
            return algorithm(name)
        if name == "adapt":
            return import_module("tutti.rl.adapt")
        if name in NAMES:
            return getattr(import_module(f"tutti.rl.{NAMES[name]}"), name)
    from tutti.rl.sb3 import ABSENT

    if name in ABSENT:  # `from tutti.rl import name` would replace the text of an AttributeError
        raise ImportError(f"tutti.rl has no {name!r}; here it is {ABSENT[name].replace('`', '')}")
    raise AttributeError(f"module 'tutti.rl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *NAMES, *ALGORITHMS, "adapt"})
