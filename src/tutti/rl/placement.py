"""Where the fragments of an algorithm run: actors with their environments, and learners with their replay.

An algorithm says nothing about it. A placement runs its functions `rollout` and `absorb` in one of these ways:

| placement | fragments | between iterations |
|---|---|---|
| `fused` | one rank acts and learns in one program | |
| `learners` | each rank acts in its environments and learns | gradients are averaged |
| `actors` | each rank acts in its environments; process 0 learns | experience goes to the learner, its policy to all |
| `async` | the same, and nobody waits: at most `bound` chunks wait for the learner | policies that act are older |
| `environments` | worker processes step environments, process 0 acts and learns | observations and actions, each step |
| `server` | each rank learns alone from weights of process 0 | changes of weights are added there (A3C) |

Ranks are shared out equally among the processes of a `torch.distributed` job (`tutti run`, `torchrun`), and are threads
within a process. The bits that the first three compute do not depend on the number of processes. `IMPALA` corrects for
the older policies of `async`.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tutti.exec.runtime import in_job, join_job
from tutti.rl import collect, keys
from tutti.rl.agent import Agent
from tutti.rl.algorithms import algorithm
from tutti.rl.env import Env
from tutti.rl.exchange import Server, broadcast, gather, receive, send
from tutti.rl.host import HostActor
from tutti.rl.on_policy import OnPolicy
from tutti.rl.ranks import Ranks, own_ranks, process, processes
from tutti.rl.vector import VectorEnv

Tree = dict[str, Any]
PLACEMENTS = ("fused", "learners", "actors", "async", "environments", "server")


class Placed:
    """An algorithm that learns under a placement.

    kind: the algorithm, or its name. env: a name, or a pure environment. ranks: of the placement. n_envs of the options
    are those of all ranks together. bound: chunks that may wait for the learner of `async`. Every process of a job
    makes one, and calls `learn`. agent: in process 0 the agent that has learned.
    """

    def __init__(self, kind: str | type[Agent], env: str | Env, placement: str = "fused", ranks: int = 1, *,
                 seed: int = 0, level: str = "O2", bound: int = 1, **options: Any):  # fmt: skip
        if placement not in PLACEMENTS:
            raise ValueError(f"placement {placement!r} is not one of {', '.join(PLACEMENTS)}")
        if in_job():
            join_job(torch.device("cpu"))
        self.kind: Any = algorithm(kind) if isinstance(kind, str) else kind
        self.env, self.placement, self.ranks, self.bound = env, placement, ranks, bound
        self.made = {"seed": seed, "level": level}
        self.options, n = options, options.get("n_envs", self.kind.Config().n_envs)
        if placement in ("async", "server") and not issubclass(self.kind, OnPolicy):
            raise ValueError(f"{placement} is for on-policy algorithms, and {self.kind.__name__} has a replay: rows of "
                             "unlike ranks would be taken for one episode; use learners or actors")  # fmt: skip
        if placement == "fused" and ranks != 1:
            raise ValueError(
                f"fused has one rank, not {ranks}; placements with several are {', '.join(PLACEMENTS[1:])}"
            )
        if n % ranks:
            raise ValueError(f"n_envs is {n}, which {ranks} ranks cannot share equally")
        split = placement in ("learners", "actors", "async", "server")
        if not split and processes() > 1:
            raise ValueError(f"{placement} runs in one process, and this job has {processes()}")
        self.own = own_ranks(ranks) if split else range(1)
        self.part = n // ranks if split else n
        if placement == "environments":
            self.env = _in_workers(env, n, ranks)
        whole = placement == "actors"
        self.agent: Agent = self._made(n if whole else self.part)
        self.actors = [self._actor(rank) for rank in self.own] if placement in ("actors", "async") else []
        self.others = [self._made(self.part, rank) for rank in self.own] if placement in ("learners", "server") else []
        self.num_timesteps = 0

    def _made(self, n: int, rank: int | None = None) -> Agent:
        """An agent with n environments. rank: for environments and exploration of its own."""
        agent = self.kind(self.env, **self.made, **{**self.options, "n_envs": n})
        if rank is not None:
            key = keys.fold(keys.fold(keys.make(agent.seed), 3), rank)
            if isinstance(agent.env, Env):
                agent.program.put({"actor": collect.begin(agent, agent.env, keys.fold(key, 0), n)})
            else:
                agent.host = HostActor(agent, agent.env, agent.seed + rank * n)
            agent.program.put({"key": keys.fold(key, 1)})
        return agent

    def _actor(self, rank: int) -> Actor:
        return Actor(self._made(self.part, rank), rank)

    def learn(self, total_timesteps: int) -> Placed:
        """Learn for so many steps of all environments together."""
        per_rank = total_timesteps // (self.ranks if self.placement in ("learners", "server") else 1)
        for agent in (self.agent, *self.others, *(actor.agent for actor in self.actors)):
            agent.total = agent.num_timesteps + (per_rank if agent in self.others else total_timesteps)
            agent.prepare()
        steps = self.agent.config.n_steps * self.part * (self.ranks if self.placement in ("actors", "async") else 1)
        rounds = -(-(per_rank if self.others else total_timesteps) // steps)
        getattr(self, f"_{self.placement}")(rounds)
        self.num_timesteps += rounds * steps * (self.ranks if self.others else 1)
        if self.placement == "server":
            self.agent.num_timesteps = self.num_timesteps
        return self

    def _fused(self, rounds: int) -> None:
        for _ in range(rounds):
            self.agent.step()

    _environments = _fused

    def _learners(self, rounds: int) -> None:
        def work(rank: int) -> None:
            for _ in range(rounds):
                self.others[rank - self.own[0]].step()

        Ranks(self.ranks).run(work)
        self.agent = self.others[0]

    def _actors(self, rounds: int) -> None:
        for _ in range(rounds):
            policy = broadcast(self._policy())
            chunks = gather([actor.act(policy, self.agent) for actor in self.actors])
            if chunks is not None:
                joined = pytree.tree_map(lambda *parts: torch.cat(parts, 1), *chunks)
                self.agent.learn_from(joined)
            else:
                self.agent.num_timesteps += self.agent.config.n_steps * self.agent.config.n_envs

    def _policy(self) -> Tree:
        return self.agent.acting(self.agent.program.state()["learner"])

    def _async(self, rounds: int) -> None:
        waiting: queue.Queue[Tree] = queue.Queue(self.bound)
        newest = pytree.tree_map(torch.clone, self._policy())

        def handle(chunk: Tree) -> Tree:
            waiting.put(chunk)
            return newest

        def work(actor: Actor) -> None:
            policy = newest
            for _ in range(rounds):
                chunk = actor.act(policy, actor.agent)
                actor.agent.num_timesteps += chunk["terminated"].numel() * self.ranks
                policy = self._ask(chunk, newest, actor.rank, handle)

        remote = {rank: rank // len(self.own) for rank in range(self.ranks) if rank not in self.own}
        example = self.actors[0].example(newest)
        server = Server(handle, example, remote, rounds) if process() == 0 else None
        ended = _threads(work, self.actors)
        if process() == 0:
            for _ in range(rounds * self.ranks):
                self.agent.learn_from(_next(waiting, ended, server))
                newest = pytree.tree_map(torch.clone, self._policy())
        ended.join()
        if server:
            server.join()

    def _server(self, rounds: int) -> None:
        lock, held = threading.Lock(), self.agent.program
        like = pytree.tree_map(torch.clone, _shared(held.state()["learner"]))

        def handle(change: Tree) -> Tree:
            with lock:
                learner = held.state()["learner"]
                weights = {name: learner[name] + x for name, x in change["weights"].items()}
                held.put({"learner": {**weights, **change["norms"]}})
                return {"weights": weights, "norms": change["norms"]}

        def work(agent: Agent) -> None:
            for _ in range(rounds):
                before = _shared(pytree.tree_map(torch.clone, agent.program.state()["learner"]))["weights"]
                agent.step()
                after = _shared(agent.program.state()["learner"])
                change = {**after, "weights": {name: x - before[name] for name, x in after["weights"].items()}}
                weights = self._ask(change, like, self.own[self.others.index(agent)], handle)["weights"]
                agent.program.put({"learner": weights})

        remote = {rank: rank // len(self.own) for rank in range(self.ranks) if rank not in self.own}
        server = Server(handle, like, remote, rounds) if process() == 0 else None
        _threads(work, self.others).join()
        if server:
            server.join()

    def _ask(self, message: Tree, like: Tree, rank: int, handle: Any) -> Tree:
        """The server's answer to a message of a rank."""
        if process() == 0:
            return handle(message)
        send(message, 0, rank)
        return receive(like, 0, rank)


