"""Preset of CrossQ. Random actions in Pendulum-v1 return about -1200.

An episode has 200 steps, so the threshold is for the last 16 episodes, 3200 steps, or for an evaluation.
"""

from __future__ import annotations

from tutti.rl.presets.preset import Preset

PRESETS: dict[str, Preset] = {
    "crossq-pendulum": Preset("CrossQ", "Pendulum-v1", 14_000, -250.0, {
        "n_envs": 4, "n_steps": 2, "gradient_steps": 4, "batch_size": 128, "hidden": (64,),
        "critic_hidden": (128, 128), "learning_starts": 400, "policy_delay": 1}),
}  # fmt: skip
