"""Small settings of every algorithm, with which each option matters."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import Tensor

from tutti.rl.algorithms import algorithm
from tutti.rl.core import keys
from tutti.rl.core.agent import Agent
from tutti.rl.core.env import Env, State, begun_again
from tutti.rl.offline_data import episodes

ACTING: dict[str, Any] = {"hidden": (8,), "n_envs": 4, "n_steps": 8}
REPLAYED = {**ACTING, "gradient_steps": 2, "batch_size": 8, "learning_starts": 32, "buffer_size": 512, "n_step": 2}
VALUES = {**REPLAYED, "target_update_interval": 32, "exploration_fraction": 0.9}
CONTINUOUS = {**REPLAYED, "hidden": (8,)}
OFFLINE = {"hidden": (8,), "gradient_steps": 3, "batch_size": 8}
# The environment, and small options with which all others matter.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "A2C": ("CartPole-v1", ACTING),
    "AWAC": ("Pendulum-v1", {**OFFLINE, "max_weight": 1.0, "temperature": 0.5}),
    "AlphaZero": ("TicTacToe-random", {"hidden": (8,), "n_envs": 4, "n_steps": 8, "simulations": 6, "depth": 3,
                                       "random_moves": 2, "buffer_size": 64, "batch_size": 8, "gradient_steps": 2}),
    "BC": ("CartPole-v1", OFFLINE),
    "C51": ("CartPole-v1", VALUES),
    "COMA": ("simple_spread_v3", {**ACTING, "batch_size": 16, "max_grad_norm": 0.1}),
    "CQL": ("Pendulum-v1", {**OFFLINE, "n_actions": 2}),
    "CrossQ": ("Pendulum-v1", {**CONTINUOUS, "critic_hidden": (8,), "policy_delay": 2, "renorm_warmup": 2}),
    "DAgger": ("CartPole-v1", {**ACTING, "gradient_steps": 2, "batch_size": 8, "buffer_size": 512,
                               "expert_share": 0.5, "learning_starts": 32}),
    "DDPG": ("Pendulum-v1", CONTINUOUS),
    "DQN": ("CartPole-v1", VALUES),
    "DT": ("CartPole-v1", {"gradient_steps": 3, "batch_size": 8, "context": 4, "width": 8, "heads": 2, "layers": 1}),
    "DiscreteCQL": ("CartPole-v1", {**OFFLINE, "max_grad_norm": 0.1}),
    "DoubleDQN": ("CartPole-v1", VALUES),
    "Dreamer": ("CartPole-v1", {"hidden": (8,), "n_envs": 4, "n_steps": 8, "gradient_steps": 1, "batch_size": 4,
                                "length": 5, "horizon": 3, "deter": 8, "groups": 2, "classes": 3, "width": 8,
                                "learning_starts": 32, "buffer_size": 512, "max_grad_norm": 0.1}),
    "DuelingDQN": ("CartPole-v1", VALUES),
    "GAIL": ("CartPole-v1", {**ACTING, "n_epochs": 2, "batch_size": 16, "disc_hidden": (8,), "disc_steps": 2,
                             "disc_batch_size": 8, "target_kl": 1.0}),
    "IMPALA": ("CartPole-v1", {**ACTING, "rho": 0.9, "c": 0.9}),
    "IPPO": ("simple_spread_v3", {**ACTING, "n_epochs": 2, "batch_size": 16}),
    "IQL": ("Pendulum-v1", {**OFFLINE, "max_weight": 1.0}),
    "MADDPG": ("simple_spread_v3", {**REPLAYED, "n_steps": 4}),
    "MAPPO": ("simple_spread_v3", {**ACTING, "n_epochs": 2, "batch_size": 16}),
    "MBPO": ("Pendulum-v1", {**CONTINUOUS, "members": 2, "model_hidden": (8,), "model_steps": 2, "rollouts": 6,
                             "retained": 2, "model_batch_size": 8, "real_ratio": 0.5, "horizon": 2, "n_step": 1}),
    "PPO": ("CartPole-v1", {**ACTING, "n_epochs": 2, "batch_size": 16}),
    "PrioritizedDQN": ("CartPole-v1", VALUES),
    "QMIX": ("simple_spread_v3", {**VALUES, "mixing_size": 4, "hyper_size": 4}),
    "QRDQN": ("CartPole-v1", {**VALUES, "n_quantiles": 4}),
    "R2D2": ("CartPole-v1", {**VALUES, "sequence": 4, "burn_in": 2, "memory": 8}),
    "REINFORCE": ("CartPole-v1", ACTING),
    "RND": ("CartPole-v1", {**ACTING, "n_epochs": 2, "batch_size": 16, "distilled": 4, "distill_hidden": (8,)}),
    "Rainbow": ("CartPole-v1", {**VALUES, "exploration_initial_eps": 0.5}),
    "RecurrentPPO": ("CartPole-v1", {**ACTING, "n_epochs": 2, "batch_size": 16, "memory": 8}),
    "SAC": ("Pendulum-v1", CONTINUOUS),
    "TD3": ("Pendulum-v1", CONTINUOUS),
    "TD3BC": ("Pendulum-v1", OFFLINE),
    "TQC": ("Pendulum-v1", {**CONTINUOUS, "n_quantiles": 4, "drop": 1}),
    "TRPO": ("CartPole-v1", {**ACTING, "value_epochs": 2, "batch_size": 8, "cg_steps": 2, "line_steps": 2,
                               "target_kl": 3.0}),
    "VDN": ("simple_spread_v3", VALUES),
}  # fmt: skip


@lru_cache
def data(env):
    agent = algorithm("SAC" if env == "Pendulum-v1" else "PPO")(env, level="eager")
    return tuple(episodes(agent, 3, "random"))


def expert(seen):
    return (seen[..., 2] > 0).long()


def stepped(env: Env, state: State, action: Tensor, key: Tensor) -> tuple[State, Any, Tensor, Tensor, Tensor, Any]:
    """(state, observations, reward, terminated, truncated, last observations), with new episodes where one ended."""
    of_step, of_reset = keys.split(key)
    after, last, reward, terminated, truncated = env.step(state, action, of_step)
    state, obs = begun_again(env, terminated | truncated, after, last, of_reset)
    return state, obs, reward, terminated, truncated, last


def with_expert(name: str) -> dict[str, Any]:
    """What an algorithm learns from besides its environment."""
    named = algorithm(name).__init__.__annotations__
    arguments: dict[str, Any] = {"data": data(CASES[name][0])} if "data" in named else {}
    return arguments | ({"expert": expert} if "expert" in named else {})


def steps(name: str) -> int:
    """For some iterations with updates; those of offline algorithms are updates."""
    return 12 if "data" in with_expert(name) and name != "GAIL" else 160


def agent_of(name: str, env: str = "", **options: Any) -> Agent:
    own = CASES[name][1]
    return algorithm(name)(env or CASES[name][0], level="eager", **{**own, **options}, **with_expert(name))
