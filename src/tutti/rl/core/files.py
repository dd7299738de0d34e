"""Agents in files: one safetensors file with all tensors of a run, and its settings as metadata. Files hold no code."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from tutti.checkpoint.tensor_file import read_metadata, read_tensors, write_tensors
from tutti.rl.core import plain
from tutti.rl.core.env import Env
from tutti.rl.core.options import configured, options_of, unsaved
from tutti.rl.core.program import LEVELS, leaves, with_leaves
from tutti.rl.core.vector import VectorEnv
from tutti.rl.sb3 import POLICIES

if TYPE_CHECKING:
    from tutti.rl.core.agent import Agent

T = TypeVar("T")
FORMAT = "tutti.rl 2"
HOST = "host."  # the prefix of arrays of environments that the host steps
LEFT_OUT = ("replay.", "actor.", HOST)  # what a file may lack as a whole


def _whole(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _pairs(x: Any) -> bool:
    return isinstance(x, list) and all(isinstance(y, list) and len(y) == 2 and all(map(_number, y)) for y in x)


def _number(x: Any) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool)


def _texts(x: Any) -> bool:
    return isinstance(x, list) and all(isinstance(y, str) for y in x)


# Key of the settings -> whether a value is one, and in words what it must be.
SETTINGS: dict[str, tuple[Any, str]] = {
    "algorithm": (lambda x: isinstance(x, str), "a text"),
    "env": (lambda x: x is None or isinstance(x, str), "a text or null"),
    "seed": (_whole, "a whole number"),
    "options": (lambda x: isinstance(x, dict), "a table"),
    "unsaved": (_texts, "a list of texts"),
    "episodes": (_pairs, "a list of pairs of numbers"),
    "level": (lambda x: isinstance(x, str), "a text"),
    "threads": (lambda x: _whole(x) and x > 0, "a whole number from 1 on"),
    "warm_until": (lambda x: _whole(x) and x >= 0, "a whole number from 0 on"),
    "num_timesteps": (lambda x: _whole(x) and x >= 0, "a whole number from 0 on"),
    "predictions": (lambda x: _whole(x) and x >= 0, "a whole number from 0 on"),
    "score": (lambda x: x is None or _number(x), "a number or null"),
}


def save(agent: Agent, path: Path, replay: bool, score: float | None) -> Path:
    """Write a run. score: what an evaluation gave it. The file is complete or absent, even if the process is killed
    meanwhile."""
    state = agent.program.state()
    stored = state if replay else {k: v for k, v in state.items() if k != "replay"}
    about = {
        "format": FORMAT, "algorithm": type(agent).__name__, "env": agent.env_name, "seed": agent.seed,
        "options": options_of(agent.config), "unsaved": unsaved(agent.config), "episodes": list(agent.episodes),
        "level": agent.level, "threads": agent.threads,
        "warm_until": agent.warm_until if replay else agent.num_timesteps,
        "num_timesteps": agent.num_timesteps, "predictions": agent.predictions, "score": score,
        "policy": agent.policy_name,
    }  # fmt: skip
    tensors = leaves(stored)
    if not isinstance(agent.env, Env):
        about["host"], arrays = _packed(agent)
        tensors |= {f"{HOST}{name}": torch.from_numpy(x.copy()) for name, x in arrays.items()}
    write_tensors(tensors, path, {"about": json.dumps(about)})
    return path


def _packed(agent: Agent) -> tuple[Any, plain.Arrays]:
    try:
        return plain.pack(agent.host.state())
    except plain.Unstorable as error:
        raise ValueError(f"{agent.env.name}.state() cannot be stored: {error}. It must be data, such as dicts of "
                         "arrays (tutti.rl.core.plain), or raise NotImplementedError") from error  # fmt: skip


def about(path: Path) -> dict[str, Any]:
    """The settings in a file. Raises ValueError for a file that `save` did not write."""
    _check_exists(path)
    try:
        settings = json.loads(read_metadata(path).get("about", "{}"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a file of an agent: {str(error).removeprefix(f'{path} ')}") from error
    if not isinstance(settings, dict) or not str(settings.get("format")).startswith(FORMAT[:-1]):
        raise ValueError(f"{path} is not a file of an agent; Agent.save writes one")
    if settings["format"] != FORMAT:
        raise ValueError(
            f"{path} is of another version, in the format {settings['format']!r}; this one reads {FORMAT!r}"
        )
    for name, (fits, wants) in SETTINGS.items():
        if name not in settings:
            raise ValueError(f"{path} is damaged: it does not say {name}")
        if not fits(settings[name]):
            raise ValueError(f"{path} is damaged: {name} is {str(settings[name])[:80]!r}; it must be {wants}")
    if isinstance(settings.get("host"), str):
        raise ValueError(f"{path} holds its environments as a pickle, which can run code, and is not read: an earlier "
                         "release wrote it. Its tensors are open to safetensors.torch.load_file")  # fmt: skip
    return settings


def _check_exists(path: Path) -> None:
    if not path.exists():
        raise ValueError(f"there is no file {path}")


def tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file. Raises ValueError if it is damaged."""
    _check_exists(path)
    return read_tensors(path)


