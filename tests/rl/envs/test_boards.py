"""Board games: counts of positions and games that are known, and play against opponents."""

import pytest
import torch

from tutti.rl.core import keys
from tutti.rl.envs.boards import Board, ConnectFour, TicTacToe
from tutti.rl.envs.versus import Versus, greedy_move, random_move


def grow(game, depth):
    """For each number of moves: positions, sequences of moves that lead to them, sequences that end there and how.

    Yields (positions, sequences, ended: {value for the player to move: sequences}).
    """
    boards, ways = game.reset(1)["board"], torch.ones(1, dtype=torch.int64)
    for _ in range(depth + 1):
        over, value = game.winner({"board": boards})
        ended = {int(v): int(ways[over & (value == v)].sum()) for v in value[over].unique()}
        yield len(boards), int(ways.sum()), ended
        boards, ways = boards[~over], ways[~over]
        possible = game.moves({"board": boards})
        i, action = possible.nonzero().unbind(-1)
        if not len(i):
            return
        after = game.play({"board": boards[i]}, action)["board"]
        boards, index = after.unique(dim=0, return_inverse=True)
        ways = torch.zeros(len(boards), dtype=torch.int64).index_add(0, index, ways[i])


def test_tic_tac_toe_has_5478_positions_and_255168_games():
    plies = list(grow(TicTacToe(), 9))
    assert sum(positions for positions, _, _ in plies) == 5478
    assert [sequences for _, sequences, _ in plies] == [1, 9, 72, 504, 3024, 15120, 54720, 148176, 200448, 127872]
    ended = [ended for _, _, ended in plies]
    assert sum(sum(e.values()) for e in ended) == 255_168
    assert sum(e.get(-1, 0) for e in ended[1::2]) == 131_184  # the first player has won
    assert sum(e.get(-1, 0) for e in ended[2::2]) == 77_904
    assert ended[9][0] == 46_080
    assert not any(0 in e for e in ended[:9])


def test_connect_four_has_the_known_numbers_of_positions_and_sequences():
    plies = list(grow(ConnectFour(), 7))
    assert [sequences for _, sequences, _ in plies] == [1, 7, 49, 343, 2401, 16807, 117_649, 823_536]
    # OEIS A212693: positions after n moves, games that are over included
    assert [positions for positions, _, _ in plies] == [1, 7, 49, 238, 1120, 4263, 16_422, 54_859]
    assert not any(ended for _, _, ended in plies[:7])
    assert plies[7][2][-1] > 0


def play(game: Board, actions):
    state = game.reset(1)
    for action in actions:
        assert not game.winner(state)[0].item()
        assert game.moves(state)[0, action]
        state = game.play(state, torch.tensor([action]))
    over, value = game.winner(state)
    return over.item(), value.item()


@pytest.mark.parametrize(
    "actions",
    [[0, 1] * 3 + [0], [0, 0, 1, 1, 2, 2, 3], [0, 1, 1, 2, 2, 3, 2, 3, 3, 6, 3], [6, 5, 5, 4, 4, 3, 4, 3, 3, 0, 3]],
)
def test_connect_four_sees_columns_rows_and_diagonals(actions):
    assert play(ConnectFour(), actions) == (True, -1.0)
    assert play(ConnectFour(), actions[:-1]) == (False, 0.0)


def test_boards_are_seen_by_the_player_to_move():
    game = TicTacToe()
    state = game.play(game.play(game.reset(2), torch.tensor([4, 0])), torch.tensor([8, 1]))
    planes = game.observe(state)
    assert planes.shape == (2, 2, 3, 3)
    assert planes[0, 0].flatten().nonzero().tolist() == [[4]]
    assert planes[0, 1].flatten().nonzero().tolist() == [[8]]
    assert planes[1].flatten(1).argmax(1).tolist() == [0, 1]


def best(game, state):
    """The value of each position for the player to move, and a best move, by going through the whole game."""
    over, value = game.winner(state)
    if over.all():
        return value, torch.zeros_like(value, dtype=torch.int64)
    moves = game.moves(state) & ~over.unsqueeze(-1)
    values = torch.full(moves.shape, -2.0)
    i, action = moves.nonzero().unbind(-1)
    after, index = game.play({"board": state["board"][i]}, action)["board"].unique(dim=0, return_inverse=True)
    values[i, action] = -best(game, {"board": after})[0][index]
    highest, move = values.max(-1)
    return torch.where(over, value, highest), move


def results(env, policy, n):
    state, _ = env.reset(keys.make(0), n)
    assert 0.4 < (state["board"] != 0).any(-1).float().mean() < 0.6
    total, running = torch.zeros(n), torch.ones(n, dtype=torch.bool)
    for i in range(5):
        state, _, reward, terminated, _ = env.step(state, policy(env.game, state, keys.make(100 + i)), keys.make(i))
        total += torch.where(running, reward, 0.0)
        running &= ~terminated
        if not running.any():
            return total
    raise AssertionError("a game of tic-tac-toe has at most five moves of each player")


def test_perfect_play_never_loses_to_any_opponent():
    game = TicTacToe()
    assert best(game, game.reset(1))[0].item() == 0

    def perfect(game, state, key):
        return best(game, state)[1]

    for opponent in (random_move, greedy_move):
        total = results(Versus(game, opponent), perfect, 300)
        assert total.min() == 0
        assert total.mean() > (0.8 if opponent is random_move else 0.1)


def test_random_play_against_random_play_is_fair_and_loses_to_greedy_play():
    n = 20_000
    total = results(Versus(TicTacToe()), random_move, n)
    # of games of random moves, the first player wins 0.585 and the second 0.288 (weighted by probability)
    assert total.mean().item() == pytest.approx(0.0, abs=4 / n**0.5)
    assert (total == 0).float().mean().item() == pytest.approx(0.127, abs=4 * 0.33 / n**0.5)
    assert results(Versus(TicTacToe(), greedy_move), random_move, 2000).mean() < -0.6


def test_impossible_moves_lose():
    env = Versus(TicTacToe())
    state, _ = env.reset(keys.make(1), 64)
    state = env.step(state, env.masks(state).long().argmax(-1), keys.make(2))[0]
    taken = (~env.masks(state)).long().argmax(-1)
    _, _, reward, terminated, _ = env.step(state, taken, keys.make(3))
    assert (reward == -1).all()
    assert terminated.all()
