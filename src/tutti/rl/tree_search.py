"""Monte Carlo tree search on batches of board games, with a network for leaves and priors (Silver et al., 2018).

A tree is a dict of tensors (batch, nodes, ...): all boards search at once, and each simulation adds at most one node to
each tree. From the root it descends to the move that maximizes

    W / N + c_puct P sqrt(1 + sum N) / (1 + N)

(moves not tried count as draws), evaluates the position that it reaches, and adds the value to all moves of its path,
with the sign of who made them. There is no virtual loss, as the simulations of one tree follow one another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import tutti
from tutti.rl.core import keys
from tutti.rl.envs.boards import Board
from tutti.rl.networks.distributions import masked

Tree = dict[str, Any]
Evaluate = Callable[[Tensor], tuple[Tensor, Tensor]]  # `Board.observe` -> (logits of moves, values), (n, moves), (n,)


def search(
    game: Board, evaluate: Evaluate, board: Tensor, simulations: int, c_puct: float = 1.5, depth: int | None = None,
    noise: tuple[Tensor, float, float] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(visits of each move, float32 (n, moves), values for the player to move, (n,)).

    board: (n, cells), as in `tutti.rl.envs.boards`, of games that are not over. depth: the most moves that a simulation
    descends; by default all. noise: (key, alpha, share): the share of Dirichlet(alpha) noise in the root's priors.
    """
    n, moves = len(board), game.actions
    root = _node(game, evaluate, board)
    if noise is not None:
        key, alpha, share = noise
        drawn = dirichlet(key, alpha, root["legal"])
        root["prior"] = (1 - share) * root["prior"] + share * drawn
    empty = {name: x.new_zeros(n, simulations, *x.shape[1:]) for name, x in root.items()}
    tree: Tree = {name: torch.cat([x.unsqueeze(1), empty[name]], 1) for name, x in root.items()}
    zeros = torch.zeros(n, simulations + 1, moves)
    tree |= {"visits": zeros, "total": zeros.clone(), "child": torch.full_like(zeros, -1, dtype=torch.int64)}
    max_depth = min(simulations, board.shape[-1]) if depth is None else min(depth, simulations)

    def body(tree: Tree, i: Tensor) -> tuple[Tree, None]:
        return _simulate(game, evaluate, tree, i + 1, max_depth, c_puct), None

    tree, _ = tutti.scan(body, tree, torch.arange(simulations))
    visits, total = tree["visits"][:, 0], tree["total"][:, 0]
    return visits, total.sum(-1) / visits.sum(-1).clamp(min=1)


def _node(game: Board, evaluate: Evaluate, board: Tensor) -> Tree:
    """Entries of tree nodes for positions (n, cells): priors, and values for the player to move."""
    state = {"board": board}
    legal = game.moves(state)
    logits, value = evaluate(game.observe(state))
    over, outcome = game.winner(state)
    return {"board": board, "legal": legal, "prior": masked(logits, legal).softmax(-1), "over": over,
            "value": torch.where(over, outcome, value)}  # fmt: skip


def _simulate(game: Board, evaluate: Evaluate, tree: Tree, new: Tensor, depth: int, c_puct: float) -> Tree:
    """Run one simulation, which may add node `new`. Returns the tree."""
    n, _, moves = tree["visits"].shape

    def of(name: str, node: Tensor) -> Tensor:
        x = tree[name]
        return x.gather(1, node.view(n, *[1] * (x.ndim - 1)).expand(n, 1, *x.shape[2:])).squeeze(1)

    def descend(carry: Tree, _: Tensor) -> tuple[Tree, Tree]:
        node, going = carry["node"], carry["going"]
        visits = of("visits", node)
        spread = (1 + visits.sum(-1, keepdim=True)).sqrt() / (1 + visits)
        score = of("total", node) / visits.clamp(min=1) + c_puct * of("prior", node) * spread
        move = masked(score, of("legal", node)).argmax(-1)
        child = of("child", node).gather(-1, move.unsqueeze(-1)).squeeze(-1)
        expanded = child >= 0
        after = {"node": torch.where(going & expanded, child, node),
                 "going": going & expanded & ~of("over", child.clamp(0)),
                 "from": torch.where(going, node, carry["from"]), "move": torch.where(going, move, carry["move"]),
                 "fresh": torch.where(going, ~expanded, carry["fresh"])}  # fmt: skip
        return after, {"edge": node * moves + move, "active": going}

    zero = torch.zeros(n, dtype=torch.int64)
    start = {"node": zero, "going": ~tree["over"][:, 0], "from": zero.clone(), "move": zero.clone(),
             "fresh": torch.zeros(n, dtype=torch.bool)}  # fmt: skip
    end, path = tutti.scan(descend, start, torch.arange(depth))

    fresh = end["fresh"]
    leaf = _node(game, evaluate, game.play({"board": of("board", end["from"])}, end["move"])["board"])
    value = torch.where(fresh, leaf["value"], of("value", end["node"]))
    at = new.view(1)
    tree = {**tree, **{name: tree[name].index_copy(1, at, x.unsqueeze(1)) for name, x in leaf.items()}}
    edge = (end["from"] * moves + end["move"]).unsqueeze(-1)
    children = tree["child"].flatten(1)
    linked = torch.where(fresh.unsqueeze(-1), new, children.gather(1, edge))
    active, index = path["active"].float().T, path["edge"].T  # (n, depth)
    above = active.sum(-1, keepdim=True) - torch.arange(depth)  # moves from here to the leaf
    sign = 1 - 2 * (above % 2)
    add = lambda name, x: tree[name].flatten(1).scatter_add(1, index, x).unflatten(1, (-1, moves))  # noqa: E731
    return {**tree, "child": children.scatter(1, edge, linked).unflatten(1, (-1, moves)),
            "visits": add("visits", active), "total": add("total", active * sign * value.unsqueeze(-1))}  # fmt: skip


def dirichlet(key: Tensor, alpha: float, legal: Tensor) -> Tensor:
    """Points of the simplex of legal moves, drawn from Dirichlet(alpha), float32 as `legal`, 0 elsewhere."""
    drawn = gamma(key, alpha, legal.shape) * legal
    return drawn / drawn.sum(-1, keepdim=True).clamp(min=1e-20)


def gamma(key: Tensor, alpha: float, shape: torch.Size, tries: int = 8) -> Tensor:
    """Gamma(alpha) numbers, by Marsaglia and Tsang (2000) for alpha + 1, times U^(1 / alpha).

    Each of the `tries` is accepted with a probability above 0.95; where none is, the number is the mean.
    """
    of_normal, of_accept, of_power = keys.split(key, 3)
    d = alpha + 1 - 1 / 3
    c = 1 / (9 * d) ** 0.5
    x = keys.normal(of_normal, (tries, *shape))
    u = keys.uniform(of_accept, (tries, *shape)) + 2**-25
    v = (1 + c * x) ** 3
    good = (v > 0) & (u.log() < 0.5 * x.square() + d - d * v + d * v.clamp(min=1e-20).log())
    first = (good.long().cumsum(0) == 1) & good
    drawn = torch.where(good.any(0), (first * d * v).sum(0), alpha + 1)
    return drawn * (keys.uniform(of_power, shape) + 2**-25) ** (1 / alpha)
