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

A fragment that fails ends all others with its error. A process that is killed ends the job with an error that names it;
`tutti.rl.placement.job` continues such a job from its last state.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tutti.exec.runtimes.runtime import in_job, join_job
from tutti.rl.algorithms import algorithm
from tutti.rl.algorithms.families.on_policy import OnPolicy
from tutti.rl.core import collect, files, keys
from tutti.rl.core.agent import Agent
from tutti.rl.core.driver import drive
from tutti.rl.core.env import Env
from tutti.rl.core.host import HostActor
from tutti.rl.core.options import configured
from tutti.rl.core.program import leaves, with_leaves
from tutti.rl.core.vector import VectorEnv
from tutti.rl.placement.actor import Actor
from tutti.rl.placement.exchange import (
    Failed,
    Failure,
    Lost,
    Server,
    Threads,
    Tree,
    Waiting,
    gather,
    receive,
    send,
    send_error,
    send_to_all,
    together,
)
from tutti.rl.placement.ranks import Ranks, mean_of_ranks, own_ranks, process, processes

PLACEMENTS = ("fused", "learners", "actors", "async", "environments", "server")
WORKERS = ("processes", "ray")  # of environments
SPLIT = ("learners", "actors", "async", "server")  # may run in several processes
SHARED = ("batch_size", "buffer_size", "learning_starts")  # options of all ranks together, where all learn together


