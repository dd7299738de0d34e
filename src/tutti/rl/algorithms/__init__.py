"""Algorithms, one in each file."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tutti.rl.core.agent import Agent

# Name -> its module in this package, imported on first use.
ALGORITHMS = {
    "A2C": "policy_gradient.a2c",
    "AWAC": "offline.awac",
    "AlphaZero": "model_based.alphazero",
    "BC": "imitation.bc",
    "C51": "value.c51",
    "COMA": "multi_agent.coma",
    "CQL": "offline.cql",
    "CrossQ": "continuous.crossq",
    "DAgger": "imitation.dagger",
    "DDPG": "continuous.ddpg",
    "DQN": "value.dqn",
    "DT": "offline.dt",
    "DiscreteCQL": "offline.discrete_cql",
    "DoubleDQN": "value.double_dqn",
    "Dreamer": "model_based.dreamer",
    "DuelingDQN": "value.dueling_dqn",
    "GAIL": "imitation.gail",
    "IMPALA": "policy_gradient.impala",
    "IPPO": "multi_agent.ippo",
    "IQL": "offline.iql",
    "MADDPG": "multi_agent.maddpg",
    "MAPPO": "multi_agent.mappo",
    "MBPO": "model_based.mbpo",
    "PPO": "policy_gradient.ppo",
    "PrioritizedDQN": "value.prioritized_dqn",
    "QMIX": "multi_agent.qmix",
    "QRDQN": "value.qr_dqn",
    "R2D2": "value.r2d2",
    "REINFORCE": "policy_gradient.reinforce",
    "RND": "policy_gradient.rnd",
    "Rainbow": "value.rainbow",
    "RecurrentPPO": "policy_gradient.recurrent_ppo",
    "SAC": "continuous.sac",
    "TD3": "continuous.td3",
    "TD3BC": "offline.td3_bc",
    "TQC": "continuous.tqc",
    "TRPO": "policy_gradient.trpo",
    "VDN": "multi_agent.vdn",
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
