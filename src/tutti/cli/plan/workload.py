"""What is trained, as options of a command: a model, its batch and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import torch

from tutti.api.saved_graphs import SavedGraphs
from tutti.compat.adapters import peft_model
from tutti.ir.step_graph import StepGraph
from tutti.lower.variants.rebatch import Steps
from tutti.lower.variants.vary import vary
from tutti.optim import AdamW8bit, Lamb, Lion
from tutti.plan.variant import PLAIN, Variant
from tutti.progress import Say
from tutti.tracing.batch import Batch, FlatBatch
from tutti.tracing.capture import capture
from tutti.tracing.load import load, suiting
from tutti.tracing.optimizers import TABLE

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    kind.__name__.lower(): kind for kind in (*TABLE, AdamW8bit, Lamb, Lion)
}


@dataclass(frozen=True)
class Workload:
    """A training step to capture. The model is never allocated."""

    model: str
    """A folder with a transformers config.json, such a file, or package.module:function that returns
    (model, batch). The module is imported and the function is called: name only code that you trust."""
    batch: int = 8
    """Sequences in the global batch of a transformers model."""
    seq: int = 1024
    """Tokens per sequence."""
    optimizer: str = "adamw"
    """A class of torch.optim in lower case: adamw, adam, sgd, adafactor, ... Of tutti.optim: adamw8bit, lamb, lion."""
    dtype: str = "bfloat16"
    """Parameters of a transformers model: bfloat16 or float32."""
    masters: bool = True
    """Keep and update float32 copies of bfloat16 parameters, and optimizer state in float32."""
    clip_norm: float | None = None
    """Clip the gradient norm to this."""
    attention: str = "auto"
    """Attention of a transformers model: auto (fused where the model has it) or eager (the scores are in memory)."""
    lora: int = 0
    """Rank of low-rank adapters (LoRA) of a transformers model's linear layers, which alone are trained. 0: train the
    model's own parameters."""


def adapted(model: torch.nn.Module, rank: int) -> torch.nn.Module:
    """The model with trainable low-rank adapters of its linear layers (`peft`) in its own dtype, frozen otherwise.

    Raises ValueError for a model that is not of transformers, and without peft.
    """
    import transformers

    try:
        import peft
    except ModuleNotFoundError:
        raise ValueError("--lora needs the package peft: pip install peft") from None
    if not isinstance(model, transformers.PreTrainedModel):
        raise ValueError("--lora is for transformers models; freeze the parameters of others where they are made")
    transposed = any(isinstance(part, transformers.pytorch_utils.Conv1D) for part in model.modules())
    config = peft.LoraConfig(r=rank, target_modules="all-linear", fan_in_fan_out=transposed)
    return peft_model(model, config, autocast_adapter_dtype=False)


@dataclass(frozen=True)
class StepWork:
    """The work of a step. amount: number of tokens or rows of a step. unit: "tokens" or "rows". note: what is not
    counted."""

    amount: int
    unit: str
    note: str = ""

    @classmethod
    def of(cls, model: torch.nn.Module, example: Batch) -> StepWork:
        """Tokens of a batch that has `input_ids`, else its rows. The decoder's tokens are not counted beside an
        encoder's."""
        config = getattr(model, "config", None)
        ids, labels = (example.get(key) if isinstance(example, Mapping) else None for key in ("input_ids", "labels"))
        if ids is None:
            image = "rows are images, whose size the model's config sets; --seq has no effect"
            pixels = getattr(model, "main_input_name", "") == "pixel_values"
            return cls(FlatBatch(example).rows or 1, "rows", image if pixels else "")
        if not getattr(config, "is_encoder_decoder", False) or labels is None:
            return cls(ids.numel(), "tokens")
        encoder, decoder = ids.shape[-1], labels.shape[-1]
        note = f"tokens are the encoder's {encoder:,} of a row; the decoder's {decoder:,} are computed, but not counted"
        return cls(ids.numel(), "tokens", note)


@dataclass(frozen=True)
class Facts:
    """The figures of a workload that are shown. dtype: dtype of the model's first parameter."""

    parameters: int
    dtype: str
    batch: int
    work: StepWork


def graphs_of(workload: Workload) -> SavedGraphs | None:
    """The saved steps of a workload. None for a model of a function, whose code may change, and if caches are off."""
    config = Path(workload.model)
    config = config / "config.json" if config.is_dir() else config
    return SavedGraphs.of(config.read_bytes(), replace(workload, model="")) if config.is_file() else None


class Captured:
    """The captured step of a workload, for any number of microbatches.

    The steps of a transformers config are kept in the user's cache folder (see `api.saved_graphs`). Where it has
    them, no model is built.
    """

    def __init__(self, workload: Workload, progress: Say):
        for value, choices, what in ((workload.optimizer, OPTIMIZERS, "optimizer"), (workload.dtype, DTYPES, "dtype")):
            if value not in choices:
                raise ValueError(f"unknown {what} {value!r}; expected one of {', '.join(choices)}")
        if workload.lora < 0:
            raise ValueError(f"--lora {workload.lora}: a rank is at least 1, or 0 to train the model itself")
        self.workload, self.progress = workload, progress
        self.cache = graphs_of(workload)
        self.facts = self._facts()
        self.captured = Steps(self._step).planned
        self.graph = cache(self._graph)

    def _facts(self) -> Facts:
        if self.cache:
            with suppress(TypeError, KeyError):  # not cached, or by other code
                stored = self.cache.facts() or {}
                return Facts(**{**stored, "work": StepWork(**stored["work"])})
        model, example = self.loaded
        dtype = next((str(p.dtype) for p in model.parameters()), "torch.float32").removeprefix("torch.")
        count = sum(p.numel() for p in model.parameters())
        return Facts(count, dtype, FlatBatch(example).rows or 1, StepWork.of(model, example))

    @cached_property
    def loaded(self) -> tuple[torch.nn.Module, Batch]:
        """The model and an example batch, on the meta device."""
        w = self.workload
        self.progress("reading the model")
        model, example = load(w.model, w.batch, w.seq, DTYPES[w.dtype], w.attention)
        return adapted(model, w.lora) if w.lora else model, example

    def _graph(self, microbatch_count: int = 1, variant: Variant = PLAIN) -> StepGraph:
        """The step of one microbatch out of `microbatch_count`."""
        graph = self.captured(microbatch_count)
        if variant.sequence_chunks > 1:
            self.progress(f"cutting the sequence into {variant.sequence_chunks} chunks")
        return vary(graph, variant)

    def _step(self, microbatch_count: int) -> StepGraph:
        """The captured step, from the cache if it is there."""
        if not self.cache:
            return self._captured(microbatch_count)
        if step := self.cache.graph(str(microbatch_count)):
            return step
        step = self._captured(microbatch_count)
        self.cache.save(str(microbatch_count), step, asdict(self.facts))
        return step

    def _captured(self, microbatch_count: int) -> StepGraph:
        model, example = self.loaded
        first = FlatBatch(example).parts(microbatch_count)[0].batch
        self.progress("capturing the step" + (f" of 1/{microbatch_count} of the batch" if microbatch_count > 1 else ""))
        update = OPTIMIZERS[self.workload.optimizer](model.parameters(), lr=1e-3)
        with suiting(model):
            return capture(model, first, update, clip_norm=self.workload.clip_norm,
                           fp32_master_weights=self.workload.masters)  # fmt: skip
