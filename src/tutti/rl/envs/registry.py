"""Environments by name.

>>> make("CartPole-v1").limit
500
>>> make("simple_spread_v3", count=5).agents
('agent_0', 'agent_1', 'agent_2', 'agent_3', 'agent_4')
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from functools import partial

from tutti.rl.core.env import Env
from tutti.rl.envs.acrobot import Acrobot
from tutti.rl.envs.boards import ConnectFour, TicTacToe
from tutti.rl.envs.cartpole import CartPole
from tutti.rl.envs.catch import Catch
from tutti.rl.envs.deep_sea import DeepSea
from tutti.rl.envs.goals import BitFlip, Reach
from tutti.rl.envs.gridworld import GridWorld, frozen_lake
from tutti.rl.envs.lqr import LQR
from tutti.rl.envs.minatar import Breakout, SpaceInvaders
from tutti.rl.envs.mountain_car import MountainCar, MountainCarContinuous
from tutti.rl.envs.pendulum import Pendulum
from tutti.rl.envs.perfect import perfect_move
from tutti.rl.envs.teams.battle import Battle
from tutti.rl.envs.teams.battle_maps import MAPS
from tutti.rl.envs.teams.mpe import SimpleAdversary, SimpleSpeakerListener, SimpleSpread, SimpleTag
from tutti.rl.envs.tmaze import TMaze
from tutti.rl.envs.versus import Versus, greedy_move, random_move

ENVS: dict[str, Callable[..., Env]] = {
    "CartPole-v1": CartPole,
    "Pendulum-v1": Pendulum,
    "Acrobot-v1": Acrobot,
    "MountainCar-v0": MountainCar,
    "MountainCarContinuous-v0": MountainCarContinuous,
    "LQR": LQR,
    "GridWorld": GridWorld,
    "FrozenLake-v1": frozen_lake,
    "FrozenLake8x8-v1": partial(frozen_lake, 8),
    "Catch": Catch,
    "BitFlip": BitFlip,
    "Reach": Reach,
    "DeepSea": DeepSea,
    "TMaze": TMaze,
    "MinAtar/Breakout-v1": Breakout,
    "MinAtar/SpaceInvaders-v1": SpaceInvaders,
    "TicTacToe-random": partial(Versus, TicTacToe(), random_move),
    "TicTacToe-greedy": partial(Versus, TicTacToe(), greedy_move),
    "TicTacToe-perfect": partial(Versus, TicTacToe(), perfect_move),
    "ConnectFour-random": partial(Versus, ConnectFour(), random_move),
    "ConnectFour-greedy": partial(Versus, ConnectFour(), greedy_move),
    "simple_spread_v3": SimpleSpread,
    "simple_tag_v3": SimpleTag,
    "simple_adversary_v3": SimpleAdversary,
    "simple_speaker_listener_v4": SimpleSpeakerListener,
    **{f"Battle-{name}": partial(Battle, name) for name in MAPS},
}


def names() -> list[str]:
    """The names of all environments, sorted."""
    return sorted(ENVS)


def make(name: str, **options) -> Env:
    """Make an environment by name. options: arguments of its class.

    Raises ValueError for a name or an option that does not exist.
    """
    if name not in ENVS:
        near = difflib.get_close_matches(name, ENVS, 3, 0.5)
        said = f"did you mean {' or '.join(map(repr, near))}?" if near else f"names are {', '.join(names())}"
        raise ValueError(f"there is no environment {name!r}; {said}")
    option_names = list(inspect.signature(ENVS[name]).parameters)
    unknown = [option for option in options if option not in option_names]
    if unknown:
        said = f"its options are {', '.join(option_names)}" if option_names else "it has none"
        raise ValueError(f"{name} has no option {unknown[0]!r}; {said}")
    return ENVS[name](**options)
