"""Continuous control with a replay. A random policy's return on Pendulum is about -1200."""

from __future__ import annotations

from typing import Any

from tutti.rl.presets.preset import Preset

PENDULUM: dict[str, Any] = {
    "n_envs": 4, "n_steps": 16, "gradient_steps": 64, "learning_rate": 1e-3, "batch_size": 128, "hidden": (64, 64),
    "learning_starts": 1000, "buffer_size": 50_000,
}  # fmt: skip

PRESETS = {
    "ddpg-pendulum": Preset("DDPG", "Pendulum-v1", 15_000, -250.0, PENDULUM),
    "td3-pendulum": Preset("TD3", "Pendulum-v1", 15_000, -250.0, PENDULUM),
    "sac-pendulum": Preset("SAC", "Pendulum-v1", 15_000, -250.0, PENDULUM),
    "tqc-pendulum": Preset("TQC", "Pendulum-v1", 15_000, -250.0, PENDULUM),
}
