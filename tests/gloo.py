"""A pool of Gloo processes. It lives outside of conftest.py, whose name is not unique, so that it can be pickled."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch

RANKS = 4
PRELOADED = ["transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama", "tutti.api.step"]
"""What most tasks import: once, in the process that ranks are forked from, and not in each of them."""
SECONDS = 240  # no task takes longer; a pool that hangs is ended


class Pool:
    """Some processes of one Gloo job, four if not said, that run module-level functions, all together."""

    def __init__(self, ranks: int = RANKS) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.pipes, self.processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, ranks, port, theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The results of `function(*args)` by rank. An error of any rank is raised here with its traceback."""
        for pipe in self.pipes:
            pipe.send((function, args))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(SECONDS):
                self.close()
                raise TimeoutError(f"rank {rank} did not finish {function.__name__} in {SECONDS} s")
            answers.append(pipe.recv())
        errors = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
        assert not errors, "\n".join(errors)
        return [value for _, value in answers]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _work(rank: int, ranks: int, port: int, pipe) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    while True:
        function, args = pipe.recv()
        try:
            pipe.send((True, function(*args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
