"""The runner: executes the steps of the engine as a Function over a Store of parameters and KV cache.

The Function is captured from the model's own code, for a flat batch of tokens: those of all sequences, one behind the
other. Numbers of tokens, sequences and results are rounded up to buckets, so that few graphs serve all steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tutti.api.function import Function, function
from tutti.exec.runtimes.runtime import in_group, own_slice
from tutti.exec.stores.large_pages import pack
from tutti.ir.kind import Kind
from tutti.ir.step_graph import StepGraph
from tutti.launch.heartbeat import HEARTBEAT
from tutti.nn.attention.paged_attention import DTYPES
from tutti.nn.linear import linear_rows
from tutti.nn.quantized.quantized_linear import dtype_of
from tutti.nn.rows import ACTIVATION_OF
from tutti.nn.threads import own_threads
from tutti.plan.layouts.layout import devices
from tutti.plan.layouts.roles import UndividedBatch
from tutti.serve.cache.attention import Cache, CacheDtype, PagedStep, empty_cache, paging, slot_bytes
from tutti.serve.cache.logits import layers_of, logits
from tutti.serve.cache.rotary import by_span, scaling_of
from tutti.serve.engine.recorded import CudaGraphs, Recorded, Recorder
from tutti.serve.engine.saved_steps import SavedStore, graphs_of
from tutti.serve.engine.scheduler import Batch, Move
from tutti.serve.engine.sequence import TokenSequence
from tutti.serve.lora import Adapters
from tutti.serve.source import Encoder, Source, embedded, encoder_of
from tutti.serve.values import Json, JsonValue, Model

CACHES = {"int8": torch.int8, "int4": torch.uint8}  # dtypes of rounded caches
CACHE = Kind.CACHE.at("cache.")  # begins the names of keys and values in the store; adapters have other names


# Operators of PyTorch that are short beside the products of a step, so that one thread computes them
SHORT = {
    *("t", "reshape", "transpose", "permute", "expand", "unsqueeze", "select", "slice", "split", "cat", "index"),
    *("embedding", "add", "mul", "cos", "sin", "_to_copy", "_softmax", "topk", "native_layer_norm"),
}


def buckets(most: int, between: bool = True) -> list[int]:
    """Sizes that numbers up to `most` are rounded up to: the powers of 2, and, with `between`, 1.5 times those from 16
    on."""
    sizes, n = [], 1
    while n < most:
        sizes += [n, n * 3 // 2] if between and n >= 16 else [n]
        n *= 2
    return [x for x in sizes if x < most] + [most]


class Runner:
    """Executes batches.

    model: a model that generates. block: tokens of a block. blocks: number of blocks, or None: as many as `memory`
    bytes hold. host_memory: bytes for blocks on the host. budget, most: tokens and sequences of a step. longest: tokens
    of a sequence, at most. options: those of `tutti.function`. adapters: adapters of the requests. share_frozen: as
    for the engine. saves: whether captured steps are read from disk and written there (`serve.engine.saved_steps`).
    """

    def __init__(self, model: nn.Module, *, block: int, blocks: int | None, memory: int, host_memory: int, budget: int,
                 most: int, longest: int, options: Json, adapters: Adapters | None = None,
                 cache_dtype: CacheDtype = "", share_frozen: bool = False, saves: bool = False):  # fmt: skip
        self.adapters, self.options = adapters, options
        self.model, self.block, self.budget, self.most = model, block, budget, most
        self.layers, self.scaling = layers_of(model), scaling_of(model)
        device, dtype = next(model.parameters()).device, dtype_of(model)
        if cache_dtype not in ("", *CACHES):
            raise ValueError(f"cache_dtype={cache_dtype!r}; expected 'int8', 'int4', or '' for that of the model")
        if cache_dtype and (device.type != "cpu" or dtype not in DTYPES):
            raise ValueError(
                f"cache_dtype={cache_dtype!r} with a model of {dtype} on {device.type}: attention reads it on CPUs "
                "only, for models of float32 and bfloat16; leave cache_dtype out"
            )
        self.cache_dtype = CACHES.get(cache_dtype, dtype)
        each = slot_bytes(self.layers, self.cache_dtype) * block
        self.blocks = memory // each if blocks is None else blocks
        self.host_blocks = host_memory // each
        if self.blocks < 2:
            raise ValueError(f"a KV cache of {memory} bytes has {self.blocks} blocks; each has {each} bytes: give more")
        self.longest = min(longest, self.blocks * block)
        self.width = -(-self.longest // block)  # blocks of a sequence
        self.cache = empty_cache(self.layers, self.blocks * block, self.cache_dtype, device)
        objects: Json = {"model": model, "cache": self.cache} | ({"adapters": adapters} if adapters else {})
        # it packs, rounds and updates them; the model can be trained
        self.encoder = encoder_of(model, self.longest, self.blocks * block)
        plain = not (adapters or self.scaling or self.encoder)
        graphs = graphs_of(model, block, cache_dtype) if saves and plain else None
        self.store = SavedStore(graphs, live=False, share_frozen=share_frozen, **objects)
        self.host: list[dict[str, Tensor]] = []  # blocks on the host, by local rank
        self.sizes = buckets(budget, between=device.type == "cpu")  # a GPU computes few rows more in the same time
        self.ready: dict[tuple[int, ...], Callable[..., Tensor]] = {}  # captured steps, by shape
        self.recorder: Recorder | None = CudaGraphs(device) if device.type == "cuda" else None
        self.recorded: dict[tuple[int, ...], Recorded] = {}  # by shape
        self.addresses: list[int] = []  # of stored tensors, when steps were recorded
        self.results: Tensor | None = None  # logits of recorded steps
        self._hidden: Function | None = None
        self.own_threads = 0  # threads of their own that steps use
        if adapters and self.crosses:
            raise ValueError(f"{type(model).__name__} has an encoder, to which adapters cannot be added by request")
        step = step_function(model, self.cache, block, adapters)
        try:
            self.function = function(step, *self._example(1, 1, 1), store=self.store, **options)
        except UndividedBatch as error:
            raise ValueError(f"plan {options['plan']!r} divides the batch, which an engine has only one of: use "
                             "tutti.serve.Replicas, or --workers") from error  # fmt: skip
        if self.encoder is not None:
            inputs, run = self.encoder.example(), encoding(self.encoder, self.cache)
            nowhere = torch.full((self.encoder.length(inputs),), -1)
            self.encoding = function(run, inputs, nowhere, store=self.store, **options)
        pack(self.store, blank=CACHE)
        single = device.type == "cpu" and len(self.store.parts) == 1 and not in_group()
        compiled = single and dtype in DTYPES and options["level"] == "O0" and self.encoder is None
        if compiled and is_own(self.function.graph):
            self.own_threads = torch.get_num_threads()

    def _example(self, tokens: int, sequences: int, rows: int, images: bool = False) -> tuple[Any, ...]:
        """Arguments of a step without sequences. images: whether it has embeddings of images."""
        zeros, long, short = torch.zeros, torch.int64, torch.int32
        more: dict[str, Tensor] = {"numbers": zeros(tokens, dtype=long)} if self.adapters else {}
        if self.scaling:
            more["spans"] = zeros(tokens, dtype=long)
        if self.encoder is not None and self.crosses:
            width = -(-self.encoder.longest // self.block)
            more["source_tables"] = zeros(sequences, width, dtype=short)
            more["source_lengths"] = zeros(sequences, dtype=short)
        if images:
            config: Model = self.model.config
            width, dtype = config.get_text_config().hidden_size, dtype_of(self.model)
            more |= {"features": zeros(tokens, width, dtype=dtype), "marks": zeros(tokens, dtype=torch.bool)}
        return (zeros(tokens, dtype=long), zeros(tokens, dtype=long), torch.full((tokens,), -1),
                zeros(sequences, self.width, dtype=short), zeros(sequences + 1, dtype=short),
                zeros(sequences, dtype=short), zeros(rows, dtype=long), more)  # fmt: skip

    @property
    def crosses(self) -> bool:
        """Whether a decoder attends to the output of an encoder."""
        return self.encoder is not None and self.encoder.crosses

    @property
    def sees(self) -> bool:
        """Whether an encoder's output takes the place of tokens."""
        return self.encoder is not None and not self.encoder.crosses

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache on all devices together."""
        return self.blocks * self.block * slot_bytes(self.layers, self.cache_dtype)

    def shape(self, tokens: int, sequences: int, rows: int) -> tuple[int, int, int]:
        """The bucket of a step: numbers of tokens, sequences and results."""
        if tokens == sequences == rows <= self.most:  # only generates
            size = self._bucket(tokens)
            return size, size, size
        return self._bucket(max(tokens, self.most)), self.most, self._bucket(max(rows, self.most))

    def _bucket(self, n: int) -> int:
        return next((x for x in self.sizes if x >= n), n)

    def arguments(self, batch: Batch, rows: Sequence[int]) -> tuple[Any, ...]:
        """The arguments of a step. rows: which tokens' logits are wanted, counted over the batch."""
        block, pieces = self.block, batch.pieces
        images = self.sees and any(_images(*x)[0].size for x in pieces)
        example = self._example(*self.shape(batch.tokens, len(pieces), len(rows)), images=images)
        more: dict[str, Tensor] = example[-1]
        ids, positions, slots, tables, starts, lengths, wanted = (x.numpy() for x in example[:-1])  # they share memory
        at = 0
        for i, piece in enumerate(pieces):
            sequence, start, count = piece
            end = start + count
            own = slice(at, at + count)
            length = len(sequence.tokens)
            ids[own] = (sequence.tokens[start:end] + sequence.drafts[max(start - length, 0) : end - length]
                        if end > length else sequence.tokens[start:end])  # fmt: skip
            tables[i, : len(sequence.blocks)] = sequence.blocks
            if count == 1:
                positions[at], slots[at] = start, sequence.blocks[start // block] * block + start % block
            else:
                positions[own] = places = np.arange(start, end)
                slots[own] = tables[i, places // block].astype(np.int64) * block + places % block
            if self.scaling:
                more["spans"][own] = torch.from_numpy(self.scaling.spans(sequence, start, end))
            if self.adapters:
                more["numbers"][own] = self.adapters.number(sequence.request.adapter)
            if sequence.source_blocks:
                more["source_tables"][i, : len(sequence.source_blocks)] = torch.tensor(sequence.source_blocks)
                more["source_lengths"][i] = sequence.slots
            if images and (of_images := _images(*piece))[0].size:
                tokens, features = of_images
                assert sequence.source is not None and sequence.source.features is not None
                more["features"][at + tokens] = sequence.source.features[features]
                more["marks"][at + tokens] = True
            at += count
            starts[i + 1 :], lengths[i] = at, end
        wanted[: len(rows)] = rows
        return example

    def synthetic(self, pieces: Sequence[tuple[int, int]]) -> tuple[Tensor, ...]:
        """Arguments of a step to measure. It reads the cache and writes nothing. pieces: (new tokens, tokens with those
        before them) of each sequence."""
        total = sum(n for n, _ in pieces)
        arguments = self._example(*self.shape(total, len(pieces), len(pieces)))
        _, positions, _, tables, starts, lengths, _ = arguments[:7]
        tables += torch.arange(tables.numel(), dtype=torch.int32).view_as(tables) % self.blocks
        at = 0
        for i, (count, context) in enumerate(pieces):
            positions[at : at + count] = torch.arange(context - count, context)
            at += count
            starts[i + 1 :], lengths[i] = at, context
        return arguments

    def run(self, batch: Batch, rows: Sequence[int]) -> Tensor:
        """Execute a batch. Returns logits (len(rows), vocabulary)."""
        moves = batch.moves
        if batch.sources:
            self._tell("move", moves)
            self.move(moves)
            moves = []
        for sequence in batch.sources:
            assert sequence.source is not None
            self.encode(sequence.source, sequence.source_blocks)
        arguments = self.arguments(batch, rows)
        self._tell("execute", arguments, moves)
        return self.execute(arguments, moves)[: len(rows)]

    def threads(self) -> AbstractContextManager[None]:
        """A context for steps, and for the choice of tokens after them."""
        return own_threads(self.own_threads) if self.own_threads else nullcontext()

    def encode(self, source: Source, blocks: Sequence[int]) -> None:
        """Run the encoder on a source. Its keys and values go to these blocks, or its result to `features`."""
        self._tell("encode_here", source, blocks)
        self.encode_here(source, blocks)

    def encode_here(self, source: Source, blocks: Sequence[int]) -> None:
        """`encode` on this process."""
        assert self.encoder is not None
        own, features = torch.tensor(blocks, dtype=torch.int64), []
        for inputs in self.encoder.calls(source.inputs):
            slots = torch.full((self.encoder.length(inputs),), -1)
            if self.crosses:
                at = torch.arange(source.length)
                slots[: source.length] = own[at // self.block] * self.block + at % self.block
            features.append(self.encoding(inputs, slots))
        if self.sees:
            source.features = torch.cat(features)

    def prepare_encoder(self) -> None:
        """Capture and compile the encoder for all shapes of sources."""
        self._tell("prepare_encoder")
        if self.encoder is not None:
            for inputs in self.encoder.shapes():
                self.encoding(inputs, torch.full((self.encoder.length(inputs),), -1))

    def execute(self, arguments: tuple[Any, ...], moves: Sequence[Move] = ()) -> Tensor:
        """Execute a step on this process: the moves, then the Function. Returns its logits, padding included."""
        self.move(moves)
        shape = tuple(map(len, arguments))
        if shape not in self.ready:
            self.ready[shape] = self.function.fixed(*arguments)
        if self.recorder and shape not in self.recorded:
            self._record(shape, arguments, self.recorder)
        with self.threads():
            return self.recorded.get(shape, self.ready[shape])(*arguments)

    def _record(self, shape: tuple[int, ...], arguments: tuple[Any, ...], recorder: Recorder) -> None:
        """Record a step. If that is not possible, steps run without being recorded, and a warning says so."""
        try:
            if len(self.store.parts) > 1 or in_group():
                raise RuntimeError("the plan has several devices")
            self.addresses, rows = self._addresses(), arguments[6]
            if self.results is None or len(self.results) < len(rows):
                spec = self.function.graph.outputs[Kind.OUTPUT.at(0)].meta["val"]
                count = max(len(rows), self._bucket(self.most))
                self.results = torch.empty(count, *spec.shape[1:], dtype=spec.dtype, device=self.store.device)
            recorded = Recorded(self.ready[shape], arguments, recorder, self.results)
            if self._addresses() != self.addresses:
                raise RuntimeError("a step replaces tensors of the cache instead of writing into them")
            self.recorded[shape] = recorded
        except RuntimeError as error:
            self.recorder = None
            warnings.warn(f"steps run without CUDA graphs, which takes longer: {error}", stacklevel=2)

    def _addresses(self) -> list[int]:
        """Where the stored tensors are."""
        return [x.data_ptr() for tensors in self.store.parts for x in tensors.values()]

    def check_recorded(self) -> None:
        """Forget recorded steps if stored tensors have moved. Call it after whatever may replace them."""
        if self.recorded and self._addresses() != self.addresses:
            self.recorded.clear()

    def shapes(self) -> list[tuple[int, int, int, bool]]:
        """The buckets of steps that only generate, and of steps with prompts; the latter also with images."""
        most, images = self._bucket(self.most), (False, True) if self.sees else (False,)
        prompts = [(n, self.most, most, x) for x in images for n in self.sizes if n >= most]
        return [(n, n, n, False) for n in self.sizes if n <= most] + prompts

    def prepare(self, shape: tuple[int, int, int, bool]) -> None:
        """Capture and compile the step of a bucket, and run it once without a token."""
        arguments = self._example(*shape)
        self._tell("execute", arguments)
        self.execute(arguments)

    def hidden(self, tokens: Sequence[int]) -> Tensor:
        """The last hidden states (len(tokens), hidden) of a sequence. The cache is not used."""
        if self.crosses:
            raise ValueError(f"{type(self.model).__name__} has an encoder; the engine has no embeddings of its texts")
        self._tell("hidden", tokens)
        size = next((x for x in buckets(self.longest) if x >= len(tokens)), len(tokens))
        ids = torch.tensor([[*tokens, *[0] * (size - len(tokens))]])
        more = {"spans": torch.full((size,), len(tokens))} if self.scaling else {}
        if self._hidden is None:
            self._hidden = function(_hidden(self.model), ids, more, store=self.store, **self.options)
        return self._hidden(ids, more)[0, : len(tokens)]

    # -- several processes: rank 0 schedules, all ranks execute ------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Whether this process schedules. In a job of several processes, rank 0 does."""
        return not in_group() or dist.get_rank() == 0

    def _tell(self, *what: JsonValue) -> None:
        """Make the other ranks do the same: the name of a method, and its arguments."""
        if self.leads and in_group():
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

    def release(self, what: JsonValue) -> None:
        """End `follow` on the other ranks."""
        self._tell("release", what)

    # -- blocks of other engines ------------------------------------------------------------------------------------

    def read_blocks(self, blocks: Sequence[int]) -> dict[str, Tensor]:
        """The contents of blocks: full CPU tensors (slots, heads, width) by name."""
        self._tell("read_blocks", blocks)
        contents, index = {}, torch.tensor(blocks)
        for name in (x for x in self.store.names() if x.startswith(CACHE)):
            stored = self.store.tensors[name]
            parts = {rank: self._in_blocks(x)[index.to(x.device)].flatten(0, 1)
                     for rank, x in self.store.parts_of(name).items()}  # fmt: skip
            spec = replace(stored.spec, shape=(len(blocks) * self.block, *stored.spec.shape[1:]))
            contents[name] = self.store.assemble(parts, stored.device, stored.layout, spec)
        return contents

    def check_blocks(self, count: int, contents: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless these are contents of so many blocks of this cache."""
        names = {x: self.store.tensors[x].spec for x in self.store.names() if x.startswith(CACHE)}
        if contents.keys() != names.keys():
            raise ValueError(f"the cache has {len(names)} tensors, what was sent {len(contents)}: is it another model?")
        for name, x in contents.items():
            spec, own = names[name], name.removeprefix(CACHE)
            shape = count * self.block, *spec.shape[1:]
            if tuple(x.shape) != shape or x.dtype != spec.dtype:
                raise ValueError(
                    f"{own} of {count} blocks has shape {shape} and {spec.dtype}, what was sent {tuple(x.shape)} and "
                    f"{x.dtype}: is it another model, or size of blocks?"
                )

    def write_blocks(self, blocks: Sequence[int], contents: dict[str, Tensor]) -> None:
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

    def move(self, moves: Sequence[Move]) -> None:
        """Copy blocks within the cache, to the host and back, in order."""
        for kind, run in groupby(moves, key=lambda x: x.kind):
            for sources, targets in _independent(list(run)):
                for i, parts in enumerate(self.store.parts):
                    self._copy(i, {k: x for k, x in parts.items() if k.startswith(CACHE)}, kind, sources, targets)

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


def is_own(graph: StepGraph) -> bool:
    """Whether compiled operators of Tutti do nearly all the work of a step on a CPU."""
    calls = [x for x in graph.graph.nodes if isinstance(x.target, torch._ops.OpOverload)]
    foreign = [x for x in calls if x.target.namespace == "aten" and x.target not in ACTIVATION_OF]
    others = [x for x in foreign if x.target.overloadpacket.__name__ not in SHORT]
    return all(map(linear_rows.is_layer, others))


def step_function(
    model: nn.Module, cache: Cache, block: int, adapters: Adapters | None = None
) -> Callable[..., Tensor]:
    """The step of a model as a function of tensors."""

    @torch.no_grad()
    def step(tokens: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, starts: Tensor, lengths: Tensor,
             rows: Tensor, more: Mapping[str, Tensor]) -> Tensor:  # fmt: skip
        """The logits (rows, vocabulary) after tokens (tokens,) at these positions.

        rows: the tokens whose logits are returned. more: the adapter of each token (`numbers`), where the sources are
        (`source_tables`, `source_lengths`), embeddings of images and whose they are (`features`, `marks`), the span of
        each token (`spans`).
        """
        numbers, features = more.get("numbers"), more.get("features")
        added = nullcontext() if numbers is None or adapters is None else adapters.added(model, numbers)
        sources = more.get("source_tables"), more.get("source_lengths")
        inputs = {} if features is None else {"inputs_embeds": embedded(model, tokens, features, more["marks"])[None]}
        with added, paging(model, cache, PagedStep(slots, tables, starts, lengths, block, *sources, more.get("spans"))):
            return logits(model, tokens, positions, rows, **inputs)

    return step


def encoding(encoder: Encoder, cache: Cache) -> Callable[..., Tensor]:
    """An encoder as a function of tensors."""

    @torch.no_grad()
    def encode(inputs: dict[str, Tensor], slots: Tensor) -> Tensor:
        return encoder.run(cache, inputs, slots)

    return encode


def _images(sequence: TokenSequence, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens of a piece are of images, and which of its images' positions they are."""
    places = np.empty(0, np.int64) if sequence.source is None else sequence.source.places
    if places is None:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    first, last = np.searchsorted(places, (start, start + count))
    return places[first:last] - start, np.arange(first, last)


def _hidden(model: Model) -> Callable[[Tensor, Mapping[str, Tensor]], Tensor]:
    """The last hidden states of a model as a function of tokens, and of their `spans`."""

    @torch.no_grad()
    def hidden(tokens: Tensor, more: Mapping[str, Tensor]) -> Tensor:
        with by_span(model, more.get("spans")):
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
