"""Reinforcement learning end to end, environment steps per second: ours, what users would pick, and JAX.

Every contender trains in a process of its own with one thread of PyTorch, with equal numbers of environments, steps,
updates and rows, equal networks and optimizers (`rl_peers.py`). They take turns; a turn counts rollout and updates,
compilation not. `steps per CPU second` counts the seconds of all threads: other programs change it least. `times` are
medians over rounds of our steps per CPU second over the peer's.

- `sb3`: Stable-Baselines3. `torchrl`: TorchRL. `single`: PPO in one loop of plain PyTorch, as CleanRL writes it, on
  gymnasium's vector environments or EnvPool. `jax`: whole iterations in one `jit`, as PureJaxRL writes them.
- `tutti-eager`: ours as plain Python. `mpe2`: only the environment, which bounds every library that steps it.

`curves`: PPO on HalfCheetah with five seeds each of ours and Stable-Baselines3, mean return of the last 100 episodes
against steps. The peers are installed in ~/.cache/tutti/peers.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

import harness

TORCH = ("torch==2.13.0", "stable-baselines3==2.9.2", "torchrl==0.14.1", "envpool==1.2.5", "gymnasium[mujoco]==1.4.0",
         "mpe2==1.0.0")  # fmt: skip
JAX = ("jax==0.10.2", "gymnax==1.0.1", "six", "optax")  # six: gymnax imports it and does not require it
ENVIRONMENTS = {"jax": ("rl-jax", JAX), **dict.fromkeys(("sb3", "torchrl", "single", "mpe2"), ("rl-torch", TORCH))}
ROUNDS, SECONDS = 5, 4.0  # of a turn, by what the warm-up took
CURVE = {"seeds": 5, "steps": 150_000, "points": 10}


def ppo(env: str, n: int, steps: int, epochs: int, batch: int, lr: float, gamma: float, lam: float,
        normalize: bool = False) -> dict[str, Any]:  # fmt: skip
    shared = {"n_steps": steps, "n_epochs": epochs, "gae_lambda": lam}
    return {
        "algorithm": "PPO", "env": env, "n_envs": n, "batch": batch, "lr": lr, "gamma": gamma, "hidden": [64, 64],
        "activation": "tanh", "normalize": normalize, "sb3": shared, "jax": shared,
        "tutti": {**shared, "n_envs": n, "batch_size": batch, "learning_rate": lr, "gamma": gamma,
                  "normalize_obs": normalize, "normalize_reward": normalize},
    }  # fmt: skip


def sac(env: str, n: int, steps: int) -> dict[str, Any]:
    """One update for each step, as Stable-Baselines3's default."""
    shared = {"gradient_steps": n * steps, "learning_starts": 1000}
    return {
        "algorithm": "SAC", "env": env, "n_envs": n, "batch": 256, "lr": 3e-4, "gamma": 0.99, "hidden": [256, 256],
        "activation": "relu", "warm": 1024, "sb3": {**shared, "train_freq": steps},
        "tutti": {**shared, "n_envs": n, "n_steps": steps, "batch_size": 256},
    }  # fmt: skip


DQN = {
    "algorithm": "DQN", "env": "CartPole-v1", "n_envs": 8, "batch": 64, "lr": 1e-3, "gamma": 0.99, "hidden": [64, 64],
    "activation": "relu", "warm": 1024,
    "tutti": {"n_envs": 8, "n_steps": 4, "batch_size": 64, "gradient_steps": 16, "learning_starts": 1000,
              "learning_rate": 1e-3, "target_update_interval": 256},
    "sb3": {"train_freq": 4, "gradient_steps": 16, "learning_starts": 1000, "target_update_interval": 256},
    "jax": {"n_steps": 4, "updates": 16, "target_every": 256, "buffer": 100_000},
}  # fmt: skip
SPREAD = {"algorithm": "MAPPO", "env": "simple_spread_v3",
          "tutti": {"n_envs": 64, "n_steps": 25, "batch_size": 1200, "n_epochs": 8, "learning_rate": 3e-3}}  # fmt: skip
BATTLE = {"algorithm": "QMIX", "env": "Battle-3m", "warm": 1024,
          "tutti": {"n_envs": 32, "n_steps": 2, "gradient_steps": 2, "batch_size": 128, "buffer_size": 30_000,
                    "learning_rate": 1e-3, "learning_starts": 1000}}  # fmt: skip
