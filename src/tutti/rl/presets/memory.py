"""Presets of algorithms with a memory.

Without memory the best return in TMaze is 0, with it 1; that of random actions is -2.0.
"""

from __future__ import annotations

from tutti.rl.presets.preset import Preset

PRESETS: dict[str, Preset] = {
    "recurrent-ppo-tmaze": Preset("RecurrentPPO", "TMaze", 60_000, 0.9, {
        "n_envs": 32, "n_steps": 32, "batch_size": 256, "n_epochs": 4, "memory": 32, "hidden": (32,),
        "ent_coef": 0.05, "learning_rate": 3e-3}),
    "r2d2-tmaze": Preset("R2D2", "TMaze", 30_000, 0.85, {
        "n_envs": 16, "n_steps": 4, "gradient_steps": 2, "batch_size": 32, "sequence": 16, "burn_in": 4, "memory": 32,
        "hidden": (32,), "learning_rate": 2e-3, "gamma": 0.97, "exploration_fraction": 0.5,
        "exploration_final_eps": 0.01, "target_update_interval": 640, "buffer_size": 20_000}),
}  # fmt: skip
