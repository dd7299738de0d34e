"""The blocks of a model, and the walk of calibration data through them.

The inputs of a block are what the blocks before it make of the data *after* they were compressed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tutti.compress import parallel
from tutti.compress.experts import ExpertLayers
from tutti.compress.statistics import Statistics
from tutti.nn.quantized.quantized_linear import QuantizedLinear

Batch = Mapping[str, Tensor]


class _Done(Exception):
    """The last block has been reached."""


def stack_of(model: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """The path and the list of a model's blocks, or None if it has none or several."""
    lists = [
        (path, x)
        for path, x in model.named_modules()
        if isinstance(x, nn.ModuleList) and len({type(block) for block in x}) == 1 and _is_block(x[0])
    ]
    outer = [(path, x) for path, x in lists if not any(path.startswith(f"{other}.") for other, _ in lists)]
    return outer[0] if len(outer) == 1 else None


def _is_block(module: nn.Module) -> bool:
    """Whether a module has linear layers and more."""
    kinds = nn.Linear, QuantizedLinear
    return not isinstance(module, kinds) and sum(isinstance(x, kinds) for x in module.modules()) > 1


def first(output: Any) -> Tensor:
    """The hidden states of what a block returns."""
    return output if isinstance(output, Tensor) else output[0]


@dataclass
class Walk:
    """Calibration data between two blocks of a model.

    hidden: the inputs of the next block for each batch. arguments: the other inputs of each block for each batch.
    masks: tokens that are no padding, (batch, sequence) bool, for each batch; None: all.
    """

    model: nn.Module
    blocks: nn.ModuleList
    batches: Sequence[Batch]
    hidden: list[Tensor] = field(default_factory=list)
    arguments: list[list[tuple[tuple, dict]]] = field(default_factory=list)
    masks: list[Tensor | None] = field(default_factory=list)
    plain: bool = True  # whether blocks return a tensor, not a tuple with one

    @torch.no_grad()
    def begin(self) -> None:
        """Run what stands before the blocks. It needs the weights of the first block."""
        for values in (self.hidden, self.arguments, self.masks):
            values.clear()
        for batch in self.batches:
            arguments: list[tuple[tuple, dict]] = []
            returned: list[Any] = []

            def seen(i: int, block: nn.Module) -> Callable[..., Any]:
                own = block.forward

                def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
                    arguments.append((args, kwargs))  # noqa: B023
                    if i == 0:
                        self.hidden.append(x)
                        returned.append(own(x, *args, **kwargs))  # noqa: B023
                    if i == len(self.blocks) - 1:
                        raise _Done
                    return returned[0]  # noqa: B023

                return forward

            with _replaced(self.blocks, seen), suppress(_Done):
                self._call(batch)
            if len(arguments) != len(self.blocks):
                raise ValueError(f"{type(self.model).__name__} called {len(arguments)} of its {len(self.blocks)} "
                                 "blocks, each of which should be called once")  # fmt: skip
            self.plain = isinstance(returned[0], Tensor)
            self.arguments.append(arguments)
            mask = batch.get("attention_mask")
            self.masks.append(None if mask is None or bool(mask.all()) else mask.bool())

    def _call(self, batch: Batch) -> Any:
        try:
            return self.model(**batch, use_cache=False)
        except TypeError as error:
            if "use_cache" not in str(error):
                raise
            return self.model(**batch)

    @torch.no_grad()
    def run(self, i: int, outputs: bool = False) -> None:
        """Run all data through block i. outputs: whether they become the inputs of the next block."""
        for at, x in enumerate(self.hidden):
            self._at = at
            args, kwargs = self.arguments[at][i]
            output = first(self.blocks[i](x, *args, **kwargs))
            if outputs:
                self.hidden[at] = output

    def tokens(self, x: Tensor) -> Tensor:
        """The rows (tokens, k) of the inputs of a layer in the batch that runs, without padding."""
        rows, mask = x.reshape(-1, x.shape[-1]), self.masks[self._at]
        return rows if mask is None or mask.numel() != len(rows) else rows[mask.flatten()]

    def statistics(self, i: int, layers: Mapping[str, nn.Module]) -> dict[str, Statistics]:
        """Statistics of the inputs of block i's layers outside of experts, over the data of all processes.

        Layers with one input share their statistics.
        """
        by_layer: dict[str, Statistics] = {}
        with self.observed(layers, by_layer):
            self.run(i)
        parallel.add_up(by_layer)
        return by_layer

    @contextmanager
    def observed(self, layers: Mapping[str, nn.Module], statistics: dict[str, Statistics]) -> Iterator[None]:
        """Collect statistics of the inputs of layers in a dict."""
        inputs: dict[int, tuple[Tensor, str]] = {}  # of the batch that runs, by identity
        shared: dict[str, str] = {}

        def hook(path: str) -> Callable:
            def seen(module: nn.Module, args: tuple) -> None:
                x = args[0]
                _, owner = inputs.setdefault(id(x), (x, path))
                if shared.setdefault(path, owner) == path:
                    if path not in statistics:
                        statistics[path] = Statistics(x.shape[-1])
                    statistics[path].add(self.tokens(x))

            return seen

        def forget(module: nn.Module, args: tuple) -> None:
            inputs.clear()

        hooks = [x.register_forward_pre_hook(hook(path)) for path, x in layers.items()]
        hooks += [block.register_forward_pre_hook(forget) for block in self.blocks]
        try:
            yield
        finally:
            for x in hooks:
                x.remove()
        statistics |= {path: statistics[owner] for path, owner in shared.items() if owner != path}

    @torch.no_grad()
    def routed(self, i: int, experts: Mapping[str, ExpertLayers]) -> dict[str, list[tuple[Tensor, Tensor]]]:
        """The tokens (tokens, h) that the experts of block i see, and the experts (tokens, k) of each, by batch."""
        routes: dict[str, list[tuple[Tensor, Tensor]]] = {path: [] for path in experts}

        def hook(path: str) -> Callable:
            def seen(module: nn.Module, args: tuple, kwargs: dict) -> None:
                x, index = args[0], args[1] if len(args) > 1 else next(iter(kwargs.values()))
                routes[path].append((self.tokens(x), self.tokens(index)))

            return seen

        hooks = [x.register_forward_pre_hook(hook(path), with_kwargs=True) for path, x in experts.items()]
        try:
            self.run(i)
        finally:
            for x in hooks:
                x.remove()
        return routes

    @torch.no_grad()
    def tail(self, layers: Mapping[str, nn.Module]) -> dict[str, Statistics]:
        """Statistics of the inputs of layers behind the last block, over the data of all processes."""
        statistics: dict[str, Statistics] = {}
        with self.observed(layers, statistics):
            for _ in self._behind():
                pass
        parallel.add_up(statistics)
        return statistics

    @torch.no_grad()
    def logits(self) -> list[Tensor]:
        """What the model predicts (tokens, vocabulary) for each batch, once the last block has run."""
        return [self.tokens(x.logits) for x in self._behind()]

    def _behind(self) -> Iterator[Any]:
        """Run what stands behind the blocks. Yields the output for each batch."""

        def passed(i: int, block: nn.Module) -> Callable[..., Any]:
            def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
                hidden = self.hidden[self._at]
                return hidden if self.plain else (hidden,)

            return forward

        with _replaced(self.blocks, passed):
            for at, batch in enumerate(self.batches):
                self._at = at
                yield self._call(batch)