class Placed:
    """An algorithm that learns under a placement.

    kind: the algorithm, or its name. env: a name, or a pure environment. ranks: number of ranks of the placement.
    n_envs of the options are those of all ranks together; so are the batches and replays of `learners`, which make as
    many updates as one learner would. bound: chunks that may wait for the learner of `async`. workers: what the ranks
    of `environments` are, "processes" here or actors of "ray". Every process of a job makes one, and calls `learn`.
    agent: in process 0 the agent that has learned.
    """

    def __init__(self, kind: str | type[Agent], env: str | Env, placement: str = "fused", ranks: int = 1, *,
                 seed: int = 0, level: str = "O2", bound: int = 1, workers: str = "processes",
                 **options: Any):  # fmt: skip
        if placement not in PLACEMENTS:
            raise ValueError(f"placement {placement!r} is not one of {', '.join(PLACEMENTS)}")
        if in_job():
            join_job(torch.device("cpu"))
        self.kind: Any = algorithm(kind) if isinstance(kind, str) else kind
        self.env, self.placement, self.ranks, self.bound = env, placement, ranks, bound
        self.agent_kwargs = {"seed": seed, "level": level}
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
        if workers not in WORKERS or (workers != WORKERS[0] and placement != "environments"):
            raise ValueError(f"workers={workers!r} with placement {placement}: environments has workers, which are "
                             f"{' or '.join(WORKERS)}")  # fmt: skip
        split = placement in SPLIT
        if not split and processes() > 1:
            raise ValueError(f"{placement} runs in one process, and this job has {processes()}")
        self.own = own_ranks(ranks) if split else range(1)
        self.part = n // ranks if split else n
        if placement == "environments":
            self.env = _in_workers(env, n, ranks, "ray" if workers == "ray" else "forkserver")
        if placement == "learners":
            self.options = {**options, **shared_out(self.kind, options, ranks)}
        whole = placement == "actors"
        self.agent: Agent = self._make_agent(n if whole else self.part)
        self.agent.env_name = env if isinstance(env, str) else None  # to evaluate, also where workers step environments
        self.actors = [self._actor(rank) for rank in self.own] if placement in ("actors", "async") else []
        learns = placement in ("learners", "server")
        self.learners = [self._make_agent(self.part, rank) for rank in self.own] if learns else []
        self.num_timesteps = 0

    def _make_agent(self, n: int, rank: int | None = None) -> Agent:
        """Make an agent with n environments. rank: seeds its environments and exploration."""
        agent = self.kind(self.env, **self.agent_kwargs, **{**self.options, "n_envs": n})
        if rank is not None:
            key = keys.fold(keys.fold(keys.make(agent.seed), 3), rank)
            if isinstance(agent.env, Env):
                agent.program.put({"actor": collect.begin(agent, agent.env, keys.fold(key, 0), n)})
            else:
                agent.host = HostActor(agent, agent.env, agent.seed + rank * n)
            agent.program.put({"key": keys.fold(key, 1)})
        return agent

    def _actor(self, rank: int) -> Actor:
        return Actor(self._make_agent(self.part, rank), rank)

    def learn(self, total_timesteps: int, schedule: int | None = None) -> Placed:
        """Learn for so many steps of all environments together.

        schedule: number of steps at whose end rates that decay are 0, by default the end of this call.
        """
        share = self.ranks if self.placement in ("learners", "server") else 1
        per_rank = -(-total_timesteps // share)
        for agent in (self.agent, *self.learners, *(actor.agent for actor in self.actors)):
            end = agent.num_timesteps + (per_rank if agent in self.learners else total_timesteps)
            agent.total = end if schedule is None else schedule // (share if agent in self.learners else 1)
            agent.prepare()
        rounds = -(-(per_rank if self.learners else total_timesteps) // self._round)
        getattr(self, f"_{self.placement}")(rounds)
        self.num_timesteps += rounds * self._round * (self.ranks if self.learners else 1)
        if self.learners:
            self.agent.num_timesteps, self.agent.metrics = self.num_timesteps, self.learners[0].metrics
            for agent in self.learners:
                self.agent.episodes.extend(agent.episodes)
                agent.episodes.clear()
        return self

    @property
    def _round(self) -> int:
        """The steps by which a round raises `num_timesteps` of the agents that count it."""
        return self.agent.steps_per_iteration * (self.ranks if self.placement == "async" else 1)

    def _drive(self, agent: Agent, rounds: int, step: Callable[[], Any]) -> None:
        """Call `step`, which raises the agent's `num_timesteps`, for so many rounds."""
        drive(agent, agent.num_timesteps + rounds * self._round, step)

    def _fused(self, rounds: int) -> None:
        self._drive(self.agent, rounds, self.agent.step)

    _environments = _fused

    def _learners(self, rounds: int) -> None:
        def work(rank: int) -> None:
            agent = self.learners[rank - self.own[0]]
            self._drive(agent, rounds, agent.step)
            if rounds:
                means = mean_of_ranks(torch.tensor([*agent.metrics.values()], dtype=torch.float64))
                agent.metrics = dict(zip(agent.metrics, means.tolist(), strict=True))
                agent.metrics["steps_per_second"] *= self.ranks

        Ranks(self.ranks).run(work)
        state = self.learners[0].program.state()
        self.agent.program.put({name: state[name] for name in ("learner", "steps")})

    def _actors(self, rounds: int) -> None:
        policy = self._policy()
        if process():
            return self._act_for_process_0(policy, rounds)
        send_to_all(policy)
        own = together([actor.example(policy) for actor in self.actors if actor.pure])

        def step() -> None:
            nonlocal policy, own
            unheard = set(range(1, processes()))
            try:
                chunks = [actor.act(policy, self.agent) for actor in self.actors]
                own = together(chunks)
                for source in range(1, processes()):
                    unheard.discard(source)
                    chunks.extend(receive(own, source).values())
                self.agent.learn_from(pytree.tree_map(lambda *parts: torch.cat(parts, 1), *chunks))
            except BaseException as error:
                if own:  # else this process ends in its first round, and with it the others
                    self._tell(error, own, policy, unheard)
                raise
            policy = self._policy()
            send_to_all(policy)

        self._drive(self.agent, rounds, step)

    def _act_for_process_0(self, policy: Tree, rounds: int) -> None:
        policy = receive(policy, 0)
        chunks = [actor.example(policy) for actor in self.actors if actor.pure]

        def step() -> None:
            nonlocal policy, chunks
            try:
                chunks = [actor.act(policy, self.agent) for actor in self.actors]
            except BaseException as error:
                send_error(error, together(chunks), 0)
                raise
            send(together(chunks), 0)
            self.agent.num_timesteps += self._round
            policy = receive(policy, 0)

        self._drive(self.agent, rounds, step)

    def _tell(self, error: BaseException, chunks: Tree, policy: Tree, unheard: set[int]) -> None:
        """Send an error to the other processes; first receive the pending message of those in `unheard`."""
        for rank in range(1, processes()):
            if rank == getattr(error, "source", None):
                continue
            with suppress(Failed, Lost):
                if rank in unheard:
                    receive(chunks, rank)
                send_error(error, policy, rank)

    def _policy(self) -> Tree:
        return self.agent.acting(self.agent.program.state()["learner"])

    def _async(self, rounds: int) -> None:
        newest, failure = pytree.tree_map(torch.clone, self._policy()), Failure()
        waiting, example = Waiting(self.bound, failure), self.actors[0].example(newest)

        def handle(chunk: Tree) -> Tree:
            waiting.put(chunk)
            return newest

        def work(actor: Actor) -> None:
            policy = newest

            def step() -> None:
                nonlocal policy
                chunk = actor.act(policy, actor.agent)
                actor.agent.num_timesteps += self._round
                policy = self._ask(chunk, newest, actor.rank, handle)

            self._drive(actor.agent, rounds, step)

        def learn() -> None:
            nonlocal newest
            self.agent.learn_from(waiting.get())
            newest = pytree.tree_map(torch.clone, self._policy())

        with self._serving(handle, example, newest, rounds, failure):
            acting = Threads(work, self.actors, failure, lambda actor, error: self._report(error, example, actor.rank))
            if process() == 0:
                self._drive(self.agent, rounds, learn)
            acting.join()

    def _server(self, rounds: int) -> None:
        lock, program, failure = threading.Lock(), self.agent.program, Failure()
        like = pytree.tree_map(torch.clone, shared(program.state()["learner"]))

        def handle(change: Tree) -> Tree:
            with lock:
                learner = program.state()["learner"]
                weights = {name: learner[name] + x for name, x in change["weights"].items()}
                program.put({"learner": {**weights, **change["norms"]}})
                return {"weights": weights, "norms": change["norms"]}

        def work(rank: int) -> None:
            agent = self.learners[rank - self.own[0]]

            def step() -> None:
                failure.check()
                before = shared(pytree.tree_map(torch.clone, agent.program.state()["learner"]))["weights"]
                agent.step()
                after = shared(agent.program.state()["learner"])
                change = {**after, "weights": {name: x - before[name] for name, x in after["weights"].items()}}
                agent.program.put({"learner": self._ask(change, like, rank, handle)["weights"]})

            self._drive(agent, rounds, step)

        with self._serving(handle, like, like, rounds, failure):
            Threads(work, list(self.own), failure, lambda rank, error: self._report(error, like, rank)).join()

    @contextmanager
    def _serving(self, handle: Any, like: Tree, answer: Tree, rounds: int, failure: Failure) -> Iterator[None]:
        """Answer the ranks of other processes meanwhile, in process 0. An error is the answer to all that still ask."""
        remote = {rank: rank // len(self.own) for rank in range(self.ranks) if rank not in self.own}
        server = Server(handle, like, answer, remote if process() == 0 else {}, rounds, failure)
        try:
            yield
        except BaseException as error:
            failure.set(error)
        server.join()

    def _ask(self, message: Tree, like: Tree, rank: int, handle: Any) -> Tree:
        """The server's answer to a message of a rank."""
        if process() == 0:
            return handle(message)
        send(message, 0, rank)
        return receive(like, 0, rank)

    def _report(self, error: BaseException, like: Tree, rank: int) -> None:
        """Tell process 0 of an error of a rank of another process, instead of a message like this."""
        if process():
            send_error(error, like, 0, rank)

    # -- continuing ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """The state of all ranks besides the agent, as one flat dict, on process 0. Every process calls it."""
        states = [actor.tensors() for actor in self.actors] + [agent.program.state() for agent in self.learners]
        return leaves(together(gather(states))) if states else {}

    def restore(self, saved: files.Saved, state: dict[str, Tensor], ranks: Path) -> None:
        """Continue from the file of the agent, and from what `state` returned. ranks: the file of the latter, for
        errors. Every process calls it."""
        files.restore(self.agent, saved)
        self.num_timesteps = self.agent.num_timesteps
        for i, rank in enumerate(self.own):
            own = {name.partition(".")[2]: x for name, x in state.items() if name.partition(".")[0] == str(rank)}
            if self.actors or self.learners:
                current = self.actors[i].tensors() if self.actors else self.learners[i].program.state()
                files.check_fit(leaves(current), own, ranks, f"rank {rank}")
            if self.actors:
                self.actors[i].agent.num_timesteps = self.num_timesteps
                self.actors[i].restore(with_leaves(self.actors[i].tensors(), own))
            elif self.learners:
                self.learners[i].num_timesteps = self.num_timesteps // self.ranks
                self.learners[i].program.load(with_leaves(self.learners[i].program.state(), own))
        for agent in (*(actor.agent for actor in self.actors), *self.learners):
            if not isinstance(agent.env, Env):  # episodes and noise unlike those at the beginning
                agent.host.restore(agent, {"steps": self.num_timesteps // (self.part * self.ranks)})


def shared(learner: Tree) -> Tree:
    """The entries that ranks of a parameter server share: weights, and statistics of normalization. Each rank has its
    own optimizer state, which is in dicts."""
    weights = {name: x for name, x in learner.items() if isinstance(x, Tensor) and x.is_floating_point()}
    weights.pop("progress")
    return {"weights": weights, "norms": {name: x for name, x in learner.items() if name == "obs_norm"}}


def shared_out(kind: type[Agent], options: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Divide batch and replay options among `ranks` learners, which together make the updates of one. Raises ValueError
    if the batch is not divisible."""
    own = signature(kind).parameters  # such as the expert of DAgger: no option of its Config
    c: Any = configured(kind, {name: x for name, x in options.items() if name not in own})
    shares = {f.name: -(-getattr(c, f.name) // ranks) for f in fields(c) if f.name in SHARED}
    if "batch_size" in shares and c.batch_size % ranks:
        raise ValueError(f"batch_size is {c.batch_size}, which {ranks} learners cannot share equally")
    if getattr(c, "gradient_steps", 0) < 0:
        shares["gradient_steps"] = c.n_steps * c.n_envs
    return shares


def _in_workers(env: str | Env, n: int, workers: int, start: str) -> VectorEnv:
    """Make environments in worker processes. start: the start method of `Workers`."""
    from tutti.rl.adapt.pure import in_workers
    from tutti.rl.by_name import make
    from tutti.rl.envs.registry import ENVS

    if isinstance(env, str) and env not in ENVS:
        vector = make(env, n, processes=workers, start=start)
        assert isinstance(vector, VectorEnv)
        return vector
    return in_workers(env, n, workers, start)
