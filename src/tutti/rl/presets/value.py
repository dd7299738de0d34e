"""Value-based algorithms. A random policy's return on CartPole is about 22.

In BitFlip, DQN without hindsight stays at -12, as random play does; -5.0 is the best.
"""

from __future__ import annotations

from typing import Any

from tutti.rl.presets.preset import Preset

CARTPOLE: dict[str, Any] = {
    "n_envs": 8, "n_steps": 8, "gradient_steps": 32, "learning_rate": 1e-3, "batch_size": 64, "learning_starts": 1000,
    "target_update_interval": 256, "exploration_fraction": 0.2, "exploration_final_eps": 0.02, "hidden": (64, 64),
    "n_step": 3,
}  # fmt: skip

PRESETS = {
    "dqn-cartpole": Preset("DQN", "CartPole-v1", 60_000, 400.0, CARTPOLE),
    "double-dqn-cartpole": Preset("DoubleDQN", "CartPole-v1", 60_000, 400.0, CARTPOLE),
    "dueling-dqn-cartpole": Preset("DuelingDQN", "CartPole-v1", 60_000, 400.0, CARTPOLE),
    "prioritized-dqn-cartpole": Preset("PrioritizedDQN", "CartPole-v1", 60_000, 400.0, CARTPOLE),
    "c51-cartpole": Preset("C51", "CartPole-v1", 60_000, 400.0, {**CARTPOLE, "gamma": 0.98, "v_max": 50.0}),
    "qrdqn-cartpole": Preset("QRDQN", "CartPole-v1", 60_000, 400.0, {**CARTPOLE, "n_quantiles": 20}),
    "dqn-bitflip": Preset(
        "DQN",
        "BitFlip",
        20_000,
        -6.0,
        {
            "n_envs": 8,
            "n_steps": 8,
            "gradient_steps": 16,
            "learning_rate": 1e-3,
            "batch_size": 64,
            "hidden": (128,),
            "target_update_interval": 512,
            "gamma": 0.95,
            "exploration_fraction": 0.5,
            "hindsight": 4,
        },
    ),
    "rainbow-cartpole": Preset("Rainbow", "CartPole-v1", 40_000, 400.0, {**CARTPOLE, "gamma": 0.98, "v_max": 50.0}),
}
