"""Environments of PettingZoo: several agents, in parallel or in turns, some of which may leave before the end."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils.conversions import aec_to_parallel, turn_based_aec_to_parallel

from tutti.rl.adapt import checked, layout, padding, snapshot
from tutti.rl.core.vector import Moved, VectorEnv


class PettingZoo(VectorEnv):
    """n environments of PettingZoo, stepped one after the other in this process.

        env = PettingZoo(simple_spread_v3.parallel_env, 8)
        obs = env.reset(seed=0)  # float32 (8, 3, 18)

    make: returns a `ParallelEnv`, or an `AECEnv`: one that is parallelizable is stepped by all agents together, another
        one by one agent after the other.
    limit: steps of an episode, by default what the environment calls `max_cycles`.
    check: whether each observation is compared with its space.

    Observations and actions of unlike agents are padded with zeros to the largest; what is padded to an action is
    ignored. Discrete actions that an agent does not have are masked. Masks come from observations that are dicts
    {"observation", "action_mask"}, of which only "observation" is observed, or from `info["action_mask"]`.

    An agent that has left the episode observes zeros and gets reward 0; `alive`, bool (n, agents), says who has not.
    Its rows are not `valid`, so that nothing is learned from them. Its actions are not played, nor are those of agents
    that are not to move. Where an agent has no possible action, its mask has action 0 alone. Each agent is terminated
    or truncated by itself; one that disappears without either counts as terminated. An episode ends when all agents
    have left. It counts as truncated where one of the last was truncated only.
    """

    gaps = True

    def __init__(
        self, make: Callable[[], ParallelEnv | AECEnv], n: int, *, limit: int | None = None, check: bool = False
    ):
        if n < 1:
            raise ValueError(f"n is {n}; a vector of environments has at least 1 instance")
        self.envs = [_parallel(make()) for _ in range(n)]
        first = self.envs[0]
        self.n, self.check, self.steps = n, check, 0
        self.name = str(first.metadata.get("name", type(first.unwrapped).__name__))
        self.agents = tuple(first.possible_agents)
        self.limit = limit if limit is not None else getattr(first.unwrapped, "max_cycles", None)
        self.spaces = [first.observation_space(agent) for agent in self.agents], self._spaces(first.action_space)
        # In the observations of an agent: the part that it observes
        self.seen = [_seen(space) for space in self.spaces[0]]
        observed = [
            layout.plain(x, f"{self.name}, {a}: observation") for x, a in zip(self.seen, self.agents, strict=True)
        ]
        self.acted = [
            layout.plain(x, f"{self.name}, {a}: action") for x, a in zip(self.spaces[1], self.agents, strict=True)
        ]
        self.observation_space = padding.widest(observed, f"{self.name}: observations")
        self.action_space = padding.widest(self.acted, f"{self.name}: actions")
        self.starts = (_starts(self.seen, observed, self.observation_space),
                       _starts(self.spaces[1], self.acted, self.action_space))  # fmt: skip
        self.nothing = [layout.scatter(x, layout.zeros(p, 1), 1)[0] for x, p in zip(self.seen, observed, strict=True)]
        self.alive = np.ones((n, len(self.agents)), bool)
        self.masked: list[dict[str, Any]] = [{} for _ in range(n)]  # masks by agents
        self.is_masked = isinstance(self.action_space, spaces.Discrete) and any(
            x != self.action_space for x in self.acted
        )

    def reset(self, seed: int | None = None) -> layout.Batch:
        self.steps = 0
        obs = self._gather([self._begin(i, None if seed is None else seed + i) for i in range(self.n)])
        self.obs = obs
        return obs

    def step(self, action: Any) -> Moved:
        actions = self._actions(action)
        self.steps += 1
        reward = np.zeros((self.n, len(self.agents)))
        terminated, truncated = np.zeros(self.n, bool), np.zeros(self.n, bool)
        valid, ended, cut = self.alive.copy(), np.zeros_like(self.alive), np.zeros_like(self.alive)
        last, first, masks, overview = [], [], {}, {}
        for i, env in enumerate(self.envs):
            by_agent = {agent: actions[k][i] for k, agent in enumerate(self.agents) if agent in env.agents}
            try:
                obs, rewards, ends, cuts, infos = env.step(by_agent)
            except Exception as error:
                raise checked.StepError(self.name, i, self.steps, by_agent, checked.words(error)) from error
            obs = self._see(i, obs, infos)
            for k, agent in enumerate(self.agents):
                reward[i, k] = checked.number(self.name, i, agent, rewards.get(agent, 0))
                ended[i, k], cut[i, k] = bool(ends.get(agent, False)), bool(cuts.get(agent, False))
            ended[i] |= ~self.alive[i] & ~cut[i]
            self.alive[i] &= ~(ended[i] | cut[i])
            ended[i] &= valid[i]
            cut[i] &= valid[i] & ~ended[i]
            if not self.alive[i].any():
                truncated[i] = cut[i].any()
                terminated[i] = not truncated[i]
                obs = copy.deepcopy(obs)  # the environment may write the next one to the same arrays
                masks[i] = self._mask(i, [agent in obs for agent in self.agents])
                overview[i] = self._overview(env)
                first.append((i, self._begin(i)))
            last.append(obs)
        rewards = checked.rewards(self.name, reward, self.steps)
        before = self.obs = self._gather(last)
        if first:
            for i, obs in first:
                last[i] = obs
            self.obs = self._gather(last)
        return Moved(self.obs, rewards, terminated, truncated, before, _but(self.masks(), masks),
                     _but(self.overview(), overview), valid, ended, cut)  # fmt: skip

    def masks(self) -> np.ndarray | None:
        if not self.is_masked or not isinstance(self.action_space, spaces.Discrete):
            return None
        return np.stack([self._mask(i, alive) for i, alive in enumerate(self.alive)])

    def _mask(self, i: int, alive: Any) -> np.ndarray:
        """The masks of an instance, (agents, actions). alive: which agents are."""
        width = self.action_space.n if isinstance(self.action_space, spaces.Discrete) else 1
        mask = np.zeros((len(self.agents), int(width)), bool)
        for k, (agent, space) in enumerate(zip(self.agents, self.acted, strict=True)):
            if alive[k] and isinstance(space, spaces.Discrete):
                mask[k, : space.n] = self.masked[i].get(agent, True)
        mask[..., 0] |= ~mask.any(-1)
        return mask

    def overview(self) -> np.ndarray | None:
        overviews = [x for x in map(self._overview, self.envs) if x is not None]
        return np.stack(overviews) if overviews else None

    def _overview(self, env: Any) -> np.ndarray | None:
        try:
            return np.array(env.state(), np.float32).reshape(-1)
        except (NotImplementedError, AttributeError):
            return None

    def draw(self, i: int = 0) -> np.ndarray | None:
        env = self.envs[i]
        return np.asarray(env.render()) if getattr(env, "render_mode", None) == "rgb_array" else None

    def state(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("alive", "masked", "is_masked", "steps", "obs")}
        return copy.deepcopy({"envs": [snapshot.save(env) for env in self.envs], "own": own})

    def restore(self, state: dict[str, Any]) -> layout.Batch:
        if len(state["envs"]) != self.n:
            raise ValueError(f"the state is of {len(state['envs'])} instances of {self.name}, not of {self.n}")
        for env, saved in zip(self.envs, state["envs"], strict=True):
            snapshot.load(env, saved)
        vars(self).update(copy.deepcopy(state["own"]))
        return self.obs

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def _spaces(self, of: Callable[[str], spaces.Space]) -> list[spaces.Space]:
        return [of(agent) for agent in self.agents]

    def _begin(self, i: int, seed: int | None = None) -> dict[str, Any]:
        try:
            obs, infos = self.envs[i].reset(seed=seed)
        except Exception as error:
            raise checked.StepError(self.name, i, self.steps, None, checked.words(error)) from error
        return self._see(i, obs, infos)

    def _see(self, i: int, obs: dict[str, Any], infos: dict[str, Any]) -> dict[str, Any]:
        """Keeps who is alive and the masks of an instance. Returns the observations without masks."""
        present = self.envs[i].agents
        self.alive[i] = [agent in present for agent in self.agents]
        self.masked[i] = {a: info["action_mask"] for a, info in infos.items() if "action_mask" in info}
        for k, agent in enumerate(self.agents):
            if self.seen[k] is not self.spaces[0][k] and agent in obs:
                self.masked[i][agent] = obs[agent]["action_mask"]
                obs = {**obs, agent: obs[agent]["observation"]}
        self.is_masked |= bool(self.masked[i])
        return obs

    def _gather(self, values: list[dict[str, Any]]) -> layout.Batch:
        batches = []
        for k, (agent, space) in enumerate(zip(self.agents, self.seen, strict=True)):
            column = [value.get(agent, self.nothing[k]) for value in values]
            batch = checked.observations(f"{self.name}, {agent}", space, column, self.steps, self.check)
            batches.append(padding.fit(batch, self.observation_space))
        return padding.stack(batches, axis=1)

    def _actions(self, action: Any) -> list[list[Any]]:
        """The actions of each agent in all instances."""
        for path, x in layout.leaves(action).items():
            if x.shape[:2] != (self.n, len(self.agents)):
                where = f" {'/'.join(path)}" if path else ""
                raise ValueError(
                    f"actions{where} have shape {x.shape}; those for {self.name} begin with {self.n} instances and "
                    f"{len(self.agents)} agents"
                )
        return [
            layout.scatter(space, padding.cut(layout.rows(action, (slice(None), k)), plain), self.n)
            for k, (space, plain) in enumerate(zip(self.spaces[1], self.acted, strict=True))
        ]


def _but(now: np.ndarray | None, ended: dict[int, Any]) -> np.ndarray | None:
    """Replace the rows of instances whose episode ended. None if there are no arrays or no episode ended."""
    if now is None or not ended:
        return None
    for i, x in ended.items():
        now[i] = x
    return now


def _starts(own: list[spaces.Space], plain: list[spaces.Space], widest: spaces.Space) -> Any:
    """`layout.starts` of all agents, (agents, ...), padded like their values."""
    if all(layout.starts(space) is None for space in own):
        return None
    each = []
    for space, part in zip(own, plain, strict=True):
        zero = layout.zeros(part, 1)
        each.append(padding.fit(layout.shifted(zero, layout.starts(space)), widest))
    return layout.rows(padding.stack(each, axis=1), 0)


def _parallel(env: Any) -> Any:
    if isinstance(env, ParallelEnv):
        return env
    if not isinstance(env, AECEnv):
        raise ValueError(f"a PettingZoo environment is made by a function that returns one, not {env!r}")
    return aec_to_parallel(env) if env.metadata.get("is_parallelizable") else turn_based_aec_to_parallel(env)


def _seen(space: spaces.Space) -> spaces.Space:
    """The space of the observation without its action mask."""
    if isinstance(space, spaces.Dict) and space.spaces.keys() == {"observation", "action_mask"}:
        return space["observation"]
    return space
