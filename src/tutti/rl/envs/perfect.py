"""A player of small games who never makes a mistake: a table of all positions, filled by minimax."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from tutti.rl.core import keys
from tutti.rl.core.env import State
from tutti.rl.envs.boards import Board, TicTacToe

CELLS = 9


def perfect_move(game: Board, state: State, key: Tensor) -> Tensor:
    """Any of the best moves of TicTacToe, with equal probabilities. Raises ValueError for other games."""
    if not isinstance(game, TicTacToe):
        raise ValueError(f"there is no table of {game.name}; perfect_move plays TicTacToe")
    digits = torch.tensor([3**i for i in range(CELLS)])
    index = ((state["board"].long() + 1) * digits).sum(-1)
    return keys.categorical(key, torch.where(best_moves()[index], 0.0, -1e9))


@cache
def best_moves() -> Tensor:
    """The best moves in each position, bool (3^9, 9). Cell i counts 3^i: 0 the opponent's, 1 empty, 2 own."""
    lines = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]
    memo: dict[tuple[int, ...], int] = {}

    def value(board: tuple[int, ...]) -> int:
        """Value of a position for the player to move."""
        if board not in memo:
            lost = any(all(board[i] == -1 for i in line) for line in lines)
            free = [i for i in range(CELLS) if board[i] == 0]
            memo[board] = -1 if lost else max((-value(after(board, i)) for i in free), default=0)
        return memo[board]

    def after(board: tuple[int, ...], i: int) -> tuple[int, ...]:
        return tuple(-1 if j == i else -x for j, x in enumerate(board))

    table = torch.ones(3**CELLS, CELLS, dtype=torch.bool)
    for index in range(3**CELLS):
        board = tuple(index // 3**i % 3 - 1 for i in range(CELLS))
        free = [i for i in range(CELLS) if board[i] == 0]
        if -1 <= sum(board) <= 0 and free:
            values = {i: -value(after(board, i)) for i in free}
            table[index] = torch.tensor([values.get(i) == max(values.values()) for i in range(CELLS)])
    return table
