"""Models and search. Returns of random play: Catch -0.6 (the best is 1), Pendulum -1200 (SAC reaches -250 in 15,000
steps).

Games count 1 for a win and -1 for a loss. Against the perfect player of TicTacToe random play returns about -0.9, and 0
is the best: it never loses. The greedy player of Connect Four wins where it can and blocks; 0.8 is 90 % of games won,
and 0 what a search without learning reaches.
"""

from __future__ import annotations

from tutti.rl.presets.preset import Preset

PRESETS = {
    "mbpo-pendulum": Preset("MBPO", "Pendulum-v1", 2_000, -200.0, {
        "n_envs": 2, "n_steps": 25, "learning_rate": 1e-3, "hidden": (64, 64), "batch_size": 128, "tau": 0.01,
        "gamma": 0.98, "gradient_steps": 300, "model_steps": 100, "buffer_size": 10_000,
    }),
    "dreamer-catch": Preset("Dreamer", "Catch", 6_000, 0.9, {}),
    "alphazero-tictactoe": Preset("AlphaZero", "TicTacToe-perfect", 40_960, 0.0, {
        "n_envs": 128, "n_steps": 8, "hidden": (128, 128), "simulations": 32, "depth": None, "random_moves": 9,
        "gradient_steps": 24, "learning_rate": 2e-3,
    }),
    "alphazero-connectfour": Preset("AlphaZero", "ConnectFour-greedy", 122_880, 0.8, {
        "n_envs": 128, "n_steps": 16, "hidden": (256, 128), "simulations": 32, "play_simulations": 96, "depth": 12,
        "random_moves": 10, "gradient_steps": 32, "learning_rate": 2e-3, "buffer_size": 65_536,
    }),
}  # fmt: skip
