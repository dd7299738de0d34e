"""On-policy algorithms. Random policies return about 22 on CartPole, -1200 on Pendulum and -500 on Acrobot."""

from __future__ import annotations

from tutti.rl.presets.preset import Preset

PRESETS = {
    "reinforce-cartpole": Preset("REINFORCE", "CartPole-v1", 200_000, 475.0, {"n_envs": 8, "n_steps": 250}),
    "a2c-cartpole": Preset("A2C", "CartPole-v1", 150_000, 475.0, {"n_envs": 16, "n_steps": 8}),
    "ppo-cartpole": Preset("PPO", "CartPole-v1", 100_000, 475.0, {
        "n_envs": 16, "n_steps": 64, "batch_size": 256, "n_epochs": 8, "gae_lambda": 0.8, "gamma": 0.98,
        "learning_rate": 1e-3,
    }),
    "ppo-pendulum": Preset("PPO", "Pendulum-v1", 200_000, -250.0, {
        "n_envs": 16, "n_steps": 128, "batch_size": 256, "n_epochs": 10, "gae_lambda": 0.95, "gamma": 0.9,
        "learning_rate": 1e-3, "normalize_reward": True,
    }),
    "trpo-cartpole": Preset("TRPO", "CartPole-v1", 100_000, 475.0, {"n_envs": 8, "n_steps": 128, "gamma": 0.98}),
    "impala-cartpole": Preset("IMPALA", "CartPole-v1", 250_000, 450.0, {
        "n_envs": 16, "n_steps": 8, "learning_rate": 3e-2, "ent_coef": 0.0, "gamma": 0.98,
    }),
}  # fmt: skip
