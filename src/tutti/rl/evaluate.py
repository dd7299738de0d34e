"""How well a policy acts: returns of whole episodes, in environments of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tutti.rl import collect, keys
from tutti.rl.env import Env
from tutti.rl.host import HostActor
from tutti.rl.vector import VectorEnv

if TYPE_CHECKING:
    from tutti.rl.agent import Agent, Evaluation

CHUNK = 64  # steps between looks at which episodes have ended
LONGEST = 100_000  # steps of an episode


def evaluate(agent: Agent, episodes: int, deterministic: bool, env: Any, seed: int) -> Evaluation:
    """Returns and lengths of the first episode of each of `episodes` instances. See `Agent.evaluate`."""
    from tutti.rl.agent import Evaluation

    if env is None:
        if isinstance(agent.env, VectorEnv) and agent.env_name is None:
            raise ValueError(f"{agent.env.name} was not given by name: pass evaluate(env=), a VectorEnv of its own")
        env = agent.env if isinstance(agent.env, Env) else agent.env_name
    made = isinstance(env, str)
    if isinstance(env, str):
        from tutti.rl.by_name import make

        env = make(env, episodes)
    pure = isinstance(env, Env)
    chunks = _pure(agent, env, episodes, deterministic, seed) if pure else _host(agent, env, deterministic, seed)
    n = episodes if pure else env.n
    returns: list[np.ndarray | None] = [None] * n
    lengths = np.zeros(n)
    steps = 0
    for chunk in chunks:
        ended = chunk["length"] > 0
        for i in range(n):
            if returns[i] is None and bool(ended[:, i].any()):
                t = int(ended[:, i].long().argmax())
                returns[i], lengths[i] = chunk["return"][t, i].numpy(), float(chunk["length"][t, i])
        steps += len(ended)
        if all(x is not None for x in returns):
            break
        if steps >= LONGEST:
            raise ValueError(f"episodes of {env.name} have not ended after {steps:,} steps; give it a limit of steps")
    if made and not pure:
        env.close()
    return Evaluation(np.stack([x for x in returns if x is not None]), lengths)


def _pure(agent: Agent, env: Env, n: int, deterministic: bool, seed: int):
    """Chunks of a pure environment."""
    key = keys.fold(keys.make(seed), 7)
    actor = collect.begin(agent, env, key, n)
    chunk = _rollout(agent, env, deterministic)
    t = 0
    while True:
        t += 1
        actor, told = agent.program.ask(chunk, actor, keys.fold(key, t), level="O0")
        yield told


def _rollout(agent: Agent, env: Env, deterministic: bool):
    """A rollout of the agent's present policy, as a function of its run; the same object for the same arguments."""

    def chunk(run: dict[str, Any], actor: dict[str, Any], key: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
        actor, rows = collect.rollout(agent, env, agent.acting(run["learner"]), actor, key, CHUNK, not deterministic)
        return actor, {name: rows[name] for name in ("return", "length")}

    return agent.functions.setdefault(("evaluate", env, deterministic), chunk)


def _host(agent: Agent, env: VectorEnv, deterministic: bool, seed: int):
    """Chunks of an environment of the host."""
    actor = HostActor(agent, env, seed, not deterministic)
    while True:
        with torch.no_grad():
            yield actor.collect(agent, CHUNK)
