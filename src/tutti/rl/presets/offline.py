"""Learning from data (`tutti.rl.offline_data`) and from experts.

Pendulum: random play returns about -1200, and cloning "pendulum-mixed" about -1000. Catch: random play returns about
-0.6, and so does cloning "catch-random". CartPole: random play returns about 22. Steps of offline algorithms are
updates.
"""

from __future__ import annotations

from typing import Any

from tutti.rl.presets.preset import Preset

PENDULUM: dict[str, Any] = {"hidden": (64, 64), "learning_rate": 1e-3, "gamma": 0.95, "tau": 0.02}

PRESETS = {
    "bc-cartpole": Preset("BC", "CartPole-v1", 1_000, 475.0, {}, data="cartpole-expert"),
    "td3bc-pendulum": Preset("TD3BC", "Pendulum-v1", 4_000, -250.0, {**PENDULUM, "alpha": 60.0},
                             data="pendulum-mixed"),
    "awac-pendulum": Preset("AWAC", "Pendulum-v1", 4_000, -250.0, {**PENDULUM, "temperature": 1.0},
                            data="pendulum-mixed"),
    "iql-pendulum": Preset("IQL", "Pendulum-v1", 16_000, -250.0, {
        **PENDULUM, "temperature": 0.3, "expectile": 0.8,
    }, data="pendulum-mixed"),
    "cql-pendulum": Preset("CQL", "Pendulum-v1", 4_000, -250.0, {
        **PENDULUM, "n_actions": 4, "cql_alpha": 0.3, "batch_size": 128, "learning_rate": 2e-3,
    }, data="pendulum-mixed"),
    "discretecql-catch": Preset("DiscreteCQL", "Catch", 1_000, 0.9, {
        "gamma": 0.95, "tau": 0.02, "cql_alpha": 0.1,
    }, data="catch-random"),
    "dt-catch": Preset("DT", "Catch", 1_000, 0.8, {
        "width": 32, "context": 10, "learning_rate": 3e-3, "max_grad_norm": 1.0,
    }, data="catch-random"),
    "dagger-cartpole": Preset("DAgger", "CartPole-v1", 5_000, 475.0, {
        "expert": "ppo-cartpole", "n_envs": 8, "gradient_steps": 64, "batch_size": 128,
    }),
    "gail-catch": Preset("GAIL", "Catch", 60_000, 0.8, {
        "n_envs": 16, "n_steps": 64, "batch_size": 256, "learning_rate": 1e-3, "disc_lr": 1e-3, "gamma": 0.95,
        "reward": "airl", "ent_coef": 0.03, "penalty": 0.01, "disc_steps": 30,
    }, data="catch-expert"),
}  # fmt: skip
