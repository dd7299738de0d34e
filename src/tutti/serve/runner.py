"""The runner: executes the steps of the engine as a Function over a Store of parameters and KV cache.

The Function is captured from the model's own code, for a flat batch of tokens: those of all sequences, one behind the
other. Numbers of tokens, sequences and results are rounded up to buckets, so that few graphs serve all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from contextlib import nullcontext
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tutti.api.function import Function, function
from tutti.api.store import Store
from tutti.exec.runtime import own_slice
from tutti.launch.heartbeat import HEARTBEAT
from tutti.plan.layout import devices
from tutti.serve.attention import Cache, Step, empty_cache, layers_of, paging, slot_bytes
from tutti.serve.lora import Adapters
from tutti.serve.scheduler import Batch, Move


def buckets(most: int) -> list[int]:
    """Sizes that numbers up to `most` are rounded up to: the powers of 2, and 1.5 times those from 16 on."""
    found, n = [], 1
    while n < most:
        found += [n, n * 3 // 2] if n >= 16 else [n]
        n *= 2
    return [x for x in found if x < most] + [most]


class Runner:
    """Executes batches.

    model: a causal language model. block: tokens of a block. blocks: number of blocks, or None: as many as `memory`
    bytes hold. host_memory: bytes for blocks on the host. budget, most: tokens and sequences of a step. longest: tokens
    of a sequence, at most. options: those of `tutti.function`. adapters: of the requests.
    """

    def __init__(self, model: nn.Module, *, block: int, blocks: int | None, memory: int, host_memory: int, budget: int,
                 most: int, longest: int, options: dict[str, Any], adapters: Adapters | None = None):  # fmt: skip
        self.adapters = adapters
        self.model, self.block, self.budget, self.most = model, block, budget, most
        self.layers = layers_of(model)
        device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
        each = slot_bytes(self.layers, dtype) * block
        self.blocks = memory // each if blocks is None else blocks
        self.host_blocks = host_memory // each
        if self.blocks < 2:
            raise ValueError(f"a KV cache of {memory} bytes has {self.blocks} blocks; each has {each} bytes: give more")
        self.longest = min(longest, self.blocks * block)
        self.width = -(-self.longest // block)  # blocks of a sequence
        self.cache = empty_cache(self.layers, self.blocks * block, dtype, device)
        objects: dict[str, Any] = {"model": model, "cache": self.cache} | ({"adapters": adapters} if adapters else {})
        self.store = Store(**objects)
        self.host: list[dict[str, Tensor]] = []  # blocks on the host, by local rank
        self.sizes = buckets(budget)
        self.ready: dict[tuple[int, ...], Callable[..., Tensor]] = {}  # captured steps, by shape
        self._hidden: Function | None = None
        self.function = function(
            step_function(model, self.cache, block, adapters), *self._example(1, 1, 1), store=self.store, **options
        )

    def _example(self, tokens: int, sequences: int, rows: int) -> tuple[Tensor, ...]:
        zeros = torch.zeros(tokens, dtype=torch.int64)
        of_sequences = torch.zeros(sequences, dtype=torch.int32)
        return (zeros, zeros, zeros - 1, torch.zeros(sequences, self.width, dtype=torch.int32),
                torch.zeros(sequences + 1, dtype=torch.int32), of_sequences, torch.zeros(rows, dtype=torch.int64),
                *([zeros] if self.adapters else []))  # fmt: skip

    def shape(self, tokens: int, sequences: int, rows: int) -> tuple[int, int, int]:
        """The bucket of a step: numbers of tokens, sequences and results."""
        if tokens == sequences == rows <= self.most:  # only generates
            size = self._bucket(tokens)
            return size, size, size
        return self._bucket(max(tokens, self.most)), self.most, self._bucket(max(rows, self.most))

    def _bucket(self, n: int) -> int:
        return next((x for x in self.sizes if x >= n), n)

    def arguments(self, batch: Batch, rows: Several[int]) -> tuple[Tensor, ...]:
        """The arguments of a step. rows: which tokens' logits are wanted, counted over the batch."""
        block, pieces = self.block, batch.pieces
        tokens, sequences, results = self.shape(batch.tokens, len(pieces), len(rows))
        ids, positions = np.zeros(tokens, np.int64), np.zeros(tokens, np.int64)
        slots = np.full(tokens, -1, np.int64)
        tables = np.zeros((sequences, self.width), np.int32)
        starts, lengths = np.zeros(sequences + 1, np.int32), np.zeros(sequences, np.int32)
        at = 0
        for i, (sequence, start, count) in enumerate(pieces):
            end = start + count
            own = slice(at, at + count)
            known = len(sequence.tokens)
            ids[own] = (sequence.tokens[start:end] + sequence.drafts[max(start - known, 0) : end - known]
                        if end > known else sequence.tokens[start:end])  # fmt: skip
            positions[own] = places = np.arange(start, end)
            tables[i, : len(sequence.blocks)] = sequence.blocks
            slots[own] = tables[i, places // block].astype(np.int64) * block + places % block
            at += count
            starts[i + 1 :], lengths[i] = at, end
        wanted = np.zeros(results, np.int64)
        wanted[: len(rows)] = rows
        made = [ids, positions, slots, tables, starts, lengths, wanted]
        if self.adapters:
            numbers = [self.adapters.number(x.sequence.request.adapter) for x in pieces]
            made.append(np.pad(np.repeat(numbers, [x.count for x in pieces]), (0, tokens - at)))
        return tuple(map(torch.from_numpy, made))

    def synthetic(self, pieces: Several[tuple[int, int]]) -> tuple[Tensor, ...]:
        """Arguments of a step to measure. It reads the cache and writes nothing. pieces: (new tokens, tokens with those
        before them) of each sequence."""
        total = sum(n for n, _ in pieces)
        arguments = self._example(*self.shape(total, len(pieces), len(pieces)))
        _, positions, _, tables, starts, lengths, _ = arguments[:7]
        tables += torch.arange(self.width, dtype=torch.int32) % self.blocks
        at = 0
        for i, (count, context) in enumerate(pieces):
            positions[at : at + count] = torch.arange(context - count, context)
            at += count
            starts[i + 1 :], lengths[i] = at, context
        return arguments

    def run(self, batch: Batch, rows: Several[int]) -> Tensor:
        """Execute a batch. Returns logits (len(rows), vocabulary)."""
        arguments = self.arguments(batch, rows)
        self._tell("execute", arguments, batch.moves)
        return self.execute(arguments, batch.moves)[: len(rows)]

    def execute(self, arguments: tuple[Tensor, ...], moves: Several[Move] = ()) -> Tensor:
        """Execute a step on this process: the moves, then the Function. Returns its logits, padding included."""
        self.move(moves)
        shape = tuple(len(x) for x in arguments)
        if shape not in self.ready:
            self.ready[shape] = self.function.fixed(*arguments)
        return self.ready[shape](*arguments)

    def shapes(self) -> list[tuple[int, int, int]]:
        """The buckets of steps that only generate, and of steps with prompts."""
        most = self._bucket(self.most)
        return [(n, n, n) for n in self.sizes if n <= most] + [(n, self.most, most) for n in self.sizes if n >= most]

    def prepare(self, shape: tuple[int, int, int]) -> None:
        """Capture and compile the step of a bucket, and run it once without a token."""
        arguments = self._example(*shape)
        self._tell("execute", arguments)
        self.execute(arguments)

    def hidden(self, tokens: Several[int]) -> Tensor:
        """The last hidden states (len(tokens), hidden) of a sequence. The cache is not used."""
        self._tell("hidden", tokens)
        size = next((x for x in buckets(self.longest) if x >= len(tokens)), len(tokens))
        ids = torch.tensor([[*tokens, *[0] * (size - len(tokens))]])
        if self._hidden is None:
            self._hidden = function(_hidden(self.model), ids, store=self.store, plan=self.function.plan.name,
                                    cluster=self.function.cluster)  # fmt: skip
        return self._hidden(ids)[0, : len(tokens)]

    # -- several processes: rank 0 schedules, all ranks execute ------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Whether this process schedules. In a job of several processes, rank 0 does."""
        return not dist.is_initialized() or dist.get_rank() == 0

    def _tell(self, *what: Any) -> None:
        """Make the other ranks do the same: the name of a method, and its arguments."""
        if self.leads and dist.is_initialized() and dist.get_world_size() > 1:
            with HEARTBEAT.within("broadcast", "the next step"):
                dist.broadcast_object_list([what])

    def follow(self) -> Any:
        """Execute the steps of rank 0 until it calls `release`. Returns what it passed; an error is raised."""
        while True:
            box: list[Any] = [None]
            with HEARTBEAT.within("broadcast", "the next step"):
                dist.broadcast_object_list(box)
            name, *arguments = box[0]
            if name != "release":
                getattr(self, name)(*arguments)
            elif isinstance(arguments[0], Exception):
                raise arguments[0]
            else:
                return arguments[0]

    def release(self, what: Any) -> None:
        """End `follow` on the other ranks."""
        self._tell("release", what)

    # -- blocks of other engines ------------------------------------------------------------------------------------

    def read_blocks(self, blocks: Several[int]) -> dict[str, Tensor]:
        """The contents of blocks: full CPU tensors (slots, heads, width) by name."""
        self._tell("read_blocks", blocks)
        found, index = {}, torch.tensor(blocks)
        for name in self.store.names("cache"):
            stored = self.store.tensors[name]
            parts = {rank: self._in_blocks(x)[index.to(x.device)].flatten(0, 1)
                     for rank, x in self.store.parts_of(name).items()}  # fmt: skip
            spec = replace(stored.spec, shape=(len(blocks) * self.block, *stored.spec.shape[1:]))
            found[name] = self.store.assemble(parts, stored.device, stored.layout, spec)
        return found

    def write_blocks(self, blocks: Several[int], contents: dict[str, Tensor]) -> None:
        """Replace the contents of blocks."""
        self._tell("write_blocks", blocks, contents)
        index = torch.tensor(blocks)
        for name, whole in contents.items():
            stored = self.store.tensors[name]
            for rank, x in self.store.parts_of(name).items():
                own = own_slice(whole, stored.layout, self.store.inner, rank % devices(self.store.inner))
                self._in_blocks(x)[index.to(x.device)] = self._in_blocks(own).to(x)

    def _in_blocks(self, x: Tensor) -> Tensor:
        """Slots (slots, heads, width) as blocks (blocks, block, heads, width)."""
        return x.view(-1, self.block, *x.shape[1:])

    def move(self, moves: Several[Move]) -> None:
        """Copy blocks within the cache, to the host and back, in order."""
        for kind, run in groupby(moves, key=lambda x: x.kind):
            for sources, targets in _independent(list(run)):
                for i, parts in enumerate(self.store.parts):
                    self._copy(i, {k: x for k, x in parts.items() if k.startswith("cache:")}, kind, sources, targets)

    def _copy(self, rank: int, caches: dict[str, Tensor], kind: str, sources: Tensor, targets: Tensor) -> None:
        """Copy blocks of all layers of a rank."""
        while len(self.host) <= rank:
            slots = self.host_blocks * self.block
            self.host.append({name: torch.zeros(slots, *x.shape[1:], dtype=x.dtype) for name, x in caches.items()})
        for name, x in caches.items():
            source = self.host[rank][name] if kind == "in" else x
            target = self.host[rank][name] if kind == "out" else x
            blocks = self._in_blocks(source)[sources.to(source.device)]
            self._in_blocks(target)[targets.to(target.device)] = blocks.to(target.device)


def step_function(
    model: nn.Module, cache: Cache, block: int, adapters: Adapters | None = None
) -> Callable[..., Tensor]:
    """The step of a model as a function of tensors."""

    @torch.no_grad()
    def step(tokens: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, starts: Tensor, lengths: Tensor,
             rows: Tensor, numbers: Tensor | None = None) -> Tensor:  # fmt: skip
        """The logits (rows, vocabulary) after tokens (tokens,) at these positions.

        rows: the tokens whose logits are returned. numbers: the adapter of each token.
        """
        added = nullcontext() if numbers is None or adapters is None else adapters.added(model, numbers)
        with added, paging(model, cache, Step(slots, tables, starts, lengths, block)):
            made = model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows)
        return made.logits[0]

    return step


def _hidden(model: Any) -> Callable[[Tensor], Tensor]:
    """The last hidden states of a model as a function of tokens."""

    @torch.no_grad()
    def hidden(tokens: Tensor) -> Tensor:
        return model.base_model(input_ids=tokens, use_cache=False).last_hidden_state

    return hidden


def _independent(moves: list[Move]) -> Iterator[tuple[Tensor, Tensor]]:
    """Sources and targets of moves that can be made at once: no one reads or writes what an earlier one writes."""
    group: list[Move] = []
    for move in moves:
        if any(move.source == x.target or move.target == x.target for x in group):
            yield _columns(group)
            group = []
        group.append(move)
    if group:
        yield _columns(group)


def _columns(moves: list[Move]) -> tuple[Tensor, Tensor]:
    return torch.tensor([x.source for x in moves]), torch.tensor([x.target for x in moves])
