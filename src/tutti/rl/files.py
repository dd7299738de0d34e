"""Agents in files: one safetensors file with all tensors of a run, and its settings as metadata."""

from __future__ import annotations

import base64
import json
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tutti.rl.env import Env
from tutti.rl.program import leaves, with_leaves
from tutti.rl.vector import VectorEnv

if TYPE_CHECKING:
    from tutti.rl.agent import Agent

FORMAT = "tutti.rl 1"


def save(agent: Agent, path: Path, replay: bool, score: float | None) -> Path:
    """Write a run. score: what an evaluation gave it. The file is complete or absent, even if the process is killed
    meanwhile."""
    from safetensors.torch import save_file

    from tutti.rl.agent import options_of, unsaved

    path.parent.mkdir(parents=True, exist_ok=True)
    state = agent.program.state()
    kept = state if replay else {k: v for k, v in state.items() if k != "replay"}
    about = {
        "format": FORMAT, "algorithm": type(agent).__name__, "env": agent.env_name, "seed": agent.seed,
        "options": options_of(agent.config), "unsaved": unsaved(agent.config), "episodes": list(agent.episodes),
        "level": agent.level, "threads": agent.threads,
        "warm_until": agent.warm_until if replay else agent.num_timesteps,
        "num_timesteps": agent.num_timesteps, "predictions": agent.predictions, "score": score,
    }  # fmt: skip
    if not isinstance(agent.env, Env):
        about["host"] = base64.b64encode(pickle.dumps(agent.host.state())).decode()
    unfinished = path.with_name(path.name + ".unfinished")
    tensors = {name: x.contiguous() for name, x in leaves(kept).items()}
    save_file(tensors, unfinished, {"about": json.dumps(about)})
    unfinished.replace(path)
    return path


def about(path: Path) -> dict[str, Any]:
    """The settings in a file. Raises ValueError for a file that `save` did not write."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        raise ValueError(f"there is no file {path}")
    try:
        with safe_open(path, "pt") as file:
            found = json.loads((file.metadata() or {}).get("about", "{}"))
    except SafetensorError as error:
        raise ValueError(f"{path} is not a file of an agent: {error}") from error
    if found.get("format") != FORMAT:
        raise ValueError(f"{path} is not a file of an agent; Agent.save writes one")
    return found


def score(path: Path, agent: Agent) -> float:
    """The score in a file that an earlier part of an agent's run wrote, else minus infinity."""
    try:
        found = about(path)
    except ValueError:
        return float("-inf")
    same = {"algorithm": type(agent).__name__, "env": agent.env_name, "seed": agent.seed}
    before = all(found[name] == x for name, x in same.items()) and found["num_timesteps"] <= agent.num_timesteps
    score = found.get("score")
    return score if before and score is not None else float("-inf")


def load(kind: type[Agent], path: Path, env: str | Env | VectorEnv | None, options: dict[str, Any]) -> Agent:
    """An agent from a file. kind: its class, or a parent class."""
    from tutti.rl.algorithms import ALGORITHMS, algorithm

    known = about(path)
    name = known["algorithm"]
    if name not in ALGORITHMS and name != kind.__name__:
        raise ValueError(f"{path} is a {name}, an algorithm of your own: load it by its class, as in {name}.load(path)")
    own = kind if name == kind.__name__ else algorithm(name)
    if not issubclass(own, kind):
        raise ValueError(f"{path} is a {known['algorithm']}, not a {kind.__name__}")
    env = known["env"] if env is None else env
    if env is None:
        raise ValueError(f"{path} does not say in which environment the agent acts; pass env=")
    if missing := [name for name in known["unsaved"] if name not in options]:
        raise ValueError(f"{path} was saved with a function as {missing[0]}, which a file cannot hold: pass "
                         f"load(..., {missing[0]}=...)")  # fmt: skip
    given = {name: tuple(x) if isinstance(x, list) else x for name, x in known["options"].items()
             if name not in own.unused}  # fmt: skip
    agent = own(
        env, **{"seed": known["seed"], "level": known["level"], "threads": known["threads"], **given, **options}
    )
    restore(agent, path)
    return agent


def restore(agent: Agent, path: Path) -> None:
    """Continue an agent from a file of one with the same options."""
    from safetensors.torch import load_file

    known = about(path)
    state, saved = leaves(agent.program.state()), load_file(path)
    for name, x in saved.items():
        if name not in state or state[name].shape != x.shape:
            held = tuple(state[name].shape) if name in state else "nothing"
            raise ValueError(f"{path} has {name} of the shape {tuple(x.shape)}, and the agent has {held}: the "
                             "environment or an option differs from that of the file")  # fmt: skip
    agent.program.load(with_leaves(agent.program.state(), saved))
    agent.num_timesteps, agent.predictions = known["num_timesteps"], known["predictions"]
    agent.episodes.extend(map(tuple, known["episodes"]))
    agent.warm_until = known["warm_until"]
    if known.get("host") and not isinstance(agent.env, Env):
        agent.host.restore(agent, pickle.loads(base64.b64decode(known["host"])))


def equal(a: Agent, b: Agent) -> bool:
    """Whether two agents have equal states, bit for bit."""
    one, two = leaves(a.program.state()), leaves(b.program.state())
    return one.keys() == two.keys() and all(torch.equal(x, two[name]) for name, x in one.items())
