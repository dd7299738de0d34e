"""Where completions are written, beside the devices that train.

| placement | engines |
|---|---|
| together | one for the whole job, whose plan divides the model among the devices |
| replicas | one in each process of the job, which completes a share of the prompts |
| apart | one in each of some more processes, on other devices or cores, which complete a share each |

With `apart` and `staleness`, the next round is written while training goes on. Seeds belong to requests, so all
placements draw equal completions, up to what the rounding of log-probabilities changes.
"""

from __future__ import annotations

import copy
import math
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tutti.align.arguments import is_adapted
from tutti.align.rollouts.rollout import Groups, Sampler
from tutti.exec.runtimes.runtime import alone, from_rank_0, gathered, in_group
from tutti.hardware import local
from tutti.serve import Request
from tutti.serve.weights import whole_weights

PLACEMENTS = "together", "replicas", "apart"
JOB = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"  # variables of a job, which a writer is not part of
GUARD = (
    "a process that writes completions imports this script, and would train again: put what the script does under "
    "`if __name__ == '__main__':`"
)


class Replicas(Sampler):
    """An engine in each process of a job, which completes a share of the prompts. Arguments as for `Sampler`."""

    def __init__(self, model: Any, *args: Any, **options: Any):
        own = {"plan": "single", "cluster": local(1, next(model.parameters()).device.type)}
        with alone():
            super().__init__(model, *args, **{**options, **own})

    def begin(self, requests: Sequence[Request]) -> Callable[[], Groups]:
        """As `Sampler.begin`. Every process of a job calls it and gets the completions of all."""
        rank, count = (dist.get_rank(), dist.get_world_size()) if in_group() else (0, 1)
        own: Groups | str
        try:
            with alone():
                own = super().begin(requests[rank::count])()
        except Exception as error:  # the other processes wait for this one
            own = f"process {rank}: {type(error).__name__}: {error}"
        groups = _interleaved(gathered(own, "completions"))
        return lambda: groups


class Entry(NamedTuple):
    """A parameter in the block of memory that carries weights."""

    name: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Apart(Sampler):
    """Engines in processes of their own, each of which completes a share of the prompts.

    workers: number of processes, which process 0 of a job starts; on GPUs they take the devices behind those of the
    job. threads: PyTorch threads of each process, on CPUs. Other arguments as for `Sampler`.

    Raises RuntimeError in a process that imports a script without a guard, and ValueError if there are too few GPUs.
    """

    def __init__(self, model: Any, *args: Any, workers: int, threads: int, **options: Any):
        served = model.get_base_model() if is_adapted(model) else model
        self.sampling = args[1]
        self.entries = [Entry(name, x.shape, x.dtype) for name, x in served.named_parameters()]
        self.writers: list[Writer] = []
        self.asked, self.answered = 0, 0  # calls of `begin`
        self.answers: dict[int, Groups] = {}
        self.block, self.parts = torch.empty(0, dtype=torch.uint8), dict[str, Tensor]()
        from_rank_0(lambda: self._start(model, workers, threads, args, options))

    def _start(self, model: Any, workers: int, threads: int, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise RuntimeError(GUARD)
        skeleton = _with_parameters(model, "meta")
        for device in _devices(next(model.parameters()).device, workers):
            self.writers.append(Writer(device, threads, self.entries, skeleton, *args, **options))

    def update(self, weights: Any) -> int:
        """As `Sampler.update`. Returns the bytes of the weights, which all writers read from one block of memory."""
        from_rank_0(self._make_block)
        for name, x in whole_weights(weights, [x.name for x in self.entries]):
            if self.writers:
                self.parts[name].copy_(x)
        from_rank_0(self._send_weights)
        return sum(x.bytes for x in self.entries)

    def _make_block(self) -> None:
        """Memory for the weights of a round; writers may still read that of the round before."""
        self.block = torch.empty(sum(x.bytes for x in self.entries), dtype=torch.uint8).share_memory_()
        self.parts = _tensors(self.block, self.entries)

    def _send_weights(self) -> None:
        for writer in self.writers:
            writer.send("update", self.block)

    def begin(self, requests: Sequence[Request]) -> Callable[[], Groups]:
        """As `Sampler.begin`: the writers begin at once, and the function that is returned waits for them."""
        from_rank_0(lambda: self._send(requests))
        number, self.asked = self.asked, self.asked + 1
        return lambda: self._answer(number)

    def _send(self, requests: Sequence[Request]) -> None:
        for i, writer in enumerate(self.writers):
            writer.send("generate", requests[i :: len(self.writers)])

    def _answer(self, number: int) -> Groups:
        """The groups of the call of `begin` with this number. Writers answer in order; later answers are kept."""
        while number not in self.answers:
            shares = from_rank_0(lambda: [x.receive() for x in self.writers])
            self.answers[self.answered] = _interleaved(shares)
            self.answered += 1
        return self.answers.pop(number)


class Writer:
    """A process with an engine."""

    def __init__(self, *args: Any, **options: Any):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_write, args=(theirs, args, options), daemon=True)
        try:
            self.process.start()
        except AssertionError as error:  # this process is a daemon
            raise ChildProcessError(f"a process that writes completions cannot be started: {error}") from None
        theirs.close()

    def send(self, name: str, what: Any) -> None:
        try:
            self.pipe.send((name, what))
        except OSError:
            raise self._ended() from None

    def receive(self) -> Groups:
        """The completions of the first request that was not answered. Raises ChildProcessError."""
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError):
            raise self._ended() from None
        if isinstance(answer, str):
            raise ChildProcessError(f"a process that writes completions has failed:\n{answer}")
        return answer

    def _ended(self) -> ChildProcessError:
        self.process.join(5)
        code = self.process.exitcode
        hint = "; its error is above. A script must do what it does under `if __name__ == '__main__':`"
        return ChildProcessError(f"a process that writes completions has ended, with exit code {code}"
                                 + (hint if code == 1 else ""))  # fmt: skip