class Saved:
    """The file of an agent, read once. Raises ValueError as `about`."""

    def __init__(self, path: Path):
        self.path, self.settings = path, about(path)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Raises ValueError if the file is damaged."""
        return tensors(self.path)


def whole(path: Path) -> Saved:
    """The file of an agent, all of which has been read. Raises ValueError if it is damaged."""
    saved = Saved(path)
    _ = saved.tensors
    return saved


def newest(paths: Sequence[Path], read: Callable[[Path], T]) -> T | None:
    """Read the last path that can be read, and return the result; None without paths.

    Prints a line for each later one. Raises ValueError if none can be read.
    """
    for path in reversed(paths):
        try:
            return read(path)
        except ValueError as error:
            print(f"{error}: skipped", flush=True)
    if paths:
        raise ValueError(f"no file of an agent in {paths[0].parent} can be read: delete them to begin anew")
    return None


def score(path: Path, agent: Agent) -> float:
    """The score in a file that an earlier part of an agent's run wrote, else minus infinity."""
    try:
        settings = about(path)
    except ValueError:
        return float("-inf")
    same = {"algorithm": type(agent).__name__, "env": agent.env_name, "seed": agent.seed}
    before = all(settings[name] == x for name, x in same.items()) and settings["num_timesteps"] <= agent.num_timesteps
    score = settings.get("score")
    return score if before and score is not None else float("-inf")


def load(kind: type[Agent], saved: Saved, env: str | Env | VectorEnv | None, options: dict[str, Any]) -> Agent:
    """An agent from a file. kind: its class, or a parent class."""
    from tutti.rl.algorithms import ALGORITHMS, algorithm

    path, settings = saved.path, saved.settings
    name = settings["algorithm"]
    if name not in ALGORITHMS and name != kind.__name__:
        raise ValueError(f"{path} is a {name}, an algorithm of your own: load it by its class, as in {name}.load(path)")
    own = kind if name == kind.__name__ else algorithm(name)
    if not issubclass(own, kind):
        raise ValueError(f"{path} is a {settings['algorithm']}, not a {kind.__name__}")
    if env is None and settings["env"] is not None:
        env = _by_name(settings["env"], path)
    if env is None:
        raise ValueError(f"{path} does not hold the environment of the agent, which was no name: pass one with the "
                         f"same spaces, as in {kind.__name__}.load(path, env=env), also for predict alone")  # fmt: skip
    if missing := [name for name in settings["unsaved"] if name not in options]:
        raise ValueError(f"{path} was saved with a function as {missing[0]}, which a file cannot hold: pass "
                         f"load(..., {missing[0]}=...)")  # fmt: skip
    arguments = {name: tuple(x) if isinstance(x, list) else x for name, x in settings["options"].items()
             if name not in own.unused}  # fmt: skip
    arguments |= {"seed": settings["seed"], "level": settings["level"], "threads": settings["threads"]}
    if settings.get("policy") not in (None, *POLICIES):
        raise ValueError(f"{path} is damaged: policy is {str(settings['policy'])[:80]!r}; it must be one of {POLICIES}")
    _check_options(own, arguments, path)
    if not isinstance(env, str | Env):
        arguments.pop("n_envs", None)  # a vector of environments says how many it has
    stored = arguments.keys() - options.keys()
    agent = own(env=env, _stored=stored, **{"policy": settings.get("policy"), **arguments, **options})
    restore(agent, saved)
    return agent


