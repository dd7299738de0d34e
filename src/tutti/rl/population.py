"""Several runs of one algorithm as one program: `torch.vmap` over seeds and numeric options.

population = Population("PPO", "CartPole-v1", seeds=range(8), learning_rate=[1e-3] * 4 + [3e-4] * 4)
population.learn(100_000)
print(population.returns())  # mean return of each member's last episodes
best = population.agent(3)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tutti.launch.progress import progress
from tutti.rl.algorithms import algorithm
from tutti.rl.core.agent import Agent
from tutti.rl.core.driver import drive
from tutti.rl.core.env import Env
from tutti.rl.core.program import Program

Tree = dict[str, Any]


class Population:
    """Members that learn at the same time, each as if it were alone.

    kind: the algorithm, or its name. env: a pure environment, or the name of one. seeds: seed of each member. level:
    see `Agent`. options: those of the algorithm. A list gives one number for each member; networks and numbers of steps
    are the same for all.

    Raises ValueError for an environment of the host, and for an option that cannot differ between members.
    """

    def __init__(self, kind: str | type[Agent], env: str | Env, seeds: Iterable[int], *, level: str = "O2",
                 **options: Any):  # fmt: skip
        self.kind: Any = algorithm(kind) if isinstance(kind, str) else kind
        self.seeds, self.env, self.level = list(seeds), env, level
        self.varied = {name: self._numbers(name, x) for name, x in options.items() if isinstance(x, list)}
        self.shared = {name: x for name, x in options.items() if name not in self.varied}
        members = [self._member(i, "eager") for i in range(len(self.seeds))]
        self.one = members[0]
        if not isinstance(self.one.env, Env):
            raise ValueError(f"a population is one program with its environments, and {self.one.env.name} is stepped "
                             "by the host: `tutti rl list` shows those that are not")  # fmt: skip
        if fixed := sorted(self.varied.keys() & self.one.constants):
            raise ValueError(f"{fixed[0]} cannot differ between members of a population: {self.kind.__name__} makes "
                             "its networks, optimizers and replay with it, once for all members")  # fmt: skip
        states = [x.program.state() for x in members]
        run = pytree.tree_map(lambda *x: torch.stack(x), *states)
        self.program = Program(run, level)
        self.episodes = [deque[float](maxlen=100) for _ in self.seeds]
        self.num_timesteps = 0

    def _numbers(self, name: str, values: list) -> Tensor:
        if len(values) != len(self.seeds):
            raise ValueError(f"{name} has {len(values)} values for {len(self.seeds)} members")
        if name not in variable(self.kind) or not all(isinstance(x, float) for x in values):
            can = ", ".join(variable(self.kind))
            raise ValueError(f"{name} cannot differ between members of a population: only numbers that are read while "
                             f"learning can, as floats; of {self.kind.__name__} {can}")  # fmt: skip
        return torch.tensor(values)

    def _member(self, i: int, level: str) -> Any:
        own = {name: float(x[i]) for name, x in self.varied.items()}
        return self.kind(self.env, seed=self.seeds[i], level=level, **self.shared, **own)

    def learn(self, total_timesteps: int, callback: Callable[[Population], bool | None] | None = None) -> Population:
        """Learn for so many steps of each member more.

        callback: called with the population after each iteration; learning ends when it returns False.
        """
        self.total = self.num_timesteps + total_timesteps
        total = torch.full((len(self.seeds),), float(self.total))
        self.program.put({"total": total})
        with progress("learning") as display:

            def report() -> bool | None:
                display.count(self.num_timesteps, self.total, f"steps of {len(self.seeds)} members")
                return callback(self) if callback else None

            drive(self, self.total, self.step, report)
        return self

    def step(self) -> None:
        """One iteration of all members."""
        one = self.one
        one.num_timesteps = self.num_timesteps
        metrics = self.program.call(self._function(one.phase()))
        ended = metrics.pop("episodes", None)
        self.metrics = metrics  # (members,)
        for name, x in metrics.items():
            if not x.isfinite().all():
                member = int((~x.isfinite()).nonzero()[0])
                raise ValueError(f"{name} of member {member} is {float(x[member])} by step {self.num_timesteps:,}; "
                                 "lower its learning_rate, or scale rewards")  # fmt: skip
        if ended is None:  # offline algorithms count updates
            self.num_timesteps += one.steps_per_iteration
            return
        returns, lengths = ended["return"], ended["length"]
        each = returns if returns.ndim == lengths.ndim else returns.mean(-1)
        for i, history in enumerate(self.episodes):
            history.extend(each[i][lengths[i] > 0].tolist())
        self.num_timesteps += lengths[0].numel()

    def _function(self, phase: Any) -> Any:
        """An iteration of all members, as a function of their run."""

        def all_members(run: Tree) -> tuple[Tree, Tree]:
            return torch.vmap(self._of_one(phase), randomness="error")(run, self.varied)

        return self.one.functions.setdefault(("population", phase), all_members)

    def _of_one(self, phase: Any) -> Any:
        def member(run: Tree, varied: Tree) -> tuple[Tree, Tree]:
            config = self.one.config
            self.one.config = replace(config, **varied)
            try:
                return phase(run)
            finally:
                self.one.config = config

        return member

    def returns(self) -> list[float]:
        """The mean return of the last 100 episodes of each member, or nan."""
        return [sum(x) / len(x) if x else float("nan") for x in self.episodes]

    def agent(self, i: int, level: str | None = None) -> Any:
        """Member i as a separate agent."""
        member = self._member(i, level or self.level)
        member.program.load(pytree.tree_map(lambda x: x[i].clone(), self.program.state()))
        member.num_timesteps = self.num_timesteps
        return member


def variable(kind: type[Agent]) -> list[str]:
    """The options of an algorithm that may be tensors, and so may differ between members of a population."""
    hints = get_type_hints(kind.Config)
    return [name for name, hint in hints.items() if Tensor in get_args(hint) and name not in kind.unused]
