"""Pictures that move: an agent in an environment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tutti.rl.core import collect, keys
from tutti.rl.core.env import Env
from tutti.rl.core.host import HostActor

if TYPE_CHECKING:
    from tutti.rl.core.agent import Agent


def record(agent: Agent, to: Path, steps: int = 500, seed: int = 1, fps: int = 30) -> tuple[int, float]:
    """Write the first episode as a GIF. Returns (frames, the return of the episode, or what there was of it).

    Raises ValueError for an environment that has no pictures.
    """
    from PIL import Image

    if to.suffix != ".gif":
        raise ValueError(f"{to}: pictures are written as .gif")
    frames, total = _pure(agent, steps, seed) if isinstance(agent.env, Env) else _host(agent, steps, seed)
    images = [Image.fromarray(x) for x in frames]
    to.parent.mkdir(parents=True, exist_ok=True)
    images[0].save(to, save_all=True, append_images=images[1:], duration=round(1000 / fps), loop=0)
    return len(images), total


def _picture(picture: np.ndarray | None, name: str) -> np.ndarray:
    if picture is None:
        raise ValueError(f"{name} has no pictures")
    return picture


def _pure(agent: Agent, steps: int, seed: int) -> tuple[list[np.ndarray], float]:
    env, key = agent.env, keys.make(seed)
    assert isinstance(env, Env)
    actor, frames, total = collect.begin(agent, env, key, 1), [], 0.0
    policy = agent.acting(agent.program.state()["learner"])
    for t in range(steps):
        frames.append(_picture(env.draw(actor["env"], 0), env.name))
        actor, row = collect.rollout(agent, env, policy, actor, keys.fold(key, t), 1, explore=False)
        total += float(row["reward"].mean())
        if bool(row["terminated"].any() | row["truncated"].any()):
            break
    return frames, total


def _host(agent: Agent, steps: int, seed: int) -> tuple[list[np.ndarray], float]:
    from tutti.rl.by_name import make

    if agent.env_name is None:
        raise ValueError("the agent's environment was not given by name: it cannot be made again for pictures")
    env = make(agent.env_name, 1, render_mode="rgb_array")
    assert not isinstance(env, Env)
    actor, frames, total = HostActor(agent, env, seed, explore=False), [], 0.0
    for _ in range(steps):
        frames.append(_picture(env.draw(0), env.name))
        row = actor.collect(agent, 1)
        total += float(row["reward"].mean())
        if bool(row["terminated"].any() | row["truncated"].any()):
            break
    env.close()
    return frames, total
