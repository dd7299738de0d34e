"""`tutti.pipeline`: the pipelines of transformers, with the model distributed by a plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import tutti
from tutti.exec.runtimes.runtime import cluster_of
from tutti.hardware import Cluster
from tutti.plan.plan import Plan
from tutti.tracing.batch import Batch
from tutti.tracing.capture import device_of
from tutti.train.trainer import batches, evaluation
from tutti.train.values import NamedValues, Outputs, Processor

GENERATE = ("generation", "text2text", "summarization", "translation", "automatic-speech", "image-to-text",
            "image-text-to-text", "text-to-audio", "any-to-any")  # fmt: skip


def pipeline(
    task: str | None = None,
    model: str | nn.Module | None = None,
    *args: Any,
    plan: str | Path | Plan = "auto",
    cluster: str | Cluster = "auto",
    level: str = "O0",
    **kwargs: Any,
) -> transformers.Pipeline:
    """A `transformers.pipeline` whose model runs on a cluster: `tutti.pipeline("text-classification", "out/model")`.

    task, model, args, kwargs: those of `transformers.pipeline`.
    plan, cluster, level: as for `tutti.parallelize`. Every rank of a job calls the pipeline with the same inputs.

    Inputs are padded to a power of two of rows and to one of a few lengths, because each shape is captured once.
    Pipelines that generate run the model as it is, on one device.
    """
    pipe = transformers.pipeline(task, model, *args, **kwargs)  # pyright: ignore
    if not any(word in pipe.task for word in GENERATE):
        Distributed(pipe.model, getattr(pipe, "tokenizer", None), plan, cluster, level)
    return pipe


class Distributed:
    """The forward pass of a model as a Function. It replaces `model.forward`."""

    def __init__(
        self, model: nn.Module, tokenizer: Processor, plan: str | Path | Plan, cluster: str | Cluster, level: str
    ):
        self.model, self.plain = model.eval(), model.forward
        self.options = {"plan": plan, "cluster": cluster, "level": level}
        config = getattr(model, "config", None)
        pad = getattr(tokenizer, "pad_token_id", None) or getattr(config, "pad_token_id", None) or 0
        self.pads = {"input_ids": pad, "decoder_input_ids": pad}
        self.buckets = batches.Buckets(config)
        self.store = tutti.Store(model=model)
        self.devices = cluster_of(cluster, device_of(model)).size
        self.functions: dict[tuple, tutti.Function] = {}
        self.kinds: dict[tuple, type] = {}
        model.forward = self  # pyright: ignore[reportAttributeAccessIssue]

    def __call__(self, **inputs: Batch) -> Outputs:
        tensors = {key: x for key, x in inputs.items() if isinstance(x, Tensor)}
        others = {key: x for key, x in inputs.items() if not isinstance(x, Tensor)}
        rows = len(next(iter(tensors.values())))
        most = max(self.devices, 1 << (rows - 1).bit_length())
        padded = self.buckets(tensors, self.pads)
        padded = {name: torch.cat([x, x[-1:].expand(most - rows, *x.shape[1:])]) for name, x in padded.items()}
        key = (tuple(sorted(padded)), tuple(sorted((k, repr(x)) for k, x in others.items())))
        if key not in self.functions:
            self.functions[key] = tutti.function(self._forward(key, others), padded, store=self.store, **self.options)
        outputs = self.functions[key](padded)
        outputs = pytree.tree_map_only(Tensor, lambda x: x[:rows] if x.ndim and len(x) == most else x, outputs)
        return self.kinds[key](**evaluation.cut(outputs, padded, tensors))

    def _forward(self, key: tuple, others: NamedValues) -> Callable[[dict[str, Tensor]], NamedValues]:
        @torch.no_grad()
        def forward(batch: dict[str, Tensor]) -> NamedValues:
            outputs = self.plain(**batch, **others)
            self.kinds[key] = type(outputs)
            return {name: x for name, x in outputs.items() if name != "past_key_values"}

        return forward
