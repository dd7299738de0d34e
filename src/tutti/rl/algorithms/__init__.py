"""Algorithms, one in each file."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tutti.rl.core.agent import Agent

# Name -> its module in this package, imported on first use.
ALGORITHMS = {
    "A2C": "a2c",
    "AWAC": "awac",
    "AlphaZero": "alphazero",
    "BC": "bc",
    "C51": "c51",
    "COMA": "coma",
    "CQL": "cql",
    "CrossQ": "crossq",
    "DAgger": "dagger",
    "DDPG": "ddpg",
    "DQN": "dqn",
    "DT": "dt",
    "DiscreteCQL": "discrete_cql",
    "DoubleDQN": "double_dqn",
    "Dreamer": "dreamer",
    "DuelingDQN": "dueling_dqn",
    "GAIL": "gail",
    "IMPALA": "impala",
    "IPPO": "ippo",
    "IQL": "iql",
    "MADDPG": "maddpg",
    "MAPPO": "mappo",
    "MBPO": "mbpo",
    "PPO": "ppo",
    "PrioritizedDQN": "prioritized_dqn",
    "QMIX": "qmix",
    "QRDQN": "qr_dqn",
    "R2D2": "r2d2",
    "REINFORCE": "reinforce",
    "RND": "rnd",
    "Rainbow": "rainbow",
    "RecurrentPPO": "recurrent_ppo",
    "SAC": "sac",
    "TD3": "td3",
    "TD3BC": "td3_bc",
    "TQC": "tqc",
    "TRPO": "trpo",
    "VDN": "vdn",
}


def algorithm(name: str) -> type[Agent]:
    """An algorithm's class by name, in any case. Raises ValueError with near names."""
    names = {key.lower(): key for key in ALGORITHMS}
    class_name = names.get(name.lower())
    if class_name is None:
        near = get_close_matches(name.lower(), names, 1)
        raise ValueError(f"there is no algorithm {name!r}{f'; did you mean {names[near[0]]}?' if near else '.'} "
                         f"There are {', '.join(ALGORITHMS)}")  # fmt: skip
    return getattr(import_module(f"tutti.rl.algorithms.{ALGORITHMS[class_name]}"), class_name)


def __getattr__(name: str) -> Any:
    if name not in ALGORITHMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return algorithm(name)