def _shared(learner: Tree) -> Tree:
    """What ranks of a parameter server share: weights, and statistics of normalization. The state of optimizers, which
    stands in dicts, is each rank's own."""
    weights = {name: x for name, x in learner.items() if isinstance(x, Tensor) and x.is_floating_point()}
    weights.pop("progress")
    return {"weights": weights, "norms": {name: x for name, x in learner.items() if name == "obs_norm"}}


class Actor:
    """The environments of a rank, and the program that acts in them."""

    def __init__(self, agent: Agent, rank: int):
        self.agent, self.rank = agent, rank
        state = agent.program.state()
        self.key = state["key"].clone()
        self.state = pytree.tree_map(torch.clone, state.get("actor", {}))
        self.count = 0

    def act(self, policy: Tree, learner: Agent) -> Tree:
        """A chunk of experience. learner: says in which phase of learning actions are chosen."""
        agent, self.count = self.agent, self.count + 1
        agent.num_timesteps = learner.num_timesteps
        act = agent.behaviour()
        if not isinstance(agent.env, Env):
            return agent.host.collect(agent, policy=policy)
        env, steps = agent.env, agent.config.n_steps

        def chunk(run: Tree, policy: Tree, state: Tree, key: Tensor) -> tuple[Tree, Tree]:
            return collect.rollout(agent, env, policy, state, key, steps, act=act)

        function = agent.functions.setdefault(("chunk", act), chunk)
        self.state, made = agent.program.ask(function, policy, self.state, keys.fold(self.key, self.count))
        return made

    def example(self, policy: Tree) -> Tree:
        """A chunk without meaning, of the shapes and dtypes of all."""
        agent = self.agent
        assert isinstance(agent.env, Env), "asynchronous actors need a pure environment"
        with torch.no_grad():
            made = collect.rollout(agent, agent.env, policy, self.state, self.key, 1, act=agent.behaviour())[1]
        return {k: x.new_zeros(agent.config.n_steps, *x.shape[1:]) for k, x in made.items()}


