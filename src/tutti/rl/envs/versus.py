"""A board game as an environment: the agent plays against an opponent that is part of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from tutti.rl.core import keys
from tutti.rl.core.env import Env, State, Step, where
from tutti.rl.envs.boards import Board
from tutti.rl.envs.canvas import ORANGE, RED, tiles

Opponent = Callable[[Board, State, Tensor], Tensor]  # (game, state, key) -> actions, int64 (n,)


class Versus(Env):
    """Observation: `Board.observe` when it is the agent's turn, (2, rows, columns). Action: as in the game.

    The opponent begins in half of the episodes. Reward 1 for a game that is won, -1 for one that is lost, 0 for a draw
    and for each step before. `masks` tells which actions are possible; any other loses the game at once.

    state["board"]: as in `tutti.rl.envs.boards`, the agent to move.
    """

    def __init__(self, game: Board, opponent: Opponent | None = None):
        self.game, self.opponent = game, opponent or random_move
        self.observation_space = spaces.Box(0.0, 1.0, (2, game.rows, game.columns), np.float32)
        self.action_space = spaces.Discrete(game.actions)

    @property
    def name(self) -> str:
        return f"{self.game.name}-{getattr(self.opponent, '__name__', 'opponent').removesuffix('_move')}"

    def reset(self, key: Tensor, n: int) -> tuple[State, Tensor]:
        empty = self.game.reset(n, key.device)
        answered = self.game.play(empty, self.opponent(self.game, empty, keys.fold(key, 1)))
        second = keys.uniform(key, (n,)) < 0.5
        state = {"board": where(second, answered["board"], empty["board"])}
        return {**state, "t": torch.zeros(n, dtype=torch.int64, device=key.device)}, self.game.observe(state)

    def step(self, state: State, action: Tensor, key: Tensor) -> Step:
        legal = self.masks(state).gather(-1, action.unsqueeze(-1)).squeeze(-1)
        mine = self.game.play(state, torch.where(legal, action, 0))
        over, lost = self.game.winner(mine)  # of the opponent's point of view
        answer = self.opponent(self.game, mine, key)
        theirs = self.game.play(mine, answer)
        ended, value = self.game.winner(theirs)
        board = where(over, -mine["board"], theirs["board"])
        reward = torch.where(legal, torch.where(over, -lost, value), -1.0)
        after, t = {"board": board}, state["t"] + 1
        return {**after, "t": t}, self.game.observe(after), reward, over | ended | ~legal, self.truncated(t)

    def draw(self, state: State, i: int) -> np.ndarray:
        """The agent's pieces are orange, those of the opponent red."""
        return tiles(self.game.observe(state)[i].numpy(), [ORANGE, RED], size=40)

    def masks(self, state: State) -> Tensor:
        return self.game.moves(state)


def random_move(game: Board, state: State, key: Tensor) -> Tensor:
    """Any possible move, with equal probabilities."""
    return keys.categorical(key, torch.where(game.moves(state), 0.0, -1e9))


def greedy_move(game: Board, state: State, key: Tensor) -> Tensor:
    """A move that wins, else one that keeps the other from winning at once, else any."""
    moves, board = game.moves(state), state["board"]
    wins = torch.stack([takes(game, {"board": board}, i) for i in range(game.actions)], -1)
    blocks = torch.stack([takes(game, {"board": -board}, i) for i in range(game.actions)], -1)
    good = 2.0 * wins + blocks
    return keys.categorical(key, torch.where(moves, 1e3 * good, -1e9))


def takes(game: Board, state: State, i: int) -> Tensor:
    """Whether move i completes a line, bool (n,)."""
    action = torch.full((len(state["board"]),), i, dtype=torch.int64, device=state["board"].device)
    return game.winner(game.play(state, action))[1] < 0
