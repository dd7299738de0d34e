"""Data sets that our own agents record, of one quality or of several.

    record(agent, "data/pendulum-v0", 50)      # 50 episodes, in Minari's format
    data = make("pendulum-mixed")              # trains an agent, and records it at several stages

Data of mixed quality are where offline algorithms differ: cloning them gives their average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from tutti.rl.adapt import layout, minari
from tutti.rl.adapt.minari import Episode
from tutti.rl.core import collect, keys
from tutti.rl.core.agent import Agent
from tutti.rl.core.env import Env
from tutti.rl.core.evaluate import own_env, shares
from tutti.rl.core.host import HostActor, acting
from tutti.rl.core.vector import VectorEnv

Tree = dict[str, Any]
POLICIES = ("explore", "best", "random")
CHUNK = 64


@dataclass(frozen=True)
class Stage:
    """steps: steps that the agent has learned for in all when the stage begins. episodes: number of episodes to record.
    policy: one of `POLICIES`."""

    steps: int
    episodes: int
    policy: str = "explore"


@dataclass(frozen=True)
class Source:
    """Agent that records data, and its stages. preset: preset of the agent. options, env: options and environment
    instead of those of the preset."""

    preset: str
    stages: tuple[Stage, ...]
    options: tuple[tuple[str, Any], ...] = ()
    env: str = ""


# Mixed data have random, bad and good episodes. Random play in Catch returns about -0.6, so that cloning it does too.
SOURCES = {
    "pendulum-mixed": Source("sac-pendulum", (
        Stage(0, 20, "random"), Stage(3_500, 20), Stage(4_600, 20), Stage(9_000, 20),
    ), (("gradient_steps", 32),)),
    "cartpole-expert": Source("ppo-cartpole", (Stage(100_000, 10),)),
    "catch-random": Source("ppo-cartpole", (Stage(0, 500, "random"),), env="Catch"),
    "catch-expert": Source("ppo-cartpole", (Stage(60_000, 50, "best"),), env="Catch"),
}  # fmt: skip


@lru_cache(maxsize=8)
def make(name: str, seed: int = 0, level: str = "eager") -> tuple[Episode, ...]:
    """Make the episodes of a row of `SOURCES`. Trains the agent that records them, which takes up to a minute."""
    from tutti.rl.algorithms import algorithm
    from tutti.rl.presets import preset

    if name not in SOURCES:
        raise ValueError(f"there are no data {name!r}; there are {', '.join(SOURCES)}")
    source = SOURCES[name]
    how = preset(source.preset)
    agent = algorithm(how.algorithm)(
        source.env or how.env, seed=seed, level=level, **{**how.options, **dict(source.options)}
    )
    recorded: list[Episode] = []
    for i, stage in enumerate(source.stages):
        if stage.steps > agent.num_timesteps:
            agent.learn(stage.steps - agent.num_timesteps)
        recorded += episodes(agent, stage.episodes, stage.policy, seed=seed * len(source.stages) + i)
    return tuple(recorded)


def record(agent: Agent, folder: str | Path, count: int, policy: str = "explore", seed: int = 1, env: Any = None,
           **about: Any) -> None:  # fmt: skip
    """Write `count` episodes of an agent as a data set in Minari's format. about: options of `minari.save`."""
    write(folder, episodes(agent, count, policy, seed, env), agent, **about)


def write(folder: str | Path, recorded: Sequence[Episode], agent: Agent, **about: Any) -> None:
    """Write episodes, which may come from several agents with the spaces of this one."""
    defaults = {"observation_space": agent.env.observation_space, "action_space": agent.env.action_space,
                "algorithm": type(agent).__name__}  # fmt: skip
    minari.save(folder, recorded, **{**defaults, **about})


