"""Models and search. A random policy returns about -1200 on Pendulum; SAC reaches -250 there in 15,000 steps."""

from __future__ import annotations

from tutti.rl.presets.preset import Preset

PRESETS = {
    "mbpo-pendulum": Preset("MBPO", "Pendulum-v1", 2_000, -200.0, {
        "n_envs": 2, "n_steps": 25, "learning_rate": 1e-3, "hidden": (64, 64), "batch_size": 128, "tau": 0.01,
        "gamma": 0.98, "gradient_steps": 300, "model_steps": 100, "buffer_size": 10_000,
    }),
}  # fmt: skip
