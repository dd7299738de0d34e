"""A worker of `Workers` that is an actor of Ray, on whatever machine of the cluster has a core to spare.

It has arrays of its own, as shared memory ends at the machine: actions are sent with each step, and what the
environments return is copied into the arrays of the parent.
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
from typing import Any

import cloudpickle
import numpy as np

from tutti.rl.adapt.checked import StepError
from tutti.rl.adapt.processes.shared import Path, Shapes, Shared
from tutti.rl.adapt.processes.worker import COMMANDS, Arrays, describe

PATIENCE = 30.0  # s, for an actor to start, after which the user is told that it waits
OF_LAST = "last", "last_masks", "last_overview"  # written in steps in which an episode ends


class EnvActor:
    """The actor: `tutti.rl.adapt.processes.worker.serve` with calls instead of messages."""

    def make(self, factory: bytes, n: int, first: int) -> tuple[Any, ...]:
        """Make an environment of n instances, of which the first has the number `first` for the parent."""
        self.n, self.first = n, first
        return self._tried(lambda: self._make_env(factory))

    def attach(self, shapes: Shapes) -> None:
        """Make the arrays. shapes: shapes and dtypes of the parent's arrays, which are of more instances."""
        self.mine: Arrays = {path: np.zeros((self.n, *shape[1:]), dtype) for path, (shape, dtype) in shapes.items()}

    def call(self, command: str, argument: Any, actions: Arrays) -> tuple[tuple[Any, ...], Arrays]:
        """The answer to a command, and the arrays that it may have written."""
        for path, x in actions.items():
            self.mine[path][...] = x
        answer = self._tried(lambda: COMMANDS[command](self.env, self.mine, argument))
        left_out = {"action"} if answer[1] is True else {"action", *OF_LAST}
        return answer, {path: x for path, x in self.mine.items() if path[0] not in left_out}

    def _make_env(self, factory: bytes) -> Any:
        self.env = cloudpickle.loads(factory)(self.n)
        return describe(self.env, self.n)

    def _tried(self, run: Any) -> tuple[Any, ...]:
        try:
            return "done", run()
        except NotImplementedError as error:
            return "cannot", str(error)
        except ValueError as error:
            return "unfit", error
        except Exception as error:
            if isinstance(error, StepError):
                error.instance += self.first
            return "failed", f"{type(error).__name__}: {error}", traceback.format_exc()


class RayConnection:
    """Has the methods of a pipe's end that `Workers` calls, over an actor. lo, hi: its instances."""

    def __init__(self, factory: bytes, lo: int, hi: int):
        import ray

        if not ray.is_initialized():
            ray.init(log_to_driver=False, logging_level=40)  # of the cluster that RAY_ADDRESS names, or a new one
        kind: Any = ray.remote(EnvActor)
        self.actor = kind.options(num_cpus=1, scheduling_strategy="SPREAD").remote()
        self.mine: dict[Path, np.ndarray] = {}
        self.lo, self.hi = lo, hi
        self.pending = self.actor.make.remote(factory, hi - lo, lo)

    def attach(self, shared: Shared) -> None:
        """Attach to the parent's arrays, to read actions and write results there."""
        self.mine = {path: x[self.lo : self.hi] for path, x in shared.arrays.items()}
        self.actor.attach.remote(shared.shapes)

    def send(self, message: tuple[str, Any]) -> None:
        command, argument = message
        if command != "close":
            actions = {path: x.copy() for path, x in self.mine.items() if path[0] == "action"}
            self.pending = self.actor.call.remote(command, argument, actions if command == "step" else {})

    def poll(self, timeout: float) -> bool:
        """Whether an answer arrives within a number of seconds."""
        import ray

        return bool(ray.wait([self.pending], timeout=timeout)[0])

    def recv(self) -> tuple[Any, ...]:
        """The answer. Raises EOFError if the actor is gone."""
        import ray
        from ray.exceptions import RayError

        if not self.mine and not self.poll(PATIENCE):
            warnings.warn(f"an environment worker waits for a core of the Ray cluster; {ray.available_resources()} are "
                          "free", RuntimeWarning, stacklevel=2)  # fmt: skip
        try:
            answer: Any = ray.get(self.pending)
        except RayError:
            raise EOFError from None
        if not isinstance(answer[0], tuple):
            return answer
        answer, arrays = answer
        for path, x in arrays.items():
            self.mine[path][...] = x
        return answer

    def close(self) -> None:
        import ray

        self.mine.clear()
        with contextlib.suppress(Exception):  # it is gone already, or the cluster is
            ray.kill(self.actor)
