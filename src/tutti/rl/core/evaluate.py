"""Evaluation of policies: returns of whole episodes, in separate environments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from tutti.rl.core import collect, keys
from tutti.rl.core.env import Env
from tutti.rl.core.host import HostActor
from tutti.rl.core.vector import VectorEnv

if TYPE_CHECKING:
    from tutti.rl.core.agent import Agent

CHUNK = 64  # steps between looks at which episodes have ended
LONGEST = 100_000  # steps of an episode


@dataclass(frozen=True)
class Evaluation:
    """Returns, float (episodes,), or (episodes, agents), and lengths of episodes."""

    returns: np.ndarray
    lengths: np.ndarray

    @property
    def mean(self) -> float:
        return float(self.returns.mean())

    @property
    def std(self) -> float:
        return float(self.returns.std())

    def __str__(self) -> str:
        return f"return {self.mean:.1f} +- {self.std:.1f} over {len(self.returns)} episodes"


def evaluate(agent: Agent, episodes: int, deterministic: bool, env: Any, seed: int) -> Evaluation:
    """Returns and lengths of the first episodes of the instances of an environment. See `Agent.evaluate`."""
    env, must_close = own_env(agent, env, episodes, "evaluate(env=)")
    pure = isinstance(env, Env)
    chunks = _pure(agent, env, episodes, deterministic, seed) if pure else _host(agent, env, deterministic, seed)
    of_each = shares(episodes, episodes if pure else env.n)
    per_instance: list[list[tuple[np.ndarray, float]]] = [[] for _ in of_each]
    steps = 0
    for chunk in chunks:
        for i, (finished, share) in enumerate(zip(per_instance, of_each, strict=True)):
            for t in chunk["length"][:, i].nonzero().flatten().tolist()[: share - len(finished)]:
                finished.append((chunk["return"][t, i].numpy(), float(chunk["length"][t, i])))
        steps += len(chunk["length"])
        if all(len(finished) == share for finished, share in zip(per_instance, of_each, strict=True)):
            break
        if steps >= LONGEST * max(of_each):
            raise ValueError(f"episodes of {env.name} have not ended after {steps:,} steps; give it a limit of steps")
    if must_close:
        env.close()
    returns, lengths = zip(*(episode for finished in per_instance for episode in finished), strict=True)
    return Evaluation(np.stack(returns), np.array(lengths))


def shares(count: int, n: int) -> list[int]:
    """Number of episodes, out of `count`, that each of n instances contributes: its first ones, so that short episodes
    are not preferred."""
    if count < 1:
        raise ValueError(f"{count} episodes were asked for; it must be at least 1")
    return [count // n + (i < count % n) for i in range(n)]


def own_env(agent: Agent, env: Any, n: int, how: str) -> tuple[Any, bool]:
    """(environment separate from the one that the agent learns in, whether the caller must close it).

    env: an environment, a name, or None for that of the agent. n: instances of one that is made. how: to pass `env`.
    Raises ValueError for environments of the host that were not given by name.
    """
    if env is None:
        if isinstance(agent.env, VectorEnv) and agent.env_name is None:
            raise ValueError(f"{agent.env.name} was not given by name: pass {how}, a VectorEnv of its own")
        env = agent.env if isinstance(agent.env, Env) else agent.env_name
    from tutti.rl.by_name import adapted, make

    is_object = not isinstance(env, str)
    result = adapted(env) if is_object else make(env, n)
    check_spaces(agent, result)
    return result, not is_object and not isinstance(result, Env)


def check_spaces(agent: Agent, env: Env | VectorEnv) -> None:
    """Raise ValueError unless an environment has the kinds and sizes of observations, actions and agents that those of
    an agent's have."""
    for name in ("observation_space", "action_space"):
        ours, theirs = getattr(agent.env, name), getattr(env, name)
        if not _alike(ours, theirs):
            raise ValueError(f"{env.name} has the {name} {theirs}, and {agent.env.name}, which the agent was made for, "
                             f"has {ours}")  # fmt: skip
    if len(env.agents) != len(agent.env.agents):
        raise ValueError(f"{env.name} has {len(env.agents)} agents, and {agent.env.name}, which the agent was made "
                         f"for, has {len(agent.env.agents)}")  # fmt: skip


def _alike(a: spaces.Space, b: spaces.Space) -> bool:
    """Whether two spaces have values of one layout; the bounds of a Box may differ."""
    if isinstance(a, spaces.Box) and isinstance(b, spaces.Box):
        return a.shape == b.shape and (a.dtype == np.uint8) == (b.dtype == np.uint8)
    if isinstance(a, spaces.Dict) and isinstance(b, spaces.Dict):
        return a.spaces.keys() == b.spaces.keys() and all(_alike(a[key], b[key]) for key in a.spaces)
    if isinstance(a, spaces.Discrete) and isinstance(b, spaces.Discrete):
        return (a.n, a.start) == (b.n, b.start)
    return a == b


def _pure(agent: Agent, env: Env, n: int, deterministic: bool, seed: int):
    """Chunks of a pure environment."""
    key = keys.fold(keys.make(seed), 7)
    actor = collect.begin(agent, env, key, n)
    chunk = _rollout(agent, env, deterministic)
    t = 0
    while True:
        t += 1
        actor, rows = agent.program.ask(chunk, actor, keys.fold(key, t), level="O0")
        yield rows


def _rollout(agent: Agent, env: Env, deterministic: bool):
    """A rollout of the agent's present policy, as a function of its run; the same object for the same arguments."""

    def chunk(run: dict[str, Any], actor: dict[str, Any], key: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
        actor, rows = collect.rollout(agent, env, agent.acting(run["learner"]), actor, key, CHUNK, not deterministic)
        return actor, {name: rows[name] for name in ("return", "length")}

    return agent.functions.setdefault(("evaluate", env, deterministic), chunk)


def _host(agent: Agent, env: VectorEnv, deterministic: bool, seed: int):
    """Chunks of an environment of the host."""
    actor = HostActor(agent, env, keys.seed(keys.fold(keys.make(seed), 7)), not deterministic)
    while True:
        with torch.no_grad():
            yield actor.collect(agent, CHUNK)
