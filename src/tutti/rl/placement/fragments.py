"""Measures what the fragments of an algorithm cost on this machine (`tutti.rl.placement.forecast.Costs`).

Each fragment runs in this process, compiled or not as the level says, for all environments and for the share of the
most ranks. A fragment on one core counts by the time that it has the core: what else the machine does is left out.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.utils import _pytree as pytree

from tutti.hardware import machine
from tutti.progress import Say, silent
from tutti.rl.adapt.pure import Pure
from tutti.rl.algorithms import algorithm
from tutti.rl.algorithms.families.off_policy import OffPolicy
from tutti.rl.algorithms.families.offline import Offline
from tutti.rl.algorithms.families.on_policy import OnPolicy
from tutti.rl.core.agent import Agent
from tutti.rl.core.env import Env
from tutti.rl.core.options import configured
from tutti.rl.core.vector import VectorEnv
from tutti.rl.placement import ranks as of_ranks
from tutti.rl.placement.actor import Actor
from tutti.rl.placement.exchange import size_of
from tutti.rl.placement.forecast import HOSTED, Costs, Line
from tutti.rl.placement.placement import shared, shared_out
from tutti.whole_files import write_text

FOLDER = machine.FOLDER / "rl-costs"
MAX_RANKS = 4  # ranks whose share is measured; that of others lies on the line through it
SECONDS, FEWEST, LONGEST = 0.6, 3, 40  # of a figure: the time for it, and how often it is repeated


@dataclass(frozen=True)
class Took:
    """Seconds of the quieter runs of a fragment: on the clock, and on cores."""

    wall: float
    busy: float

    @property
    def seconds(self) -> float:
        """On one core, with nothing beside it."""
        return min(self.wall, self.busy) if self.busy < 1.2 * self.wall else self.busy

    @property
    def spread(self) -> float:
        """Cores that it occupies."""
        return self.busy / self.wall if self.busy > 1.2 * self.wall else 1.0


def costs(kind: str | type[Agent], env: str | Env, options: dict[str, Any], level: str = "O2",
          progress: Say = silent, fresh: bool = False) -> Costs:  # fmt: skip
    """Measure the costs of an algorithm in an environment. Results are cached per machine. fresh: measure again."""
    own = algorithm(kind) if isinstance(kind, str) else kind
    name = env if isinstance(env, str) else env.name
    what = [own.__name__, name, level, sorted((k, str(x)) for k, x in options.items()), machine.key("cpu", 1, 1)]
    file = FOLDER / f"{hashlib.sha1(json.dumps(what).encode()).hexdigest()[:16]}.json"
    if file.exists() and not fresh:
        try:
            return Costs.of(json.loads(file.read_text()))
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} does not hold measured costs: {error}; --fresh measures them again") from error
    measured = _Measuring(own, env, options, level, progress).costs()
    write_text(file, json.dumps(measured.to_table(), indent=2))
    return measured


class _Measuring:
    def __init__(self, kind: type[Agent], env: str | Env, options: dict, level: str, progress: Say):
        if issubclass(kind, Offline):
            raise ValueError(f"{kind.__name__} learns from data, without environments: it has no placement")
        self.kind: Any = kind
        self.env, self.options, self.level, self.progress = env, options, level, progress
        c = configured(kind, options)
        self.n, self.steps = c.n_envs, c.n_steps
        self.refused: dict[str, str] = {}
        self.limits: dict[str, int] = {}
        if not issubclass(kind, OnPolicy):
            for placement in ("async", "server"):
                self.refused[placement] = f"{kind.__name__} has a replay"

    def agent(self, n: int, env: Any = None, **more: Any) -> Agent:
        agent = self.kind(self.env if env is None else env, level=self.level, **{**self.options, **more, "n_envs": n})
        if isinstance(agent, OffPolicy):
            agent.num_timesteps = agent.config.learning_starts + agent.config.n_step * n  # learning has begun
        return agent

    def costs(self) -> Costs:
        n, few = self.n, next((self.n // r for r in range(MAX_RANKS, 1, -1) if self.n % r == 0), self.n)
        self.progress("acting and learning of one rank")
        whole = self.agent(n)
        pure = isinstance(whole.env, Env)
        if not pure:
            self.refused["async"] = f"{whole.env.name} is {HOSTED}"
        act, learn, chunk, actor = self.act_and_learn(whole)
        size = size_of(chunk)
        serial = self.serial(actor, self.policy(whole))
        act_few, chunk_few, few_learn, learn_few = act, size, n, learn
        share, of_share = learn, n
        if few < n:
            self.progress(f"acting in {few} of {n} environments")
            act_few, chunk_few, few_learn, learn_few = self.part(few, learn)
            of_share, share = self.share(few, learn)
            few = few_learn if few_learn < n else few
        self.progress("stepping environments in a worker")
        host, step_few, step_n = self.hosted(whole, pure, few)
        learner = whole.program.state()["learner"]
        means, weights = self.means() if few < n else (0, 0)
        return Costs(
            n_envs=n,
            n_steps=self.steps,
            act=Line.through(few, act_few.seconds, n, act.seconds),
            learn=Line.through(few_learn, learn_few.seconds, n, learn.seconds),
            share=Line.through(of_share, share.seconds, n, learn.seconds),
            host=Line(host),
            step=Line.through(few, step_few, n, step_n),
            chunk=Line.through(few, chunk_few, n, size),
            policy=size_of(self.policy(whole)),
            weights=weights,
            means=means,
            push=self.push(whole, learner),
            serial=serial,
            spread=act.spread,
            level=self.level,
            batch=getattr(whole.config, "batch_size", 0),
            limits=self.limits,
            refused=self.refused,
        )

    def policy(self, agent: Agent) -> dict[str, Any]:
        return pytree.tree_map(torch.clone, agent.acting(agent.program.state()["learner"]))

    def act_and_learn(self, agent: Agent) -> tuple[Took, Took, dict[str, Tensor], Actor]:
        actor, policy = Actor(agent, 0), self.policy(agent)
        chunk = actor.act(policy, agent)
        act = took(lambda: actor.act(policy, agent))
        return act, took(lambda: agent.learn_from(dict(chunk))), chunk, actor

    def part(self, few: int, learn: Took) -> tuple[Took, float, int, Took]:
        """Measure a rank that acts in `few` environments, and a learner that receives chunks of single ranks.

        Returns (time of acting, bytes of the chunk, environments per received chunk, time of learning from one chunk).
        """
        error: ValueError | None = None
        for ranks in dict.fromkeys((self.n // few, 2)) if issubclass(self.kind, OnPolicy) else ():
            try:
                act, learn_few, chunk, _ = self.act_and_learn(self.agent(self.n // ranks))
            except ValueError as failure:
                error = failure
                continue
            self.limits |= {"async": ranks, "server": ranks} if error else {}
            return act, size_of(chunk), self.n // ranks, learn_few
        if error:
            self.refused = {"async": str(error), "server": str(error), **self.refused}
        agent = self.agent(few, **_fitting(self.kind, self.options, self.n // few))
        actor, policy = Actor(agent, 0), self.policy(agent)
        chunk = actor.act(policy, agent)
        return took(lambda: actor.act(policy, agent)), size_of(chunk), self.n, learn

    def share(self, few: int, learn: Took) -> tuple[int, Took]:
        """The number of environments of one of several learners, and what it takes to learn."""
        for ranks in dict.fromkeys((self.n // few, 2)):
            self.progress(f"learning as one of {ranks}")
            try:
                agent = self.agent(self.n // ranks, **shared_out(self.kind, self.options, ranks))
            except ValueError as error:
                self.refused["learners"] = str(error)
                continue
            self.refused.pop("learners", None)
            chunk = Actor(agent, 0).act(self.policy(agent), agent)
            return self.n // ranks, took(lambda chunk=chunk, agent=agent: agent.learn_from(dict(chunk)))
        return self.n, learn

    def hosted(self, whole: Agent, pure: bool, few: int) -> tuple[float, float, float]:
        """Seconds of choosing the actions of a rollout step by step; of stepping few and all environments on a core."""
        env = _Timed(Pure(whole.env, self.n) if isinstance(whole.env, Env) else whole.env)
        agent = self.agent(self.n, env)
        policy = self.policy(agent)
        agent.host.collect(agent, policy=policy)
        env.busy = 0.0
        runs = 0

        def collect() -> None:
            nonlocal runs
            runs += 1
            agent.host.collect(agent, policy=policy)

        total = took(collect)
        own = max(total.busy - env.busy / runs, 0.0)
        return own, self.stepping(whole.env, few), self.stepping(whole.env, self.n)

    def stepping(self, env: Env | VectorEnv, n: int) -> float:
        if isinstance(env, Env):
            vector: VectorEnv = Pure(env, n)
        else:
            from tutti.rl.adapt.make import _in_worker

            vector = _in_worker(self.env, {}, n) if isinstance(self.env, str) else env
        vector.reset(0)
        action = _some_action(vector, n)
        return self.steps * took(lambda: vector.step(action)).busy

    def serial(self, actor: Actor, policy: dict[str, Any]) -> float:
        """The share of acting that excludes other threads: half the time that two threads take together, over the time
        of one."""
        other = Actor(self.agent(self.n), 1)
        other.agent.functions, other.agent.program = actor.agent.functions, actor.agent.program
        if not isinstance(actor.agent.env, Env):
            other = Actor(self.agent(self.n), 1)
        other.act(policy, other.agent)
        alone, both = [], []
        for _ in range(4):
            begin = time.perf_counter()
            actor.act(policy, actor.agent)
            alone.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            thread = threading.Thread(target=lambda: other.act(policy, other.agent))
            thread.start()
            actor.act(policy, actor.agent)
            thread.join()
            both.append(time.perf_counter() - begin)
        return min(both) / min(alone) / 2

    def means(self) -> tuple[int, int]:
        """Gradients that one of two learners averages in an iteration, and their bytes."""
        ranks = next((r for r in range(2, self.n + 1) if self.n % r == 0), 1)
        counted = _Counted()
        try:
            options = {**self.options, **shared_out(self.kind, self.options, ranks), "n_envs": self.n // ranks}
            agent = self.kind(self.env, level="eager", **options)
        except ValueError:
            return 0, 0
        if isinstance(agent, OffPolicy):
            agent.num_timesteps = agent.config.learning_starts + agent.config.n_step * self.n
        chunk = Actor(agent, 0).act(self.policy(agent), agent)

        def run() -> None:
            of_ranks._here.set((counted, 0))  # pyright: ignore[reportArgumentType]
            agent.learn_from(dict(chunk))

        copy_context().run(run)
        return counted.calls, counted.bytes // max(counted.calls, 1)

    def push(self, agent: Agent, learner: dict[str, Any]) -> float:
        """Seconds in which the server adds a change."""
        if not issubclass(self.kind, OnPolicy):
            return 0.0
        weights = pytree.tree_map(torch.clone, shared(learner)["weights"])
        return took(lambda: agent.program.put({"learner": {k: x + x for k, x in weights.items()}})).seconds


class _Counted:
    """Ranks that count what they average."""

    count, calls, bytes = 2, 0, 0

    def mean(self, i: int, x: Tensor) -> Tensor:
        self.calls, self.bytes = self.calls + 1, self.bytes + x.numel() * x.element_size()
        return x.clone()


class _Timed(VectorEnv):
    """Environments whose steps are timed."""

    def __init__(self, env: VectorEnv):
        self.env, self.n, self.name, self.busy = env, env.n, env.name, 0.0
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.agents, self.limit, self.threshold = env.agents, env.limit, env.threshold
        self.masks, self.overview = env.masks, env.overview

    def reset(self, seed: int | None = None) -> Any:
        return self.env.reset(seed)

    def step(self, action: np.ndarray) -> Any:
        begin = time.process_time()
        moved = self.env.step(action)
        self.busy += time.process_time() - begin
        return moved


def took(run: Callable[[], object]) -> Took:
    """Time a fragment, after one run that compiles it."""
    run()
    walls, busy, begin = [], [], time.perf_counter()
    while len(walls) < FEWEST or (time.perf_counter() - begin < SECONDS and len(walls) < LONGEST):
        wall, on = time.perf_counter(), time.process_time()
        run()
        walls.append(time.perf_counter() - wall)
        busy.append(time.process_time() - on)
    quiet = len(walls) // 4
    return Took(sorted(walls)[quiet], sorted(busy)[quiet])


def _fitting(kind: type[Agent], options: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Options with which a share of the environments can act, whatever is learned from it."""
    try:
        return shared_out(kind, options, ranks)
    except ValueError:
        c = configured(kind, options)
        return {"batch_size": c.n_steps * c.n_envs // ranks}


def _some_action(env: VectorEnv, n: int) -> np.ndarray:
    """An action for each instance and agent."""
    space = env.action_space
    rows = (n,) if len(env.agents) == 1 else (n, len(env.agents))
    if isinstance(space, spaces.Discrete):
        return np.zeros(rows, np.int64)
    space.seed(0)
    one = np.asarray(space.sample(), np.float32)
    return np.broadcast_to(one, (*rows, *one.shape)).copy()
