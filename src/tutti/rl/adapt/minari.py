"""Offline data sets in Minari's format on disk, written and read without Minari.

A data set is a folder `data` with `metadata.json` and its episodes, in one of the formats of
`tutti.rl.adapt.episode_files.FORMATS`. Layout: https://minari.farama.org/content/dataset_standards/.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from tutti.rl.adapt import layout
from tutti.rl.adapt.episode_files import FORMATS

VERSION = "0.5.4"  # of Minari, whose layout is written
HOME = Path.home() / ".minari" / "datasets"  # where Minari keeps what it downloaded
NAME = re.compile(r"([-\w]+/)*[-\w]+-v\d+")


@dataclass
class Episode:
    """T steps of one episode.

    observations: a batch of T + 1, the last after the last step. actions: a batch of T. rewards: (T,). terminations,
    truncations: bool (T,). Batches are laid out as in `tutti.rl.adapt.layout`.
    """

    observations: layout.Batch
    actions: layout.Batch
    rewards: np.ndarray
    terminations: np.ndarray
    truncations: np.ndarray
    seed: int | None = None


def save(
    folder: str | Path,
    episodes: Iterable[Episode],
    env_id: str | None = None,
    *,
    algorithm: str = "",
    author: str = "",
    description: str = "",
    dataset_id: str | None = None,
    observation_space: spaces.Space | None = None,
    action_space: spaces.Space | None = None,
    format: str = "arrow",
) -> None:
    """Write a data set, which `minari.MinariDataset(folder / "data")` opens.

    folder: a new folder. `minari.load_dataset(dataset_id)` finds it where it is Minari's folder of data sets followed
        by the id, which by default is the folder's name, like "expert-v0".
    env_id: gymnasium's id of the environment, so that Minari can make it again. It gives the spaces that are not given.
    format: "arrow", "parquet" or "hdf5". Images are stored as they are, not as JPEG.
    """
    folder = Path(folder)
    dataset_id = dataset_id or folder.name
    if not NAME.fullmatch(dataset_id):
        raise ValueError(f"{dataset_id!r} is not a name of a data set; one is like 'hopper/expert-v0'")
    if format not in FORMATS:
        raise ValueError(f"there is no format {format!r}; there are {', '.join(FORMATS)}")
    data = folder / "data"
    if data.exists():
        raise ValueError(f"{data} exists already; delete it or choose another folder")
    spec = gymnasium.spec(env_id) if env_id else None
    if observation_space is None or action_space is None:
        if env_id is None:
            raise ValueError("without an env_id, save needs an observation_space and an action_space")
        env = gymnasium.make(env_id)
        observation_space = observation_space or env.observation_space
        action_space = action_space or env.action_space
        env.close()
    columns = [_columns(i, e, observation_space, action_space) for i, e in enumerate(episodes)]
    data.mkdir(parents=True)
    FORMATS[format].write(data, columns, observation_space, action_space, [e["seed"] for e in columns])
    size = sum(path.stat().st_size for path in data.rglob("*") if path.is_file()) / 1e6
    about = {
        "total_episodes": len(columns),
        "total_steps": sum(len(e["rewards"]) for e in columns),
        "data_format": format,
        "jpeg_encoding": False,
        "observation_space": json.dumps(describe(observation_space)),
        "action_space": json.dumps(describe(action_space)),
        "dataset_id": dataset_id,
        "minari_version": VERSION,
        "dataset_size": round(size, 1),
    }
    optional = {"algorithm_name": algorithm, "author": [author] if author else None, "description": description}
    if spec is not None:
        optional["env_spec"] = spec.to_json()
    about.update({key: value for key, value in optional.items() if value})
    (data / "metadata.json").write_text(json.dumps(about))


def metadata(folder: str | Path) -> dict[str, Any]:
    """The metadata of a data set, with `observation_space` and `action_space` as spaces of gymnasium.

    folder: a data set's folder, or the id of one that Minari has downloaded to its default place.
    """
    path = _data(folder) / "metadata.json"
    with _reading(path):
        about, env = json.loads(path.read_text()), None
        for name in ("observation_space", "action_space"):
            if name in about:
                about[name] = understand(json.loads(about[name]))
                continue
            id = json.loads(about["env_spec"])["id"]
            if id not in gymnasium.registry:  # "module:id" would import the module, which runs its code
                raise ValueError(f"it has no {name}, and its environment {id!r} is not registered in gymnasium: import "
                                 "the module that registers it")  # fmt: skip
            env = env or gymnasium.make(id)
            about[name] = getattr(env, name)
        for name in ("total_episodes", "total_steps"):
            if name in about and (not isinstance(about[name], int) or about[name] < 0):
                raise ValueError(f"{name} is {about[name]!r}; it must be a whole number from 0 on")
        if not isinstance(about.get("data_format"), str):
            raise ValueError(f"data_format is {about.get('data_format')!r}; it must be a text")
    return about


def episodes(folder: str | Path) -> Iterator[Episode]:
    """The episodes of a data set, one after the other. Infos are left out."""
    about, data = metadata(folder), _data(folder)
    if about["data_format"] not in FORMATS:
        raise ValueError(f"{data} is in the format {about['data_format']!r}; understood are {', '.join(FORMATS)}")
    pair = about["observation_space"], about["action_space"]
    jpeg = bool(about.get("jpeg_encoding", True))
    records = FORMATS[about["data_format"]].read(data, about["total_episodes"], *pair, jpeg)
    while True:
        with _reading(data):
            if (x := next(records, None)) is None:
                return
            episode = _episode(x, pair)
        yield episode


def _episode(x: dict[str, Any], pair: tuple[spaces.Space, spaces.Space]) -> Episode:
    obs, action = (layout.arrange(space, x[key]) for space, key in zip(pair, ("observations", "actions"), strict=True))
    rewards = np.asarray(x["rewards"])
    if rewards.ndim != 1 or rewards.dtype.kind not in "fiu":
        raise ValueError(f"rewards have the shape {rewards.shape} and dtype {rewards.dtype}; they must be numbers (T,)")
    ends = x["terminations"].astype(bool), x["truncations"].astype(bool)
    return Episode(obs, action, rewards, *ends, x.get("seed"))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Errors meanwhile name the file or the folder."""
    try:
        yield
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OSError, RuntimeError, RecursionError,
            gymnasium.error.Error) as error:  # fmt: skip
        raise ValueError(f"{path} cannot be read as a data set of Minari: {type(error).__name__}: {error}") from error


