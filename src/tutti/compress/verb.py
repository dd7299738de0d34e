"""`tutti.compress`: one verb for all recipes, and one object that it returns."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tutti.compress import parallel
from tutti.compress.blocks import Batch, checked
from tutti.compress.compressor import (
    Compressed,
    Compression,
    CompressionReport,
    InMemory,
    bytes_of,
    check_plain,
)
from tutti.compress.compressor import check as check_quantized
from tutti.compress.folder import GGUF, checked_folders, compress_folder
from tutti.compress.formats import gguf
from tutti.compress.formats.compressed_tensors import save
from tutti.compress.methods import low_rank, rotate, sparsity
from tutti.compress.methods.distill import distill
from tutti.compress.methods.shrink import check as check_shrink
from tutti.compress.methods.shrink import shrink
from tutti.compress.mixed import check as check_mixed
from tutti.compress.mixed import search
from tutti.compress.modules import shapes
from tutti.compress.recipe import Distill, LowRank, Mixed, Prune, Quantize, Recipe, Rotate, Shrink, Step, parse
from tutti.progress import Count


def compress(
    model: nn.Module | str | Path,
    recipe: Recipe | Step | str,
    calibration: Iterable[Any] | None = None,
    *,
    out: str | Path | None = None,
    tokenizer: Any = None,
    training: Iterable[Any] | None = None,
    progress: Count | None = None,
) -> Compressed:
    """Compress a model of `transformers`, or a folder with one.

    recipe: such as "int4", "int4-g128-gptq" or "rotate+int4-awq", the path of a TOML file, or steps: see
        `compress.recipe`.
    calibration: for methods that need it: dicts with input_ids (batch, sequence) and, where there is padding, an
        attention_mask; or texts, with a tokenizer. Padding does not count.
    out: where the compressed model of a folder is written: path of a folder, or of a GGUF file, which also has its
        tokenizer. Into a folder, quantization and rotation hold one block in memory at a time, and a run that was
        interrupted goes on where it stopped; else the whole model is held.
    training: more data like the calibration data, for distillation; by default that is used again.
    progress: called with what is done (blocks, or steps), all of it, and what comes next.

    In several processes (`tutti run`), each gives the same model and data, and runs its share of the calibration data;
    the first one writes files, in a folder that all of them see.

    A model on a GPU is compressed there; a folder is compressed on the CPU.

    The model is not changed. Raises ValueError for a recipe that does not fit the model, naming the layer, and for
    calibration data that is missing or too short; nothing has been computed then.
    """
    parallel.join()
    steps = recipe if isinstance(recipe, Recipe) else parse(recipe) if isinstance(recipe, str) else Recipe((recipe,))
    if training is not None and not steps.find(Distill):
        raise ValueError("training= is for distillation, and the recipe has no such step")
    if isinstance(model, nn.Module):
        if out is not None:
            raise ValueError("out= is for a folder; call .save(folder) on the result")
        device = next(model.parameters()).device
        with torch.device(device) if device.type != "cpu" else nullcontext():
            return _Run(model, steps, calibration, training, tokenizer, progress).run()
    folder, out = checked_folders(model, out)
    if steps.block_by_block and out.suffix != GGUF:
        return compress_folder(folder, steps, calibration, out, tokenizer, progress)
    if getattr(AutoConfig.from_pretrained(folder, trust_remote_code=False), "quantization_config", None) is not None:
        raise ValueError(f"{folder} is quantized already: compress the model that it was made of")
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", trust_remote_code=False)
    if out.suffix == GGUF:
        gguf.check(loaded, own_tokenizer := AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
    compressed = _Run(loaded, steps, calibration, training, tokenizer, progress).run()
    if out.suffix == GGUF:
        parallel.by_first(lambda: gguf.save(compressed.model, out, tokenizer=own_tokenizer))
    else:
        parallel.by_first(lambda: save(compressed.model, out, files=folder))
    return Compressed(None, compressed.report, steps, out)


class _Run:
    """The steps of a recipe in order, each on what the one before it has made."""

    def __init__(
        self, model: nn.Module, recipe: Recipe, calibration: Any, training: Any, tokenizer: Any, progress: Any
    ):
        self.teacher = self.model = model
        self.recipe, self.progress, self.report = recipe, progress, CompressionReport()
        self.weights: dict[str, Tensor] = {}  # of quantized layers before they were rounded
        self.pruned: list[str] = []  # layers whose zeros stay
        self.data: list[Batch] | None = None  # of all processes
        if calibration is not None:
            self.data = checked(calibration, max((k for _, k in shapes(model).values()), default=0), tokenizer)
        elif recipe.calibrated:
            raise ValueError("the recipe needs data: calibration=[{'input_ids': ...}, ...], or texts and tokenizer=")
        self.training = self.data if training is None else checked(training, 0, tokenizer)
        self.batches = None if self.data is None else parallel.own_share(self.data)
        self._check()

    def _check(self) -> None:
        """Raise ValueError for what can be seen before anything is computed."""
        check_plain(self.model)
        before: list[type] = []
        model: Any = self.model  # with the shapes that it has after these steps
        for step in self.recipe.steps:
            if isinstance(step, Rotate):
                rotate.check(model, step)
            if isinstance(step, Shrink):
                check_shrink(model, step)
            if isinstance(step, Prune):
                sparsity.check(model, step)
            if isinstance(step, LowRank) and Shrink not in before:
                model = low_rank.planned(model, step)
            if isinstance(step, Mixed) and Shrink not in before:
                check_mixed(model, step, self.recipe.steps[: len(before)])
            before.append(type(step))
        if Shrink not in before:
            check_quantized(model, self.recipe)

    def run(self) -> Compressed:
        begun, before = time.perf_counter(), sum(x.nbytes for x in self.model.parameters())
        joined: list[Rotate | Quantize] = []
        for step in self.recipe.steps:
            if isinstance(step, Mixed):
                assert self.batches is not None
                self._together(joined, False)
                ranks, step, table = search(self.model, step, self.batches, self.progress)
                self.report.sensitivity = table
                for lower in ranks:
                    self._alone(lower)
            if isinstance(step, Rotate | Quantize):
                joined.append(step)
                continue
            self._together(joined, isinstance(step, Distill))
            self._alone(step)
        self._together(joined, False)
        self.report.before, self.report.after = before, bytes_of(self.model)
        self.report.seconds = time.perf_counter() - begun
        return Compressed(self.model, self.report, self.recipe)

    def _together(self, steps: list[Rotate | Quantize], keep: bool) -> None:
        """Rotate and quantize, block by block. keep: as for `Compression`."""
        if not steps:
            return
        run = Compression(InMemory(self.model), Recipe(tuple(steps)), self.data, progress=self.progress, keep=keep)
        self.model = run.run().model
        self.weights = run.weights or {}
        self.report.layers += run.report.layers
        steps.clear()

    def _alone(self, step: Prune | Shrink | LowRank | Distill) -> None:
        batches = self.batches or []
        if isinstance(step, Shrink):
            self.model, removed = shrink(self.model, step, batches, self.progress)
            self.report.notes += [f"{kind}: {left} of {count} left" for kind, (count, left) in removed.counts.items()]
        elif isinstance(step, LowRank):
            self.model, layers = low_rank.factored(self.model, step, batches, self.progress)
            self.report.layers += layers
        elif isinstance(step, Prune):
            self.pruned += sparsity.check(self.model, step)
            self.model, zeros = sparsity.pruned(self.model, step, batches, self.progress)
            self.report.notes.append(f"{100 * zeros:.1f} % of the weights of linear layers are zero")
        else:
            student = copy.deepcopy(self.model)
            losses = distill(student, self.teacher, self.training or [], step, self.weights, self.progress,
                             self.pruned)  # fmt: skip
            self.model, tenth = student, max(1, len(losses) // 10)
            first, last = (sum(x) / tenth for x in (losses[:tenth], losses[-tenth:]))
            self.report.layers = [x._replace(error=math.nan) for x in self.report.layers]
            self.report.notes.append(f"distilled in {step.steps} steps: loss {first:.4f} to {last:.4f}")