def _write(pipe: Any, args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """The work of a writer: take weights and complete prompts until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the process that trains
    for name in JOB:
        os.environ.pop(name, None)
    error, sampler, entries = "", None, []
    try:
        device, threads, entries, skeleton, *arguments = args
        torch.set_num_threads(threads)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        sampler = Sampler(_with_parameters(skeleton, device).to(device), *arguments, **{**options, "plan": "single"})
    except Exception:
        error = traceback.format_exc()
    messages: SimpleQueue[Any] = SimpleQueue()  # read at once: who sends the next must not wait for an answer's reader
    Thread(target=_read, args=(pipe, messages), daemon=True).start()
    while (message := messages.get()) is not None:
        name, what = message
        answer = None
        try:
            if sampler and name == "update":
                sampler.update(_tensors(what, entries))
            elif sampler:
                answer = sampler.begin(what)()
        except Exception:
            error = error or traceback.format_exc()
        if name == "generate":
            pipe.send(error or answer)


def _read(pipe: Any, messages: SimpleQueue[Any]) -> None:
    """Move the messages of a pipe into a queue, with None at the end."""
    try:
        while True:
            messages.put(pipe.recv())
    except (EOFError, OSError):
        messages.put(None)


def _devices(first: torch.device, count: int) -> list[torch.device]:
    """The devices of writers, behind those of the job."""
    if first.type != "cuda":
        return [first] * count
    begin = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.device_count() < begin + count:
        raise ValueError(f"{begin} processes that train and {count} that write completions need a GPU each; there are "
                         f"{torch.cuda.device_count()}")  # fmt: skip
    return [torch.device("cuda", begin + i) for i in range(count)]


def _with_parameters(model: nn.Module, device: torch.device | str) -> nn.Module:
    """A copy of a model with zeros for parameters, or none on the meta device, and the model's buffers."""
    zeros = {id(x): nn.Parameter(torch.zeros(x.shape, dtype=x.dtype, device=device), x.requires_grad)
             for x in model.parameters()}  # fmt: skip
    return copy.deepcopy(model, {**zeros, **{id(x): x for x in model.buffers()}})


def _tensors(block: Tensor, entries: Sequence[Entry]) -> dict[str, Tensor]:
    """Views of a block of bytes, by name."""
    parts = block.split([x.bytes for x in entries])
    return {x.name: part.view(x.dtype).view(x.shape) for x, part in zip(entries, parts, strict=True)}


def _interleaved(shares: Sequence[Groups | str]) -> Groups:
    """The groups of all requests, of which share i has every len(shares)-th from i on.

    Raises RuntimeError if a share is the text of an error.
    """
    if errors := [x for x in shares if isinstance(x, str)]:
        raise RuntimeError(errors[0])
    count, total = len(shares), sum(map(len, shares))
    return [shares[i % count][i // count] for i in range(total)]  # pyright: ignore