def episodes(agent: Agent, count: int, policy: str = "explore", seed: int = 1, env: Any = None) -> list[Episode]:
    """The first episodes of instances of an environment, besides those that the agent learns in.

    policy: "explore" acts as in learning, "best" as in `evaluate`, "random" uniformly. env: instead of the agent's; of
    a `VectorEnv`, each instance contributes equally many of the episodes, up to one.
    Raises ValueError for observations that are neither a Box nor Discrete, and for environments of the host that were
    not given by name.
    """
    if policy not in POLICIES:
        raise ValueError(f"there is no policy {policy!r}; there are {', '.join(POLICIES)}")
    if not isinstance(agent.env.observation_space, spaces.Box | spaces.Discrete):
        raise ValueError(f"observations of {agent.env.name} are {agent.env.observation_space}; only those of a Box or "
                         "Discrete can be recorded")  # fmt: skip
    env, must_close = own_env(agent, env, agent.config.n_envs, "episodes(env=)")
    pure = isinstance(env, Env)
    chunks = _pure(agent, env, count, policy, seed) if pure else _host(agent, env, policy, seed)
    of_each = shares(count, count if pure else env.n)
    open_: list[list[Tree]] = [[] for _ in of_each]
    per_instance: list[list[Episode]] = [[] for _ in of_each]
    for chunk in chunks:
        for i, (parts, finished, share) in enumerate(zip(open_, per_instance, of_each, strict=True)):
            begin = 0
            ends = (chunk["terminated"][:, i] | chunk["truncated"][:, i]).nonzero().flatten().tolist()
            for end in ends[: share - len(finished)]:
                parts.append({name: x[begin : end + 1, i] for name, x in chunk.items()})
                finished.append(_episode(agent, parts))
                parts.clear()
                begin = end + 1
            if len(finished) < share:
                parts.append({name: x[begin:, i] for name, x in chunk.items()})
        if all(len(finished) == share for finished, share in zip(per_instance, of_each, strict=True)):
            break
    if must_close:
        env.close()
    return [episode for finished in per_instance for episode in finished]


def _episode(agent: Agent, parts: list[Tree]) -> Episode:
    """An episode of its rows."""
    rows = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    obs = torch.cat([rows["obs"], rows["last"][-1:]])
    space = agent.env.observation_space
    discrete = isinstance(space, spaces.Discrete)
    if agent.features.picture is not None:
        pixels = obs if obs.dtype == torch.uint8 else (255 * obs).round()
        plain = agent.features.picture(pixels).numpy().astype(np.uint8)
    elif discrete:
        plain = obs.argmax(-1).numpy()
    else:
        plain = obs.unflatten(-1, space.shape or (1,)).numpy().astype(space.dtype)
    action = layout.shifted(agent.to_env(rows["action"]).numpy(), layout.starts(agent.env.action_space), -1)
    return Episode(plain, action, rows["reward"].numpy(), rows["terminated"].numpy(), rows["truncated"].numpy())


def _pure(agent: Agent, env: Env, n: int, policy: str, seed: int):
    key = keys.fold(keys.make(seed), 11)
    actor, t = collect.begin(agent, env, key, n), 0
    names = ("obs", "action", "reward", "terminated", "truncated", "last")
    act = random_action(agent) if policy == "random" else None

    def chunk(run: Tree, actor: Tree, key: Tensor) -> tuple[Tree, Tree]:
        acting = agent.acting(run["learner"])
        actor, rows = collect.rollout(agent, env, acting, actor, key, CHUNK, policy == "explore", act)
        return actor, {name: rows[name] for name in names}

    while True:
        t += 1
        actor, rows = agent.program.ask(chunk, actor, keys.fold(key, t), level="O0")
        yield rows


def _host(agent: Agent, env: VectorEnv, policy: str, seed: int):
    of_env = keys.seed(keys.fold(keys.make(seed), 11))
    actor, act = HostActor(agent, env, of_env, policy == "explore"), acting(agent, policy == "explore")
    if policy == "random":
        free = random_action(agent)

        def act(run: Tree, seen: Tree, carry: Tree, key: Tensor) -> tuple[Tensor, Tensor, Tree, Tree]:
            action, extra, carry = free({}, seen, carry, key, True)
            return action, agent.to_env(action), extra, carry

    while True:
        with torch.no_grad():
            yield actor.collect(agent, CHUNK, act=act)


def random_action(agent: Agent) -> Any:
    """An `act` with uniform actions, within the bounds of a Box."""
    space, d = agent.env.action_space, agent.distribution

    def act(policy: Tree, seen: Tree, carry: Tree, key: Tensor, explore: bool) -> tuple[Tensor, Tree, Tree]:
        rows = seen["obs"].shape[:-1]
        if isinstance(space, spaces.Box):
            low, high = (torch.from_numpy(np.asarray(x)) for x in (space.low, space.high))
            return d.from_env(keys.uniform(key, (*rows, *space.shape), low, high)), {}, carry
        logits = torch.zeros(*rows, d.size)
        mask = seen.get("mask")
        return d.sample(logits if mask is None else torch.where(mask, logits, -1e9), key), {}, carry

    return act
