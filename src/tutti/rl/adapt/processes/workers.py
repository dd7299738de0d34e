"""Environments in processes of their own, which are started again when they crash."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np

from tutti.rl.adapt import layout
from tutti.rl.adapt.checked import Unfit
from tutti.rl.adapt.processes.shared import Shapes, Shared
from tutti.rl.adapt.processes.worker import PARTS, About, serve
from tutti.rl.core.vector import Moved, VectorEnv

IN_A_ROW = 3  # failures of a worker without a step between them, after which it is given up
EXTRAS = ("masks", "overview")  # what environments may tell besides observations
PATIENCE = 5.0  # s, for a process to end
START = 60.0  # s, at least, for a process to start and import its environment


class Workers(VectorEnv):
    """n instances in worker processes, each with about n / processes of them.

        env = Workers(lambda n: Gymnasium("Ant-v5", n), 32, processes=4)

    factory: called in each worker with its number of instances; returns a `VectorEnv`. Sent with cloudpickle.
    timeout: seconds after which a worker that does not answer counts as crashed; to start it has a minute, if that is
        more. None: never.
    start: how processes start ("forkserver", "spawn" or "fork"). "fork" is unsafe in a process with threads. "ray":
        workers are actors of Ray, each with a core of the cluster.

    `send` gives the workers their actions and returns at once, `recv` waits for the result; `step` is both. See
    `tutti.rl.adapt.processes.halves.Halves` for computing actions of some instances while others step.

    A worker that crashes, hangs or raises is started again, with new episodes: `restarts` counts this. The episodes
    that it lost are reported as truncated, with reward 0 and the last observation that is known. A worker that fails
    three times without a step between them raises RuntimeError. `Unfit` is raised at once: see `checked`.
    """

    def __init__(
        self,
        factory: Callable[[int], VectorEnv],
        n: int,
        processes: int,
        *,
        timeout: float | None = None,
        start: str = "forkserver",
    ):
        if not 1 <= processes <= n:
            raise ValueError(f"{processes} processes for {n} instances: each process has at least one instance")
        self.n, self.timeout, self.restarts, self.steps, self.seed = n, timeout, 0, 0, None
        self.context = None if start == "ray" else multiprocessing.get_context(start)
        self.factory = cloudpickle.dumps(factory)
        bounds = [k * n // processes for k in range(processes + 1)]
        self.workers = [_Worker(k, *bounds[k : k + 2]) for k in range(processes)]
        self.shared: Shared | None = None
        self.sent = False
        self.end = weakref.finalize(self, _end, self.workers, None)
        try:
            for worker in self.workers:
                worker.start(self.context, self.factory)
            about = [worker.answer(self._start) for worker in self.workers]
            self._share(about[0])
            for worker in self.workers:
                self._tell(worker)
        except _Failed as failed:
            self.close()
            raise RuntimeError(f"{failed.worker} could not make its environment: {failed.words}") from None
        except BaseException:
            self.close()
            raise

    def reset(self, seed: int | None = None) -> layout.Batch:
        if self.sent:
            self.recv()
        self.steps, self.seed = 0, seed
        seeds = [None if seed is None else seed + worker.lo for worker in self.workers]
        for worker, begin in zip(self.workers, seeds, strict=True):
            worker.ask("reset", begin)
        for worker, begin in zip(self.workers, seeds, strict=True):
            try:
                self._answer(worker)
            except _Failed as failed:
                self._restart(failed, begin)
        self.obs = self._copy("obs")
        return self.obs

    def send(self, action: Any) -> None:
        """Start a step; `recv` returns its result. action: as in `step`."""
        if self.sent:
            raise ValueError(f"{self.name}: send was called twice; call recv for the result of the first step")
        into = self._shared().group("action")
        leaves = layout.leaves(action)
        shapes = {path: x.shape for path, x in leaves.items()}
        needed = {path: x.shape for path, x in into.items()}
        if shapes != needed:
            raise ValueError(f"actions for {self.name} have shapes {_plain(shapes)}, not {_plain(needed)}")
        for path, x in leaves.items():
            if into[path].dtype == np.int64 and x.dtype.kind not in "iub":
                raise ValueError(f"actions for {self.name} have dtype {x.dtype}; they are integers, such as int64")
        for path, x in leaves.items():
            into[path][...] = x
        self.sent = True
        self.before: list[Any] = [self._optional(name) for name in EXTRAS]
        self.steps += 1
        for worker in self.workers:
            worker.ask("step")

    def recv(self) -> Moved:
        """Wait for the step that `send` started, and return its result."""
        if not self.sent:
            raise ValueError(f"{self.name}: recv was called before send; nothing is under way")
        self.sent = False
        lost, ended = [], False
        for worker in self.workers:
            try:
                ended |= self._answer(worker)
                worker.failures = 0
            except _Failed as failed:
                lost.append(worker)
                # other episodes than those that crashed, but the same ones in each run
                fresh = None if self.seed is None else self.seed + worker.lo + self.n * (self.restarts + 1)
                self._restart(failed, fresh)
        arrays = self._shared().arrays
        previous, self.obs = self.obs, self._copy("obs")
        reward, terminated, truncated = (arrays[(name,)].copy() for name in ("reward", "terminated", "truncated"))
        last, extras = self.obs, [self._optional(name) for name in EXTRAS]
        parts = {name: self._optional(name) for name in PARTS}
        if ended or lost:
            done = terminated | truncated
            last = layout.put(self.obs, done, layout.rows(layout.tree(self._shared().group("last")), done))
            for name, x in zip(EXTRAS, extras, strict=True):
                if x is not None:
                    x[done] = arrays[(f"last_{name}",)][done]
        for worker in lost:
            of = slice(worker.lo, worker.hi)
            reward[of], terminated[of], truncated[of] = 0, False, True
            last = layout.put(last, of, layout.rows(previous, of))
            for name, x in parts.items():
                if x is not None:
                    x[of] = name != "agent_terminated"
            for x, before in zip(extras, self.before, strict=True):
                if x is not None:
                    x[of] = before[of]
        return Moved(self.obs, reward, terminated, truncated, last, *extras, **parts)

    def step(self, action: Any) -> Moved:
        self.send(action)
        return self.recv()

    def masks(self) -> np.ndarray | None:
        return self._optional("masks")

    def overview(self) -> np.ndarray | None:
        return self._optional("overview")

    def draw(self, i: int = 0) -> np.ndarray | None:
        worker = next(w for w in self.workers if w.lo <= i < w.hi)
        return self._call([worker], "draw", [i - worker.lo])[0]

    def state(self) -> list[Any]:
        """The states of the workers' environments. Restored by as many workers."""
        return self._call(self.workers, "state", [None] * len(self.workers))

    def restore(self, state: list[Any]) -> layout.Batch:
        if len(state) != len(self.workers):
            raise ValueError(f"the state is of {len(state)} workers of {self.name}, not of {len(self.workers)}")
        self._call(self.workers, "restore", state)
        self.obs = self._copy("obs")
        return self.obs

    def close(self) -> None:
        self.end()

    def _share(self, about: About) -> None:
        for name, value in about.attributes.items():
            setattr(self, name, value)
        shapes: Shapes = {path: ((self.n, *shape), dtype) for path, (shape, dtype) in about.shapes.items()}
        self.shared = Shared(shapes)
        self.end.detach()
        self.end = weakref.finalize(self, _end, self.workers, self.shared)
        self.obs = self._copy("obs")

    def _shared(self) -> Shared:
        if self.shared is None or not self.shared.arrays:
            raise ValueError("the workers are closed")
        return self.shared

    def _tell(self, worker: _Worker) -> None:
        """Tell a new worker where its arrays are."""
        worker.attach(self._shared())

    def _copy(self, name: str) -> layout.Batch:
        return layout.tree({path: x.copy() for path, x in self._shared().group(name).items()})

    def _optional(self, name: str) -> np.ndarray | None:
        return self._copy(name) if (name,) in self._shared().arrays else None

    def _call(self, workers: list[_Worker], command: str, arguments: list[Any]) -> list[Any]:
        if self.sent:
            raise ValueError(f"{self.name}: {command} between send and recv; call recv first")
        for worker, argument in zip(workers, arguments, strict=True):
            worker.ask(command, argument)
        results, cannot = [], None
        for worker in workers:
            try:
                results.append(self._answer(worker))
            except NotImplementedError as error:
                cannot = error
            except _Failed as failed:
                self.close()
                raise RuntimeError(f"{self.name}: {failed.worker} failed in {command}: {failed.words}") from None
        if cannot is not None:
            raise cannot
        return results

    @property
    def _start(self) -> float | None:
        """Seconds for a worker to start."""
        return None if self.timeout is None else max(self.timeout, START)

    def _answer(self, worker: _Worker) -> Any:
        try:
            return worker.answer(self.timeout)
        except ValueError:
            self.close()  # the others' answers are not waited for
            raise

    def _restart(self, failed: _Failed, seed: int | None) -> None:
        """Start a failed worker again, with new episodes. seed: seed of its first instance."""
        worker = failed.worker
        while True:
            worker.failures += 1
            if worker.failures >= IN_A_ROW:
                self.close()
                raise RuntimeError(
                    f"{self.name}: {worker} failed {IN_A_ROW} times in a row, the last time in step {self.steps}: "
                    f"{failed.words}"
                ) from None
            self.restarts += 1
            if self.restarts == 1:
                warnings.warn(f"{self.name}: {worker} failed in step {self.steps} and is started again, as after later "
                              f"failures: {failed.words}", RuntimeWarning, stacklevel=4)  # fmt: skip
            try:
                worker.stop()
                worker.start(self.context, self.factory)
                worker.answer(self._start)
                self._tell(worker)
                worker.ask("reset", seed)
                self._answer(worker)
                return
            except _Failed as again:
                failed = again