def _check_options(kind: type[Agent], stored: dict[str, Any], path: Path) -> None:
    try:
        configured(kind, {k: x for k, x in stored.items() if k not in ("seed", "level", "threads")})
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if stored["level"] not in LEVELS:
        raise ValueError(f"{path} is damaged: level is {stored['level']!r}; it must be one of {', '.join(LEVELS)}")


def _by_name(name: str, path: Path) -> str:
    """The name of an environment that a file gives. gymnasium imports what stands before the colon of "module:id",
    which runs code: only what is imported already is taken."""
    module, colon, _ = name.removeprefix("gymnasium:").rpartition(":")
    if colon and module not in ("native", "envpool", "dm_control") and module not in sys.modules:
        raise ValueError(f"{path} names the environment {name}, which would import the module {module}: import it "
                         f"before, or pass env={name!r}")  # fmt: skip
    return name


def restore(agent: Agent, file: Saved) -> None:
    """Continue an agent from a file of one with the same options, in new episodes if the agent has other environments
    than the file: those of the host instead of pure ones, or another number of them."""
    path, settings, saved = file.path, file.settings, file.tensors
    if agent.config.n_envs != settings["options"].get("n_envs", agent.config.n_envs):
        settings, saved = _without_envs(agent, settings, saved, path)
    elif not isinstance(agent.env, Env):
        saved = {name: x for name, x in saved.items() if not name.startswith("actor.")}
    arrays = {name.removeprefix(HOST): x for name, x in saved.items() if name.startswith(HOST)}
    saved = {name: x for name, x in saved.items() if not name.startswith(HOST)}
    check_fit(leaves(agent.program.state()), saved, path, "the agent")
    host = None
    if settings.get("host") is not None and not isinstance(agent.env, Env):
        try:
            host = plain.unpack(settings["host"], {name: x.numpy() for name, x in arrays.items()})
            agent.host.restore(agent, host)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
            raise ValueError(f"{path}: the state of its environments does not fit {agent.env.name}: {error}") from error
    agent.program.load(with_leaves(agent.program.state(), saved))
    agent.num_timesteps, agent.predictions = settings["num_timesteps"], settings["predictions"]
    agent.episodes.extend(map(tuple, settings["episodes"]))
    agent.warm_until = settings["warm_until"]


def _without_envs(agent: Agent, settings: dict[str, Any], saved: dict[str, Tensor],
                  path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:  # fmt: skip
    """Settings and tensors without the state of single environments. Warns if that drops a replay."""
    state, count = leaves(agent.program.state()), settings["options"]["n_envs"]
    if any(name.startswith("replay.") for name in saved):
        warnings.warn(f"{path} has the replay of {count} environments, and the agent has {agent.config.n_envs}: it is "
                      "left out, and a new one begins", stacklevel=5)  # fmt: skip
        settings = {**settings, "warm_until": settings["num_timesteps"]}
    remaining = {name: x for name, x in saved.items() if not name.startswith(LEFT_OUT)}
    for name in remaining.keys() & state.keys():
        if name.endswith(".return") and remaining[name].shape != state[name].shape:  # of an episode under way
            remaining[name] = state[name]
    return {**settings, "host": None}, remaining


def check_fit(state: dict[str, Tensor], saved: dict[str, Tensor], path: Path, whose: str) -> None:
    """Raise ValueError unless the tensors of a file are those of a state, with equal shapes and dtypes. Whole groups of
    `LEFT_OUT` may be missing."""
    groups = {group for group in LEFT_OUT if not any(name.startswith(group) for name in saved)}
    for name in state:
        if name not in saved and not any(name.startswith(group) for group in groups):
            raise ValueError(f"{path} has no {name}, which {whose} has: the environment or an option differs from that "
                             "of the file, or it is damaged")  # fmt: skip
    for name, x in saved.items():
        if name not in state or state[name].shape != x.shape:
            here = tuple(state[name].shape) if name in state else "nothing"
            raise ValueError(f"{path} has {name} of the shape {tuple(x.shape)}, and {whose} has {here}: the "
                             "environment or an option differs from that of the file")  # fmt: skip
        if state[name].dtype != x.dtype:
            raise ValueError(f"{path} has {name} of {x.dtype}, and {whose} has {state[name].dtype}: it is damaged")


def equal(a: Agent, b: Agent) -> bool:
    """Whether two agents have equal states, bit for bit."""
    one, two = leaves(a.program.state()), leaves(b.program.state())
    return one.keys() == two.keys() and all(torch.equal(x, two[name]) for name, x in one.items())
