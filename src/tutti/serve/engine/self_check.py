"""A check when an engine is made: its logits are those of the model's own forward pass over whole sequences.

The engine replaces a model's attention, so a model that attends in a way of its own could be served wrongly. A few
short sequences go through the steps that requests go through: several in a batch, prompts in chunks, tokens after
prompts. The model's own code computes the same sequences one by one with the engine's parameters.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tutti.api.function import function
from tutti.exec.stores.tensor_store import Stored
from tutti.nn.quantized.quantized_linear import dtype_of
from tutti.serve.cache.rotary import pristine
from tutti.serve.engine.request import Request
from tutti.serve.engine.runner import Runner
from tutti.serve.engine.scheduler import Batch, Piece
from tutti.serve.engine.sequence import TokenSequence
from tutti.serve.source import Source
from tutti.serve.values import Model
from tutti.serve.weights import PREFIX

LENGTHS, CHUNKS = (9, 14, 4), ((7, 1, 1), (5, 9), (4,))
FIRST, LATER, SINGLE = "prompts in one batch", "a prompt in chunks", "tokens after a prompt"
AT_ONCE = 1 << 28  # bytes of parameters that are gathered for the check
CLEAR = 6  # tolerances between the two largest logits, from which on the most likely token must be the same
_log = logging.getLogger("tutti.serve")


def compare_logits(runner: Runner) -> float:
    """Compare the engine's logits with the model's. Returns the seconds that it took.

    Every rank of a job must call it. Images are not compared, only texts. Raises ValueError if logits differ.
    """
    begun = time.perf_counter()
    with _uncounted(runner):
        _check(runner)
    return time.perf_counter() - begun


@contextmanager
def _uncounted(runner: Runner) -> Iterator[None]:
    """Within the block, calls are not counted."""
    counted: list[Any] = [runner.store, runner.function, *([runner.encoding] if runner.encoder is not None else [])]
    before = [x.calls for x in counted]
    try:
        yield
    finally:
        for x, calls in zip(counted, before, strict=True):
            x.calls = calls


def _check(runner: Runner) -> None:
    sequences = _sequences(runner)
    if not sequences:
        _log.warning("%s is not checked: the cache has no room for its source", type(runner.model).__name__)
        return
    if (wanted := _wanted(runner, sequences)) is not None:
        _compare(runner, _served(runner, sequences), wanted)


def _sequences(runner: Runner) -> list[TokenSequence]:
    """Sequences of random tokens, in blocks of the cache, as far as there is room for them."""
    config: Model = runner.model.config
    vocabulary, draw = config.get_text_config().vocab_size, torch.Generator().manual_seed(0)
    encoder, sequences, used = runner.encoder, [], 0
    source, source_blocks = None, []
    if runner.crosses:
        source = _source(runner)
        used = -(-source.slots // runner.block)
        source_blocks = list(range(used))
    for n in LENGTHS[: runner.most]:
        n = min(n, runner.longest)
        tokens = torch.randint(vocabulary, (n,), generator=draw).tolist()
        if encoder is not None and hasattr(encoder, "token"):
            tokens = [x if x != encoder.token else (x + 1) % vocabulary for x in tokens]  # pyright: ignore
        blocks = list(range(used, used + -(-n // runner.block)))
        if (used := used + len(blocks)) > runner.blocks:
            break
        factors = runner.scaling.factors(n, n) if runner.scaling else b""
        sequences.append(TokenSequence(Request(tokens), 0, tokens, n, source=source, source_blocks=source_blocks,
                                  blocks=blocks, factors=factors))  # fmt: skip
    if source is not None and sequences:
        runner.encode_here(source, source_blocks)
    return sequences


def _source(runner: Runner) -> Source:
    """What the encoder of an encoder-decoder model reads: a few tokens, or noise."""
    encoder, draw = runner.encoder, torch.Generator().manual_seed(1)
    assert encoder is not None
    if encoder.name == "input_ids":
        most = min(100, runner.model.config.get_text_config().vocab_size)  # pyright: ignore
        inputs = {"input_ids": torch.randint(most, (1, min(5, encoder.longest)), generator=draw)}
        return Source(inputs, len(inputs["input_ids"][0]), slots=len(inputs["input_ids"][0]))
    inputs = {name: torch.randn(x.shape, generator=draw).to(x) for name, x in encoder.example().items()}
    length = encoder.length(inputs)
    return Source(inputs, length, slots=length)


def _batches(runner: Runner, sequences: list[TokenSequence]) -> Iterator[list[Piece]]:
    """Yield the steps that compute the sequences, of a size that every engine needs for short prompts."""
    room = min(max(runner.most, 4), runner.budget)
    left = [list(chunks) for chunks, _ in zip(CHUNKS, sequences, strict=False)]
    at = [0] * len(sequences)
    while any(n < len(x.tokens) for n, x in zip(at, sequences, strict=True)):
        pieces, free = [], room
        for i, sequence in enumerate(sequences):
            count = min(left[i][0] if left[i] else 0, free, len(sequence.tokens) - at[i])
            if count:
                pieces.append(Piece(sequence, at[i], count))
                free -= count
        if len(pieces) > 1 and all(x.count == 1 for x in pieces):  # a step that few engines need
            pieces = pieces[:1]
        for piece in pieces:
            i = sequences.index(piece.sequence)
            at[i] += piece.count
            left[i][0] -= piece.count
            left[i] = left[i] if left[i][0] else left[i][1:]
        yield pieces


def _served(runner: Runner, sequences: list[TokenSequence]) -> list[tuple[Piece, int, Tensor]]:
    """The engine's logits: the piece, the position and the logits (vocabulary) of tokens."""
    served = []
    for pieces in _batches(runner, sequences):
        wanted, at = [], 0
        most = runner.most // len(pieces) if runner.most < 4 else runner.budget
        for piece in pieces:
            own = range(max(0, piece.count - most), piece.count)
            wanted += [(piece, piece.start + i, at + i) for i in own]
            at += piece.count
        rows = [row for _, _, row in wanted]
        logits = runner.execute(runner.arguments(Batch(pieces), rows))
        served += [(piece, position, logits[i].float().cpu()) for i, (piece, position, _) in enumerate(wanted)]
    return served