class _Worker:
    """A process and the connection to it. k: its number. lo, hi: its instances."""

    def __init__(self, k: int, lo: int, hi: int):
        self.k, self.lo, self.hi, self.failures = k, lo, hi, 0
        self.process: Any = None  # of an actor of Ray, and before it is started
        self.connection: Any = None

    def __str__(self) -> str:
        of = f"instance {self.lo}" if self.hi - self.lo == 1 else f"instances {self.lo} to {self.hi - 1}"
        return f"worker {self.k} ({of})"

    def start(self, context: Any, factory: bytes) -> None:
        """Start the worker. context: context of multiprocessing, or None for an actor of Ray."""
        if context is None:
            from tutti.rl.adapt.processes.ray_worker import RayConnection

            self.connection = RayConnection(factory, self.lo, self.hi)
            return
        self.connection, theirs = context.Pipe()
        arguments = (theirs, factory, self.hi - self.lo, self.lo)
        self.process = context.Process(target=serve, args=arguments, daemon=True, name=str(self))
        self.process.start()
        theirs.close()

    def attach(self, shared: Shared) -> None:
        if self.process is None:
            self.connection.attach(shared)
        else:
            self.send((shared.shapes, shared.name))

    def ask(self, command: str, argument: Any = None) -> None:
        self.send((command, argument))

    def send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # a process that has ended is noticed when its answer is waited for
            self.connection.send(message)

    def answer(self, timeout: float | None) -> Any:
        try:
            if timeout is not None and not self.connection.poll(timeout):
                raise _Failed(self, f"no answer in {timeout} s")
            answer = self.connection.recv()
        except (EOFError, OSError):
            if self.process is None:
                raise _Failed(self, "its actor or its node is gone") from None
            self.process.join(PATIENCE)
            code = self.process.exitcode
            how = f"by signal {signal.Signals(-code).name}" if code and code < 0 else f"with exit code {code}"
            raise _Failed(self, f"its process ended {how}") from None
        match answer:
            case "done", result:
                return result
            case "unfit", Unfit() as error:
                raise Unfit(error.name, error.instance + self.lo, error.problem)
            case "unfit", error:
                raise error
            case "cannot", words:
                raise NotImplementedError(words)
        raise _Failed(self, f"{answer[1]}\n\n{answer[2]}")

    def stop(self) -> None:
        if self.process is None:
            if self.connection is not None:
                self.connection.close()
                self.connection = None
        else:
            self.connection.close()
            if self.process.pid is not None:  # it was started
                self.process.kill()
                self.process.join()
            self.process.close()
            self.process = None


class _Failed(Exception):
    def __init__(self, worker: _Worker, words: str):
        super().__init__(words)
        self.worker, self.words = worker, words


def _end(workers: list[_Worker], shared: Shared | None) -> None:
    for worker in workers:
        if worker.process is not None:
            worker.ask("close")
    until = time.monotonic() + PATIENCE
    for worker in workers:
        if worker.process is not None and worker.process.pid is not None:
            worker.process.join(max(0.0, until - time.monotonic()))
        worker.stop()
    if shared is not None:
        shared.close()


def _plain(shapes: dict[tuple[str, ...], tuple[int, ...]]) -> Any:
    return shapes[()] if () in shapes else {"/".join(path): shape for path, shape in shapes.items()}
