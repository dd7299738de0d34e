"""Recorded steps as tensors: what offline algorithms learn from.

A data set is given as a folder in Minari's format, as a dict of arrays with the names of
`tutti.rl.adapt.minari.load`, as a list of `tutti.rl.adapt.minari.Episode`, or as a name of `tutti.rl.offline_data`,
whose data are made first. It becomes a dict of tensors
(steps, ...), the episodes one after another:

| key | what |
|---|---|
| `obs`, `last` | features before and after the step, float32 (steps, size) |
| `action` | as the algorithm's distribution has it: in [-1, 1] where it squashes |
| `reward` | float32 (steps,) |
| `terminated`, `truncated` | bool (steps,) |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from tutti.rl.adapt import layout
from tutti.rl.networks.distributions import Box, Distribution
from tutti.rl.networks.features import Features

Rows = dict[str, Tensor]
KINDS = {"biu": "whole numbers", "biuf": "numbers", "fiu": "numbers"}
KEYS = ("observation", "action", "reward", "terminated", "truncated", "next_observation")


def rows_of(
    data: Any, features: Features, distribution: Distribution, spaced: tuple[spaces.Space, spaces.Space]
) -> Rows:
    """The steps of a data set. spaced: the spaces of observations and of actions.

    Raises ValueError where names are missing, and where shapes or numbers of steps do not fit.
    """
    arrays = arrays_of(data)
    if missing := [key for key in KEYS if key not in arrays]:
        raise ValueError(f"the data have no {', '.join(missing)}; they need {', '.join(KEYS)}")
    steps = len(arrays["reward"])
    own = {}
    for name, space in (("observation", spaced[0]), ("next_observation", spaced[0]), ("action", spaced[1])):
        _check(name, arrays[name], space, steps)
        own[name] = _tensors(layout.shifted(_arrays(arrays[name]), layout.starts(space)))
    for name, kinds in (("reward", "fiu"), ("terminated", "biu"), ("truncated", "biu")):
        _check_numbers(name, np.asarray(arrays[name]), (steps,), kinds)
    if isinstance(distribution, Box) and distribution.bounded and _outside(distribution, arrays["action"]):
        raise ValueError(f"the data have actions outside of {spaced[1]}; clip them")
    return {
        "obs": features(own["observation"]), "last": features(own["next_observation"]),
        "action": distribution.from_env(own["action"]),
        "reward": _tensors(arrays["reward"]).float(), "terminated": _tensors(arrays["terminated"]).bool(),
        "truncated": _tensors(arrays["truncated"]).bool(),
    }  # fmt: skip


def _check(name: str, x: Any, space: spaces.Space, steps: int) -> None:
    """Raise ValueError unless a batch holds values of a space, discrete ones from 0 on."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for key, part in parts:
            if not isinstance(x, Mapping) or str(key) not in x:
                raise ValueError(f"the data's {name} has no {key!r}, which {space} has")
            _check(f"{name}[{key!r}]", x[str(key)], part, steps)
        return
    x = np.asarray(x)
    discrete = isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)
    _check_numbers(name, x, (steps, *(space.shape or ())), "biu" if discrete else "biuf")
    if discrete and x.size:
        sizes = 2 if isinstance(space, spaces.MultiBinary) else getattr(space, "nvec", getattr(space, "n", 0))
        if x.min() < 0 or np.any(x >= sizes):
            raise ValueError(f"the data's {name} has values from {x.min()} to {x.max()}, outside of {space}: values of "
                             "discrete spaces begin at 0 in data, whatever the start of the space "
                             "(tutti.rl.adapt.layout); subtract it")  # fmt: skip


def _check_numbers(name: str, x: np.ndarray, shape: tuple[int, ...], kinds: str) -> None:
    """Raise ValueError for another shape, another kind of dtype, and what is not finite."""
    if x.shape != shape:
        raise ValueError(f"the data's {name} has the shape {tuple(x.shape)}, and {shape[0]} steps have {shape}")
    if x.dtype.kind not in kinds:
        raise ValueError(f"the data's {name} has the dtype {x.dtype}; it must be {KINDS[kinds]}")
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        raise ValueError(f"the data's {name} is not finite in step {int(np.argwhere(~np.isfinite(x))[0][0])}")


def _arrays(x: Any) -> Any:
    return {key: _arrays(part) for key, part in x.items()} if isinstance(x, Mapping) else np.asarray(x)


def arrays_of(data: Any) -> Mapping[str, Any]:
    """A data set as a dict of arrays."""
    from tutti.rl.adapt import minari
    from tutti.rl.offline_data import SOURCES, make

    if isinstance(data, str) and data in SOURCES:
        data = list(make(data))
    if isinstance(data, str | Path):
        return minari.load(data)
    if isinstance(data, Mapping):
        return data
    if isinstance(data, Iterable):
        return joined(list(data))
    raise ValueError(f"data is a {type(data).__name__}; pass a folder in Minari's format, a dict of arrays, or a list "
                     "of episodes (tutti.rl.adapt.minari.Episode)")  # fmt: skip


def joined(episodes: list[Any]) -> dict[str, Any]:
    """Concatenate the steps of episodes. The last step of each is marked truncated unless it terminated."""
    if not episodes:
        raise ValueError("the data have no episodes")
    columns: dict[str, list[Any]] = {key: [] for key in KEYS}
    for e in episodes:
        steps = len(e.rewards)
        truncated = np.array(e.truncations, bool)
        truncated[-1] |= not e.terminations[-1]
        obs = [_rows(e.observations, slice(0, steps)), _rows(e.observations, slice(1, steps + 1))]
        for key, x in zip(KEYS, (obs[0], e.actions, e.rewards, e.terminations, truncated, obs[1]), strict=True):
            columns[key].append(x)
    return {key: _joined(parts) for key, parts in columns.items()}


def first_steps(rows: Rows) -> Tensor:
    """Index of the first step of each step's episode, int64 (steps,)."""
    ended = rows["terminated"] | rows["truncated"]
    index = torch.arange(len(ended))
    starts = torch.cat([torch.zeros_like(ended[:1]), ended[:-1]])
    return torch.where(starts, index, torch.zeros_like(index)).cummax(0).values


def returns_to_go(rows: Rows) -> Tensor:
    """The sum of the rewards from each step to the end of its episode, float32 (steps,)."""
    before = rows["reward"].double().cumsum(0) - rows["reward"]
    first = first_steps(rows)
    episode = (first[1:] != first[:-1]).cumsum(0)
    episode = torch.cat([torch.zeros_like(episode[:1]), episode])
    total = torch.zeros(int(episode[-1]) + 1, dtype=torch.float64).index_add_(0, episode, rows["reward"].double())
    return (total[episode] - (before - before[first])).float()


def _outside(distribution: Box, action: Any) -> bool:
    x = torch.as_tensor(np.asarray(action))
    slack = 1e-3 * (distribution.high - distribution.low)
    return bool(((x < distribution.low - slack) | (x > distribution.high + slack)).any())


def _rows(x: Any, at: slice) -> Any:
    return {key: _rows(part, at) for key, part in x.items()} if isinstance(x, Mapping) else x[at]


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], Mapping):
        return {key: _joined([part[key] for part in parts]) for key in parts[0]}
    return np.concatenate([np.asarray(part) for part in parts])


def _tensors(x: Any) -> Any:
    if isinstance(x, Mapping):
        return {key: _tensors(part) for key, part in x.items()}
    return torch.as_tensor(np.ascontiguousarray(x))
