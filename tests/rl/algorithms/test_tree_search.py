"""Batched tree search against a recursive one, a perfect player, and scipy; AlphaZero's targets."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from tutti.rl.algorithms.model_based.alphazero import AlphaZero, outcomes
from tutti.rl.core import keys
from tutti.rl.envs.boards import ConnectFour, TicTacToe
from tutti.rl.envs.perfect import best_moves, perfect_move
from tutti.rl.tree_search import dirichlet, gamma, search

SMALL = {"hidden": (16,), "simulations": 8, "n_envs": 8, "n_steps": 4, "level": "eager"}


def evaluate(obs):
    """Some smooth function of a position: logits of moves and a value."""
    x = obs.flatten(1)
    moves = 9 if x.shape[1] == 18 else 7
    mixed = torch.sin(x @ torch.arange(x.shape[1] * (moves + 1)).float().view(x.shape[1], -1) * 0.37)
    return mixed[:, :moves], mixed[:, moves].tanh()


class Node:
    """A search tree as textbooks write it."""

    def __init__(self, game, board):
        state = {"board": board}
        logits, value = evaluate(game.observe(state))
        over, outcome = game.winner(state)
        self.board, self.over = board, bool(over)
        self.value = float(outcome if self.over else value)
        self.legal = [i for i, x in enumerate(game.moves(state)[0].tolist()) if x]
        total = sum(math.exp(float(logits[0, i])) for i in self.legal)
        self.prior = {i: math.exp(float(logits[0, i])) / total for i in self.legal}
        self.n, self.w, self.child = dict.fromkeys(self.legal, 0), dict.fromkeys(self.legal, 0.0), {}

    def simulate(self, game, c):
        """One simulation. Returns the value of the leaf for the player to move here."""
        if self.over:
            return self.value
        spread = math.sqrt(1 + sum(self.n.values()))
        best = max(
            self.legal, key=lambda i: self.w[i] / max(self.n[i], 1) + c * self.prior[i] * spread / (1 + self.n[i])
        )
        if best in self.child:
            value = -self.child[best].simulate(game, c)
        else:
            self.child[best] = Node(game, game.play({"board": self.board}, torch.tensor([best]))["board"])
            value = -self.child[best].value
        self.n[best] += 1
        self.w[best] += value
        return value


@pytest.mark.parametrize("game", [TicTacToe(), ConnectFour()])
def test_visits_are_those_of_a_recursive_search(game):
    boards = [game.reset(1)["board"]]
    for i in range(5):
        last = {"board": boards[-1]}
        boards.append(
            game.play(last, keys.categorical(keys.make(i), torch.where(game.moves(last), 0.0, -1e9)))["board"]
        )
    visits, values = search(game, evaluate, torch.cat(boards), 40)
    for row, value, board in zip(visits, values, boards, strict=True):
        root = Node(game, board)
        for _ in range(40):
            root.simulate(game, 1.5)
        assert row.tolist() == [root.n.get(i, 0) for i in range(game.actions)]
        assert float(value) == pytest.approx(sum(root.w.values()) / 40, abs=1e-5)


def test_search_finds_a_forced_win_without_a_network():
    """Own pieces at 0 and 1: cell 2 wins; a search of uniform priors and zero values must prefer it."""
    board = torch.tensor([[1, 1, 0, -1, -1, 0, 0, 0, 0]], dtype=torch.int8)
    visits, value = search(TicTacToe(), lambda obs: (torch.zeros(len(obs), 9), torch.zeros(len(obs))), board, 60)
    assert int(visits.argmax()) == 2
    assert float(value) > 0.5
    assert visits.sum() == 60
    assert (visits[0, [0, 1, 3, 4]] == 0).all()


def test_descending_is_bounded_by_depth():
    board = TicTacToe().reset(2)["board"]
    full, _ = search(TicTacToe(), evaluate, board, 30)
    shallow, _ = search(TicTacToe(), evaluate, board, 30, depth=1)
    assert torch.equal(full[0], full[1])
    assert full.sum() == shallow.sum() == 60
    assert not torch.equal(full, shallow)


@pytest.mark.parametrize("alpha", [0.3, 1.0, 4.0])
def test_gamma_numbers_are_those_of_scipy(alpha):
    drawn = gamma(keys.make(3), alpha, torch.Size((4000,)))
    assert stats.kstest(drawn.numpy(), stats.gamma(alpha).cdf).pvalue > 0.01


def test_dirichlet_noise_is_over_legal_moves():
    legal = torch.tensor([True, False, True, True]).expand(4000, 4)
    x = dirichlet(keys.make(1), 0.5, legal)
    assert (x[:, 1] == 0).all()
    assert x.sum(-1).numpy() == pytest.approx(1, abs=1e-5)
    assert stats.kstest(x[:, 0].numpy(), stats.beta(0.5, 1.0).cdf).pvalue > 0.01  # a marginal of Dirichlet


def test_the_perfect_player_knows_the_theory_of_tictactoe():
    table, digits = best_moves(), torch.tensor([3**i for i in range(9)])
    index = lambda board: int(((torch.tensor(board) + 1) * digits).sum())  # noqa: E731
    assert table[index([0] * 9)].all()  # every opening draws
    corner = table[index([-1, 0, 0, 0, 0, 0, 0, 0, 0])]
    assert corner.nonzero().flatten().tolist() == [4]  # only the center answers a corner
    fork = table[index([-1, 0, 0, 0, 1, 0, 0, 0, -1])]
    assert fork.nonzero().flatten().tolist() == [1, 3, 5, 7]  # opposite corners: an edge, or a fork loses
    with pytest.raises(ValueError, match="plays TicTacToe"):
        perfect_move(ConnectFour(), ConnectFour().reset(1), keys.make(0))


def test_targets_alternate_back_from_the_end_of_each_game():
    over = torch.tensor([[0, 0], [1, 0], [0, 0], [0, 0]]).bool()
    outcome = torch.tensor([[0.0, 0], [1, 0], [0, 0], [0, 0]])
    value = torch.tensor([[9.0, 9], [9, 9], [9, 9], [0.25, -0.5]])
    assert outcomes(outcome, over, value).T.tolist() == [[-1, 1, -0.25, 0.25], [0.5, -0.5, 0.5, -0.5]]


def test_self_play_makes_legal_games_and_their_outcomes():
    agent = AlphaZero("TicTacToe-perfect", **{**SMALL, "n_steps": 10})
    _, chunk = agent.self_play(agent.program.state(), keys.make(0))
    game = TicTacToe()
    boards = torch.zeros(8, 9, dtype=torch.int8)
    for t in range(10):
        own, other = chunk["obs"][t].chunk(2, -1)
        assert torch.equal((own - other).to(torch.int8), boards)
        assert (chunk["pi"][t][~chunk["mask"][t]] == 0).all()
        assert chunk["pi"][t].sum(-1).numpy() == pytest.approx(1, abs=1e-5)
        later = chunk["obs"][t + 1].chunk(2, -1) if t < 9 else None
        for i in range(8):
            if chunk["terminated"][t, i]:
                n = int((boards[i] != 0).sum()) + 1
                assert float(chunk["length"][t, i]) == n
                won = float(chunk["reward"][t, i])
                assert won in (0.0, 1.0)  # who moves last has won, or filled the board
                assert float(chunk["return"][t, i]) == won * (1 if n % 2 else -1)
                boards[i] = 0
            elif later is not None:
                boards[i] = (later[0] - later[1])[i].to(torch.int8)
    assert chunk["terminated"].any()
    assert game.actions == chunk["pi"].shape[-1]


def test_other_environments_are_refused():
    with pytest.raises(ValueError, match="plays board games against itself"):
        AlphaZero("CartPole-v1", **SMALL)


@pytest.mark.slow
def test_alphazero_learns_tictactoe():
    """Losses fall, and it loses less against the perfect player than before."""
    options = {"hidden": (64,), "simulations": 10, "n_envs": 64, "n_steps": 8, "gradient_steps": 16, "level": "eager",
               "learning_rate": 5e-3, "depth": 6}  # fmt: skip
    agent = AlphaZero("TicTacToe-perfect", **options)
    before = agent.evaluate(32)
    agent.learn(512)
    first = agent.metrics["policy_loss"]
    agent.learn(512 * 2)
    assert agent.metrics["policy_loss"] < first
    assert agent.evaluate(32).mean >= before.mean
