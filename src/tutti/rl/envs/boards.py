"""Board games of two players as pure functions on batches of positions, for search and for play against an opponent.

    game = TicTacToe()
    state = game.reset(64)
    state = game.play(state, action)
    over, value = game.winner(state)

A state is {"board": int8 (n, cells)}: 1 for pieces of the player to move, -1 for those of the other, 0 for empty. A
position says all about its future; `play` changes the signs, as it is then the other's turn.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tutti.rl.core.env import State


class Board:
    """k in a row on a board of rows x columns. Row 0 is the top one; cells are numbered by rows."""

    rows: int
    columns: int
    k: int

    def __init__(self) -> None:
        self.lines = lines(self.rows, self.columns, self.k)

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def actions(self) -> int:
        return self.rows * self.columns

    def reset(self, n: int, device: torch.device | None = None) -> State:
        """n empty boards."""
        return {"board": torch.zeros(n, self.rows * self.columns, dtype=torch.int8, device=device)}

    def moves(self, state: State) -> Tensor:
        """Mask of free cells: bool (n, actions). Does not check whether the game is over."""
        return state["board"] == 0

    def play(self, state: State, action: Tensor) -> State:
        """The player to move puts a piece. action: int64 (n,), one of `moves`."""
        return self.put(state, action)

    def put(self, state: State, cell: Tensor) -> State:
        board = state["board"]
        here = cell.unsqueeze(-1) == torch.arange(board.shape[-1], device=board.device)
        return {"board": -(board + here)}

    def winner(self, state: State) -> tuple[Tensor, Tensor]:
        """(over, value for the player to move): bool (n,), float32 (n,).

        The value is -1 where the other player has a line, else 0: who is to move cannot have won before.
        """
        board = state["board"]
        counts = board.float() @ torch.tensor(self.lines, device=board.device)
        lost = (counts == -self.k).any(-1)
        return lost | (board != 0).all(-1), -lost.float()

    def observe(self, state: State) -> Tensor:
        """Planes of own and of the other's pieces, float32 (n, 2, rows, columns)."""
        board = state["board"].unflatten(-1, (self.rows, self.columns))
        return torch.stack([board == 1, board == -1], 1).float()


class TicTacToe(Board):
    """Three in a row on 3 x 3. Action: the cell."""

    rows, columns, k = 3, 3, 3


class ConnectFour(Board):
    """Four in a row on 6 x 7. Action: the column, whose lowest empty cell is taken."""

    rows, columns, k = 6, 7, 4

    @property
    def actions(self) -> int:
        return self.columns

    def moves(self, state: State) -> Tensor:
        return state["board"][:, : self.columns] == 0

    def play(self, state: State, action: Tensor) -> State:
        free = (state["board"] == 0).unflatten(-1, (self.rows, self.columns)).sum(1)
        row = free.gather(-1, action.unsqueeze(-1)).squeeze(-1) - 1
        return self.put(state, row * self.columns + action)


def lines(rows: int, columns: int, k: int) -> np.ndarray:
    """All lines of k cells, as columns of zeros and ones: float32 (cells, lines)."""
    flat_lines = []
    for i, j in np.ndindex(rows, columns):
        for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
            if i + down * (k - 1) < rows and 0 <= j + right * (k - 1) < columns:
                line = np.zeros((rows, columns), np.float32)
                for step in range(k):
                    line[i + down * step, j + right * step] = 1
                flat_lines.append(line.flatten())
    return np.stack(flat_lines, 1)