CHEETAH = ppo("HalfCheetah-v5", 16, 128, 10, 64, 3e-4, 0.99, 0.95, normalize=True)
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "ppo-cartpole": (ppo("CartPole-v1", 16, 64, 8, 256, 1e-3, 0.98, 0.8), ("sb3", "torchrl", "single", "jax")),
    "ppo-cartpole, 64 environments": (ppo("CartPole-v1", 64, 128, 4, 2048, 1e-3, 0.98, 0.8), ("sb3", "jax")),
    "dqn-cartpole": (DQN, ("sb3", "jax")),
    "ppo-pendulum": (ppo("Pendulum-v1", 16, 128, 10, 256, 1e-3, 0.9, 0.95), ("sb3", "jax")),
    "sac-pendulum": (sac("Pendulum-v1", 4, 16), ("sb3",)),
    "ppo-halfcheetah": (CHEETAH, ("sb3", "single")),
    "sac-halfcheetah": (sac("HalfCheetah-v5", 8, 8), ("sb3",)),
    "mappo-spread": (SPREAD, ("tutti-eager", "mpe2")),
    "qmix-battle": (BATTLE, ("tutti-eager",)),
}


def contender(library: str, case: dict[str, Any]) -> harness.Peer:
    name, requirements = ENVIRONMENTS.get(library, ("", ()))
    return harness.Peer(name, requirements, "rl_peers.py", library, json.dumps(case))


def compared(name: str, quick: bool) -> dict[str, Any]:
    """Steps per second of all contenders of a case, by turns."""
    case, peers = CASES[name]
    running = {library: contender(library, case) for library in ("tutti", *peers)}
    turns, rates = {}, {library: [] for library in running}
    for library, x in running.items():
        x.ask(1)  # more than is compiled at the start: the first turn after a warm-up
        steps, seconds, *_ = x.ask(1)
        rate = max(steps / seconds, 1)
        turns[library] = max(int(rate * (1.0 if quick else SECONDS)), 1)
        harness.say(f"{name}: {library} does about {rate:,.0f} steps/s")
    for i in range(2 if quick else ROUNDS):
        order = list(running)
        for library in order[i % len(order) :] + order[: i % len(order)]:
            steps, seconds, cpu, _ = running[library].ask(turns[library])
            rates[library].append((steps / seconds, steps / cpu))
    for x in running.values():
        x.close()
    medians = {library: {"steps per second": statistics.median(x for x, _ in rows),
                         "steps per CPU second": statistics.median(x for _, x in rows)}
               for library, rows in rates.items()}  # fmt: skip
    times = {library: statistics.median(ours[1] / theirs[1] for ours, theirs in zip(rates["tutti"], rows, strict=True))
             for library, rows in rates.items() if library != "tutti"}  # fmt: skip
    harness.say(f"{name}: " + ", ".join(f"{x:.2f} times {library}" for library, x in times.items()))
    return {"contenders": medians, "times": times}


def curves(quick: bool) -> dict[str, Any]:
    """Mean returns after each tenth of the steps, by library: mean and standard deviation over seeds."""
    seeds, steps, points = (1, 4096, 2) if quick else (CURVE["seeds"], CURVE["steps"], CURVE["points"])
    rows: dict[str, list[list[float]]] = {"tutti": [], "sb3": []}
    for seed in range(seeds):
        for library, own in rows.items():
            x = contender(library, {**CHEETAH, "seed": seed, "total": steps})
            answers = [x.ask(steps // points) for _ in range(points)]
            x.close()
            own.append([answer[3] for answer in answers])
            harness.say(f"HalfCheetah, seed {seed}: {library} {own[-1]}")
    summaries = {}
    for library, own in rows.items():
        at = [[x for x in column if x is not None] for column in zip(*own, strict=True)]
        summaries[library] = {"mean": [statistics.fmean(x) if x else None for x in at],
                              "std": [statistics.stdev(x) if len(x) > 1 else None for x in at],
                              "last": [x[-1] for x in own]}  # fmt: skip
    return {"steps": [steps * (i + 1) // points for i in range(points)], **summaries}


def run(quick: bool) -> dict[str, Any]:
    names = ["ppo-cartpole"] if quick else list(CASES)
    return {"cases": {name: compared(name, quick) for name in names}, "curves": curves(quick)}


if __name__ == "__main__":
    harness.main(run, sys.argv[0])
