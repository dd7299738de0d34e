"""Presets of algorithms for several agents.

Returns of random actions: simple_spread_v3 -26.1 (-24.0 for agents that stand still), Battle-3m 1.6 of at most 20.
"""

from __future__ import annotations

from tutti.rl.presets.preset import Preset

_REPLAY = {"n_envs": 32, "n_steps": 2, "gradient_steps": 2, "n_step": 3, "gamma": 0.97, "batch_size": 128,
           "learning_rate": 1e-3, "exploration_fraction": 0.2, "exploration_final_eps": 0.02,
           "target_update_interval": 1280, "buffer_size": 30_000}  # fmt: skip

PRESETS: dict[str, Preset] = {
    "ippo-spread": Preset("IPPO", "simple_spread_v3", 150_000, -18.0, {
        "n_envs": 64, "n_steps": 25, "batch_size": 1200, "n_epochs": 8, "learning_rate": 3e-3, "gamma": 0.9,
        "gae_lambda": 0.9}),
    "mappo-battle": Preset("MAPPO", "Battle-3m", 100_000, 19.0, {
        "n_envs": 64, "n_steps": 32, "batch_size": 1536, "n_epochs": 8, "learning_rate": 1e-3}),
    "qmix-battle": Preset("QMIX", "Battle-3m", 80_000, 17.0, _REPLAY),
    "vdn-battle": Preset("VDN", "Battle-3m", 80_000, 13.0, {**_REPLAY, "n_step": 5, "learning_rate": 5e-4}),
    "coma-battle": Preset("COMA", "Battle-3m", 160_000, 13.0, {
        "n_envs": 64, "n_steps": 32, "batch_size": 512, "hidden": (128, 128), "activation": "tanh", "gamma": 0.9}),
    "maddpg-spread": Preset("MADDPG", "simple_spread_v3", 80_000, -18.5, {
        "n_envs": 32, "n_steps": 2, "gradient_steps": 2, "learning_rate": 2e-3, "gamma": 0.9, "tau": 0.02}),
}  # fmt: skip
