"""What is trained, as options of a command: a model, its batch and its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from tutti.compat.adapters import peft_model
from tutti.exec.batches import batch_size, microbatches
from tutti.ir.step_graph import StepGraph
from tutti.lower.rebatch import Steps
from tutti.lower.vary import vary
from tutti.plan.search import Progress
from tutti.plan.variant import PLAIN, Variant
from tutti.tracing.capture import capture
from tutti.tracing.load import load, suiting
from tutti.tracing.optimizers import TABLE

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
    """A class of torch.optim in lower case: adamw, adam, sgd, adafactor, ..."""
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


class Captured:
    """The captured step of a workload, for any number of microbatches."""

    def __init__(self, workload: Workload, progress: Progress):
        makers: dict[str, Callable[..., torch.optim.Optimizer]] = {kind.__name__.lower(): kind for kind in TABLE}
        w = workload
        for value, known, what in ((w.optimizer, makers, "optimizer"), (w.dtype, DTYPES, "dtype")):
            if value not in known:
                raise ValueError(f"unknown {what} {value!r}; expected one of {', '.join(known)}")
        progress("reading the model")
        self.workload, self.progress = workload, progress
        if w.lora < 0:
            raise ValueError(f"--lora {w.lora}: a rank is at least 1, or 0 to train the model itself")
        self.model, self.example = load(w.model, w.batch, w.seq, DTYPES[w.dtype], w.attention)
        if w.lora:
            self.model = adapted(self.model, w.lora)
        self.update = makers[w.optimizer](self.model.parameters(), lr=1e-3)
        self.captured = Steps(self._captured).planned
        self.graph = cache(self._graph)

    @property
    def batch(self) -> int:
        return batch_size(self.example)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def _graph(self, microbatch_count: int = 1, variant: Variant = PLAIN) -> StepGraph:
        """The step of one microbatch out of `microbatch_count`."""
        graph = self.captured(microbatch_count)
        if variant.sequence_chunks > 1:
            self.progress(f"cutting the sequence into {variant.sequence_chunks} chunks")
        return vary(graph, variant)

    def _captured(self, microbatch_count: int) -> StepGraph:
        first = microbatches(self.example, microbatch_count)[0]
        self.progress("capturing the step" + (f" of 1/{microbatch_count} of the batch" if microbatch_count > 1 else ""))
        with suiting(self.model):
            return capture(self.model, first, self.update, clip_norm=self.workload.clip_norm,
                           fp32_master_weights=self.workload.masters)  # fmt: skip
