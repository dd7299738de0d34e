"""Presets of algorithms that explore.

In DeepSea random actions return 0.00, and PPO with the same options -0.00; the best return is 0.99.
"""

from __future__ import annotations

from tutti.rl.presets.preset import Preset

PRESETS: dict[str, Preset] = {
    "rnd-deep-sea": Preset("RND", "DeepSea", 40_000, 0.9, {
        "n_envs": 16, "n_steps": 40, "batch_size": 160, "n_epochs": 4, "learning_rate": 1e-3, "hidden": (32,)}),
}  # fmt: skip