def load(folder: str | Path) -> dict[str, Any]:
    """All steps of a data set, the episodes one after the other.

    Returns batches of all steps: observation, action, reward (float32), terminated, truncated, next_observation. The
    last step of an episode that is cut off without a flag, as in data that was collected in pieces, is truncated.
    """
    parts: dict[str, list[Any]] = {
        key: [] for key in ("observation", "action", "reward", "terminated", "truncated", "next_observation")
    }
    for episode in episodes(folder):
        steps = len(episode.rewards)
        truncated = episode.truncations.copy()
        truncated[-1] |= not episode.terminations[-1]
        values = (
            layout.rows(episode.observations, slice(0, steps)), episode.actions, episode.rewards.astype(np.float32),
            episode.terminations, truncated, layout.rows(episode.observations, slice(1, steps + 1)),
        )  # fmt: skip
        for column, value in zip(parts.values(), values, strict=True):
            column.append(value)
    return {key: _join(column) for key, column in parts.items()}


def describe(space: spaces.Space) -> dict[str, Any]:
    """A space in Minari's words."""
    match space:
        case spaces.Dict():
            return {"type": "Dict", "subspaces": {key: describe(part) for key, part in space.spaces.items()}}
        case spaces.Tuple():
            return {"type": "Tuple", "subspaces": [describe(part) for part in space.spaces]}
        case spaces.Box():
            bounds = {"low": space.low.tolist(), "high": space.high.tolist()}
            return {"type": "Box", "dtype": str(space.dtype), "shape": list(space.shape), **bounds}
        case spaces.Discrete():
            return {"type": "Discrete", "dtype": "int64", "start": int(space.start), "n": int(space.n)}
        case spaces.MultiDiscrete():
            values = {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
            return {"type": "MultiDiscrete", "dtype": str(space.dtype), **values}
        case spaces.MultiBinary():
            return {"type": "MultiBinary", "n": space.n if isinstance(space.n, int) else list(space.n)}
    raise ValueError(f"{space} has no fixed shape, and cannot be saved; see tutti.rl.adapt.layout")


def understand(words: dict[str, Any]) -> spaces.Space:
    """Inverse of `describe`."""
    match words["type"]:
        case "Dict":
            return spaces.Dict({key: understand(part) for key, part in words["subspaces"].items()})
        case "Tuple":
            return spaces.Tuple([understand(part) for part in words["subspaces"]])
        case "Box":
            low, high = (np.array(words[key], words["dtype"]).reshape(words["shape"]) for key in ("low", "high"))
            return spaces.Box(low, high, dtype=low.dtype.type)
        case "Discrete":
            return spaces.Discrete(words["n"], start=words["start"])
        case "MultiDiscrete":
            nvec = np.array(words["nvec"])
            return spaces.MultiDiscrete(nvec, dtype=np.dtype(words["dtype"]).type, start=words.get("start"))
        case "MultiBinary":
            return spaces.MultiBinary(words["n"])
    raise ValueError(f"the data set has a {words['type']} space, whose values have no fixed shape")


def _columns(i: int, episode: Episode, observation_space: spaces.Space, action_space: spaces.Space) -> dict[str, Any]:
    """An episode as Minari has it: tuples for Tuple spaces, and Discrete values from `start` on."""
    steps = len(episode.rewards)
    ends = {key: np.asarray(getattr(episode, key), bool) for key in ("terminations", "truncations")}
    wrong = [key for key, x in ends.items() if x.shape != (steps,)]
    if steps == 0 or wrong:
        raise ValueError(f"episode {i} has {steps} rewards; it needs at least one, and as many of {wrong or 'them'}")
    try:
        obs = layout.restore(observation_space, episode.observations, steps + 1)
        action = layout.restore(action_space, episode.actions, steps)
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"episode {i} of {steps} steps has observations or actions that do not fit: {error}"
        ) from error
    return {"observations": obs, "actions": action, "rewards": np.asarray(episode.rewards, np.float64), **ends,
            "seed": episode.seed}  # fmt: skip


def _data(folder: str | Path) -> Path:
    places = [Path(folder) / "data", Path(folder), HOME / folder / "data"]
    for place in places:
        if (place / "metadata.json").exists():
            return place
    raise ValueError(f"there is no data set at {', '.join(map(str, places))}: no metadata.json")


def _join(parts: list[Any]) -> Any:
    if not parts:
        raise ValueError("the data set has no episodes")
    if isinstance(parts[0], dict):
        return {key: _join([part[key] for part in parts]) for key in parts[0]}
    return np.concatenate(parts)