@contextmanager
def _replaced(blocks: nn.ModuleList, forward_of: Callable[[int, nn.Module], Callable]) -> Iterator[None]:
    """Call other functions in the place of the blocks' own."""
    for i, block in enumerate(blocks):
        block.forward = forward_of(i, block)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward  # of the instance


def checked(batches: Any, k: int, tokenizer: Any = None, length: int = 512) -> list[Batch]:
    """Calibration data as batches. k: the widest input of a layer.

    batches: a list of dicts with input_ids (batch, sequence) and, with padding, an attention_mask; or of texts, if
    there is a tokenizer. Raises ValueError if there are fewer tokens than 1 and a quarter of the widest input.
    """
    batches = list(batches)
    if batches and isinstance(batches[0], str):
        batches = _tokenized(batches, tokenizer, length)
    inputs = []
    for i, batch in enumerate(batches):
        if isinstance(batch, Tensor):
            batch = {"input_ids": batch}
        if not hasattr(batch, "keys") or not isinstance(batch.get("input_ids"), Tensor) or batch["input_ids"].ndim != 2:
            raise ValueError(f"batch {i} of the calibration data has no input_ids (batch, sequence): give dicts, "
                             "tensors, or texts and a tokenizer")  # fmt: skip
        inputs.append({name: x.to(torch.get_default_device()) for name, x in batch.items() if name != "labels"})
    tokens = sum(int(x["attention_mask"].sum()) if "attention_mask" in x else x["input_ids"].numel() for x in inputs)
    if tokens < max(16, k // 4):
        raise ValueError(f"the calibration data has {tokens} tokens; a layer has {k} inputs: give at least "
                         f"{max(16, k // 4)}, better {8 * k}")  # fmt: skip
    return inputs


def _tokenized(texts: Sequence[str], tokenizer: Any, length: int) -> list[Batch]:
    """Texts in rows of `length` tokens, joined: no padding."""
    if tokenizer is None:
        raise ValueError("calibration data of texts needs a tokenizer")
    tokens = torch.tensor([x for text in texts for x in tokenizer(text)["input_ids"]])
    rows = list(tokens.split(length))
    return [{"input_ids": x.unsqueeze(0)} for x in rows if len(x) == length or len(rows) == 1]