def _wanted(runner: Runner, sequences: list[TokenSequence]) -> dict[TokenSequence, Tensor] | None:
    """The logits (tokens, vocabulary) of the model's own forward pass; None if it needs more than tokens."""
    model, store = runner.model, runner.store
    names = {name.removeprefix(PREFIX): name for name in store.names("param") if name.startswith(PREFIX)}
    split = {x for x in names.values() if _is_split(store.tensors[x])}
    if sum(store.tensors[x].spec.bytes for x in split) > AT_ONCE:  # under the plan instead
        forward = function(_forward(model), _inputs(sequences[0], store.device), store=store, **runner.options)
        return {x: forward(_inputs(x, store.device))[0].float().cpu() for x in sequences}
    weights = {own: store.whole(x).to(store.device) if x in split else next(iter(store.parts_of(x).values()))
               for own, x in names.items()}  # fmt: skip
    logits = {}
    for x in sequences:
        inputs = {**_inputs(x, store.device), "use_cache": False}
        try:
            with torch.no_grad(), pristine(model):
                output: Any = torch.func.functional_call(model, weights, (), inputs)
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            _log.warning("%s is not checked: its own forward pass of tokens fails: %s", type(model).__name__, error)
            return None
        logits[x] = output.logits[0].float().cpu()
    return logits


def _is_split(stored: Stored) -> bool:
    """Whether a rank may lack a part of a tensor."""
    return stored.device is not None or bool(stored.layout.splits)


def _forward(model: Model) -> Callable:
    @torch.no_grad()
    def forward(inputs: dict[str, Tensor]) -> Tensor:
        return model(**inputs, use_cache=False).logits

    return forward


def _inputs(sequence: TokenSequence, device: torch.device) -> dict[str, Tensor]:
    """The arguments of the model's own forward pass."""
    ids = torch.tensor([sequence.tokens], device=device)
    if sequence.source is None:
        return {"input_ids": ids}
    return {**{name: x.to(device) for name, x in sequence.source.inputs.items()}, "decoder_input_ids": ids}


def _compare(runner: Runner, served: list[tuple[Piece, int, Tensor]], wanted: dict[TokenSequence, Tensor]) -> None:
    dtype, device = dtype_of(runner.model), runner.store.device
    exact = dtype in (torch.float32, torch.float64) and runner.cache_dtype == dtype
    most = (1e-3 if device.type == "cpu" else 1e-2) if exact else 0.5 if runner.cache_dtype == torch.uint8 else 0.1
    checks: dict[str, list[tuple[float, bool]]] = defaultdict(list)
    for piece, position, got in served:
        want = wanted[piece.sequence][position]
        if not bool(want.isfinite().all()):
            continue
        spread = float(want.std()) + 1e-12
        error = float((got - want).square().mean().sqrt()) / spread
        first, second = want.topk(2).values.tolist()
        wrong = first - second > CLEAR * most * spread and int(got.argmax()) != int(want.argmax())
        kind = SINGLE if piece.count == 1 else LATER if piece.start else FIRST
        checks[kind].append((error if error == error else float("inf"), wrong))
    for kind in (FIRST, LATER, SINGLE):
        if not checks[kind]:
            continue
        errors = sorted(error for error, _ in checks[kind])
        error = errors[-1] if exact else errors[len(errors) // 2]  # in low precision, a token may go to other experts
        count = sum(wrong for _, wrong in checks[kind])
        if error > most or (count and (exact or 2 * count > len(errors))):
            raise ValueError(
                f"{type(runner.model).__name__} would be served wrongly: for {kind}, the logits differ from those of "
                f"the model's own forward pass by {error:.2g} of their standard deviation (at most {most:g}), and "
                f"{count} of {len(errors)} clear most likely tokens. Use model.generate; or serve it nevertheless with "
                "Engine(..., self_check=False), or tutti serve --no-self-check"
            )
