"""AlphaZero (Silver et al., 2018): a network that learns from its own searches, and plays against itself.

A network gives (p, v) = (probabilities of moves, value for the player to move). In each position a tree search
(`tutti.rl.tree_search`) improves p to pi, the shares of its visits. Boards are played on with moves of pi, and batches
from a replay descend

    -sum pi log p + (z - v)^2

z is the outcome of the game for the player to move or, where the game goes on beyond a chunk, the value that the search
found for its last position, with alternating signs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import tutti
from tutti.rl.core import agent, keys
from tutti.rl.core.agent import Rate
from tutti.rl.core.descent import Adam
from tutti.rl.core.env import where
from tutti.rl.core.ranges import Range
from tutti.rl.envs.boards import Board
from tutti.rl.envs.versus import Versus
from tutti.rl.networks.distributions import masked
from tutti.rl.networks.networks import ACTIVATIONS, Network, mlp
from tutti.rl.replay.ring import Ring
from tutti.rl.tree_search import search

Tree = dict[str, Any]


class AlphaZero(agent.Agent):
    """Options: `AlphaZero.Config`. The environment is a `Versus`, such as "ConnectFour-greedy": its game is learned by
    self-play, and its opponent is the one of `evaluate`. Steps are moves of both players."""

    @dataclass(frozen=True)
    class Config(agent.Config):
        """simulations: simulations of a search in self-play. play_simulations: those in `predict` and `evaluate`, by
        default as many. depth: most moves that one descends. c_puct: weight of the priors. channels: sizes of 3 x 3
        convolutions before the hidden layers. noise_alpha, noise_share: Dirichlet noise at the root, in self-play.
        random_moves: first moves of a game, drawn from the visits; later ones have the most visits. buffer_size: steps
        of the replay. batch_size: steps of an update. gradient_steps: updates of an iteration. decay: weight decay."""

        n_envs: int = 64
        n_steps: int = 8
        learning_rate: Rate = 2e-3
        hidden: tuple[int, ...] = (128, 128)
        activation: str = "relu"
        simulations: int = 32
        play_simulations: int | None = None
        channels: tuple[int, ...] = ()
        depth: int | None = 10
        c_puct: float = 1.5
        noise_alpha: float = 1.0
        noise_share: float = 0.25
        random_moves: int = 6
        buffer_size: int = 16_384
        batch_size: int = 256
        gradient_steps: int = 16
        decay: float = 1e-4

    multi_agent = False
    unused = ("gamma", "normalize_obs", "normalize_reward")
    ranges: ClassVar[dict[str, Range]] = {"gradient_steps": Range(1, unit="updates of an iteration")}

    def build(self) -> None:
        c, env = self.config, self.env
        if not isinstance(env, Versus):
            raise ValueError(f"AlphaZero plays board games against itself, and {env.name} is not one: use one like "
                             "TicTacToe-random or ConnectFour-greedy")  # fmt: skip
        self.game: Board = env.game
        self.net = Network(lambda: PolicyValue(self.game, c))
        self.adam = Adam(decay=c.decay)
        self.replay = Ring(c.buffer_size // c.n_envs, c.n_envs)

    def init(self, seed: int) -> Tree:
        weights = self.net.init(seed)
        return {"weights": weights, "adam": self.adam.init(weights)}

    def policy(self, learner: Tree) -> Tree:
        return {"weights": learner["weights"]}

    def more_state(self) -> Tree:
        moves, floats = self.game.actions, torch.float32
        shapes = {"obs": ((self.features.size,), floats), "pi": ((moves,), floats), "reward": ((), floats),
                  "mask": ((moves,), torch.bool), "terminated": ((), torch.bool), "truncated": ((), torch.bool),
                  "last": ((), torch.bool)}  # fmt: skip
        n = self.config.n_envs
        return {"replay": self.replay.init(shapes), "boards": self.game.reset(n)["board"], "moves": torch.zeros(n)}

    def evaluated(self, weights: Tensor) -> Any:
        """The network, as a search asks it."""
        return lambda obs: self.net(weights, obs.flatten(1))

    def act(self, policy: Tree, seen: Tree, carry: Tree, key: Tensor, explore: bool) -> tuple[Tensor, Tree, Tree]:
        own, opponent = seen["obs"].chunk(2, -1)
        board = (own - opponent).to(torch.int8)
        c, evaluate = self.config, self.evaluated(policy["weights"])
        visits, _ = search(self.game, evaluate, board, c.play_simulations or c.simulations, c.c_puct, c.depth)
        return (keys.categorical(key, visits.log()) if explore else visits.argmax(-1)), {}, carry

    def iterate(self, run: Tree) -> tuple[Tree, Tree]:
        c = self.config
        of_play, of_learning = keys.split(run["key"])
        moved, chunk = self.self_play(run, of_play)
        episodes = {"return": chunk.pop("return"), "length": chunk.pop("length")}
        replay = self.replay.add(run["replay"], chunk)
        rate = self.rate(run["learner"])

        def body(learner: Tree, i: Tensor) -> tuple[Tree, Tree]:
            batch, _ = self.replay.sample(replay, keys.fold(of_learning, i), c.batch_size)
            gradient, metrics = torch.func.grad(self.loss, has_aux=True)(learner["weights"], batch)
            weights, adam = self.adam.step(learner["weights"], gradient, learner["adam"], rate)
            return {**learner, "weights": weights, "adam": adam}, metrics

        learner, metrics = tutti.scan(body, run["learner"], torch.arange(c.gradient_steps))
        run = {**run, **moved, "learner": learner, "replay": replay, "key": keys.fold(run["key"], 2)}
        run = self.advance(run, c.n_steps * c.n_envs)
        return run, {**{name: x.mean() for name, x in metrics.items()}, "episodes": episodes}

    def self_play(self, run: Tree, key: Tensor) -> tuple[Tree, Tree]:
        """Play all boards on by `n_steps` moves. Returns boards and numbers of moves, and rows of the replay, with
        "reward", the outcome for the player to move, and "return", that of the player who began."""
        c, game, evaluate = self.config, self.game, self.evaluated(run["learner"]["weights"])

        def body(carry: Tree, t: Tensor) -> tuple[Tree, Tree]:
            of_noise, of_move = keys.split(keys.fold(key, t))
            board, count = carry["boards"], carry["moves"]
            state, noise = {"board": board}, (of_noise, c.noise_alpha, c.noise_share)
            visits, value = search(game, evaluate, board, c.simulations, c.c_puct, c.depth, noise)
            pi = visits / visits.sum(-1, keepdim=True)
            drawn = keys.categorical(of_move, visits.log())
            after = game.play(state, torch.where(count < c.random_moves, drawn, visits.argmax(-1)))
            over, theirs = game.winner(after)
            first = 1 - 2 * (count % 2)  # 1 where the player to move began the game
            row = {"obs": game.observe(state).flatten(1), "pi": pi, "mask": game.moves(state), "value": value,
                   "outcome": -theirs, "over": over, "return": torch.where(over, -theirs * first, 0.0),
                   "length": torch.where(over, count + 1, 0.0)}  # fmt: skip
            fresh = game.reset(len(board))["board"]
            return {"boards": where(over, fresh, after["board"]), "moves": torch.where(over, 0.0, count + 1)}, row

        moved, rows = tutti.scan(body, {"boards": run["boards"], "moves": run["moves"]}, torch.arange(c.n_steps))
        over = rows.pop("over")
        target = outcomes(rows.pop("outcome"), over, rows.pop("value"))
        no = torch.zeros_like(over)
        return moved, {**rows, "reward": target, "terminated": over, "truncated": no, "last": no}

    def absorb(self, run: Tree, chunk: Tree) -> tuple[Tree, Tree]:
        raise NotImplementedError("AlphaZero learns from its own games only")

    def loss(self, weights: Tensor, batch: Tree) -> tuple[Tensor, Tree]:
        logits, value = self.net(weights, batch["obs"])
        logs = masked(logits, batch["mask"]).log_softmax(-1)
        policy_loss = -(batch["pi"] * logs).sum(-1).mean()
        value_loss = (batch["reward"] - value).square().mean()
        return policy_loss + value_loss, {"policy_loss": policy_loss.detach(), "value_loss": value_loss.detach()}


def outcomes(outcome: Tensor, over: Tensor, value: Tensor) -> Tensor:
    """Value of each position (time, n) for the player to move: the outcome of its game.

    outcome: for who made a move, where it ended the game. value: what the search found; that of the last row counts for
    games that go on.
    """

    def body(later: Tensor, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        outcome, over = x
        now = torch.where(over, outcome, -later)
        return now, now

    start = -value[-1]  # so that the last row has its own value, where its game goes on
    return tutti.scan(body, start, (outcome, over), reverse=True)[1]


class PolicyValue(nn.Module):
    """Logits of moves (n, moves) and values in (-1, 1), (n,), from one trunk."""

    def __init__(self, game: Board, config: Any):
        super().__init__()
        *_, width = config.hidden
        self.shape = 2, game.rows, game.columns
        sizes = [2, *config.channels]
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(sizes))
        self.trunk = mlp([sizes[-1] * game.rows * game.columns, *config.hidden], config.activation)
        self.activation = ACTIVATIONS[config.activation]()
        self.move, self.value = nn.Linear(width, game.actions), nn.Linear(width, 1)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """obs: (n, features)."""
        x = obs.unflatten(-1, self.shape)
        for layer in self.convolutions:
            x = self.activation(layer(x))
        x = self.activation(self.trunk(x.flatten(1)))
        return self.move(x), self.value(x).squeeze(-1).tanh()