class _threads:
    """A function in a thread for each item. `join` raises the first error."""

    def __init__(self, work: Any, items: list):
        self.errors: deque[BaseException] = deque()
        self.running = [threading.Thread(target=self._run, args=(work, item), daemon=True) for item in items]
        for thread in self.running:
            thread.start()

    def _run(self, work: Any, item: Any) -> None:
        try:
            work(item)
        except BaseException as error:
            self.errors.append(error)

    def join(self) -> None:
        for thread in self.running:
            thread.join()
        self.check()

    def check(self) -> None:
        if self.errors:
            raise self.errors[0]


def _next(waiting: queue.Queue[Tree], actors: _threads, server: Server | None) -> Tree:
    """The next chunk. Raises what an actor has raised."""
    while True:
        try:
            return waiting.get(timeout=1.0)
        except queue.Empty:
            actors.check()
            if server and server.errors:
                raise server.errors[0] from None


def _in_workers(env: str | Env, n: int, workers: int) -> VectorEnv:
    """Environments in worker processes."""
    from tutti.rl.adapt.pure import in_workers
    from tutti.rl.by_name import make
    from tutti.rl.envs.registry import ENVS

    if isinstance(env, str) and env not in ENVS:
        made = make(env, n, processes=workers)
        assert isinstance(made, VectorEnv)
        return made
    return in_workers(env, n, workers)
