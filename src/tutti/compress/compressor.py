"""Quantization of a model, block by block, and what it reports."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tutti.compress import folds, parallel
from tutti.compress.blocks import Walk, checked, stack_of
from tutti.compress.experts import ExpertLayers, is_experts
from tutti.compress.methods import awq, gptq, hqq, rotate, smooth
from tutti.compress.modules import check_patterns, linear_layers, matches, own_copy, selected, shapes
from tutti.compress.recipe import Quantize, Recipe, Rotate
from tutti.compress.statistics import Statistics
from tutti.nn.quantized.quantized_embedding import QuantizedEmbedding, factor_of
from tutti.nn.quantized.quantized_linear import KERNELS, QuantizedLinear, quantized_layers
from tutti.nn.quantized.scheme import Parts, Scheme, nonzero
from tutti.progress import Count

FORMATS = "compressed-tensors", "gguf"


class LayerReport(NamedTuple):
    """What became of a layer.

    scheme: scheme of its weight. before, after: bytes. error: ||X (W - Q)^T|| / ||X W^T|| over the calibration data, or
    that of the weight alone without data; nan for what has learned since. tokens: number of tokens of the data that
    reached it. note: what was done in another way than asked.
    """

    path: str
    scheme: str
    before: int
    after: int
    error: float
    tokens: int = 0
    note: str = ""


@dataclass
class CompressionReport:
    """What became of each layer.

    notes: remarks on steps that change whole modules. sensitivity: sensitivity of layers to schemes, if mixed precision
    was searched.
    before, after: bytes of the whole model.
    """

    layers: list[LayerReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sensitivity: Any = None
    before: int = 0
    after: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        lines = [f"{'layer':<48} {'scheme':<14} {'bytes':>12} {'error':>8}"] if self.layers else []
        for x in self.layers:
            error = "learned" if math.isnan(x.error) else f"{x.error:.4f}"
            lines.append(f"{x.path[-48:]:<48} {x.scheme:<14} {x.after:>12,} {error:>8} {x.note}".rstrip())
        lines += self.notes
        ratio = self.before / max(1, self.after)
        return "\n".join(
            [*lines, f"{self.before:,} bytes -> {self.after:,} bytes ({ratio:.2f} x), {self.seconds:.1f} s"]
        )


@dataclass
class Compressed:
    """A compressed model.

    model: a copy with quantized layers, which generates with plain `transformers` code; None if it was written to a
    folder as it was made. report: what became of each layer. folder: where it was written.
    """

    model: Any
    report: CompressionReport
    recipe: Recipe
    folder: Path | None = None

    def save(self, path: str | Path, format: str = "compressed-tensors", **options: Any) -> Path:
        """Write the model, which appears when it is complete.

        format: "compressed-tensors", a folder in files of at most `shard` bytes, which `transformers` and
        `tutti serve` load, or, with a warning, `tutti.compress.load` and `tutti serve` alone; or "gguf", a file for
        llama.cpp, with the options of `compress.formats.gguf.save`.

        Raises ValueError for an unknown format, for a folder that is not a model's, and for what the format cannot say.
        """
        if format not in FORMATS:
            raise ValueError(f"format={format!r}; expected one of {', '.join(FORMATS)}")
        if self.model is None:
            raise ValueError(f"the model has been written to {self.folder} already")
        source = getattr(self.model, "name_or_path", "")
        if source and Path(source).exists() and Path(source).resolve() == Path(path).resolve():
            raise ValueError(f"{path} is the model that was compressed: choose another folder")
        if format == "gguf":
            from tutti.compress.formats import gguf

            parallel.by_first(lambda: gguf.save(self.model, path, **options))
        else:
            from tutti.compress.formats import compressed_tensors

            parallel.by_first(lambda: compressed_tensors.save(self.model, Path(path), **options))
        return Path(path)


class InMemory:
    """A model in memory whose blocks are copied when they are compressed."""

    def __init__(self, model: nn.Module):
        self.model = own_copy(model).eval()
        self._original_pointers = {x.data_ptr() for x in model.parameters()}
        self._copies: dict[int, nn.Parameter] = {}

    def begin(self, stack: str) -> None:
        """Called once, with the path of the blocks."""
        self.stack = stack

    def outside(self) -> None:
        """Make parameters outside of blocks ready to be changed."""
        self._copy(f"{self.stack}.")

    def _copy(self, but: str | None = None) -> None:
        """Give parameters memory of their own. but: the beginning of paths that stay as they are."""
        for path, module in self.model.named_modules():
            for name, x in module._parameters.items():
                if x is not None and x.data_ptr() in self._original_pointers and not (but and path.startswith(but)):
                    if id(x) not in self._copies:
                        self._copies[id(x)] = nn.Parameter(x.detach().clone(), requires_grad=False)
                    module._parameters[name] = self._copies[id(x)]

    def block(self, path: str, schemes: Mapping[str, Scheme], reports: list[LayerReport]) -> bool:
        """Make a block ready to be changed. Whether it is compressed already; what became of it is added to reports."""
        self.model.set_submodule(path, copy.deepcopy(self.model.get_submodule(path)))
        return False

    def done(self, path: str, reports: list[LayerReport]) -> None:
        """Called when a block is compressed and no longer needed."""

    def end(self) -> None:
        """Called when all is compressed. The model shares no memory with the one that was given."""
        self._copy()


GATES = "gate_proj", "up_proj"  # layers of an expert that read its inputs


class Compression:
    """One run of a recipe over a model.

    source: gives the blocks of the model, and takes them back. keep: whether weights before they were rounded are held,
        by path, for a distillation.
    """

    def __init__(
        self,
        source: Any,
        recipe: Recipe,
        calibration: Iterable[Any] | None = None,
        tokenizer: Any = None,
        progress: Count | None = None,
        keep: bool = False,
    ):
        parallel.join()
        self.source, self.recipe, self.model = source, recipe, source.model
        self.progress, self.report = progress, CompressionReport()
        self.weights: dict[str, Tensor] | None = {} if keep else None
        self.quantize: Quantize | None = recipe.find(Quantize)
        self.rotation: Rotate | None = recipe.find(Rotate)
        self.schemes = check(self.model, recipe)
        if self.rotation:
            rotate.check(self.model, self.rotation)
        self.stack = stack_of(self.model)
        if self.stack is None and (recipe.calibrated or self.rotation):
            raise ValueError(f"{type(self.model).__name__} has no single list of blocks, which gptq, awq, smooth, "
                             "static activations and rotate need: use rtn or hqq")  # fmt: skip
        batches = []
        if recipe.calibrated:
            if calibration is None:
                raise ValueError(
                    "the recipe needs data: calibration=[{'input_ids': ...}, ...], or texts and tokenizer="
                )
            widest = max(k for _, k in shapes(self.model).values())
            batches = parallel.own_share(checked(calibration, widest, tokenizer))
        elif self.rotation:
            batches = [{"input_ids": torch.arange(16).remainder(_vocabulary(self.model)).unsqueeze(0)}]
        self.batches = batches
        self.report.before = sum(x.nbytes for x in self.model.parameters())

    @torch.no_grad()
    def run(self) -> Compressed:
        """The compressed model."""
        begun = time.perf_counter()
        path, blocks = self.stack or ("", nn.ModuleList())
        self.source.begin(path)
        walk, turn = (Walk(self.model, blocks, self.batches) if self.batches else None), None
        for i in range(len(blocks)):
            name, reports = f"{path}.{i}", self.report.layers
            if self.progress:
                self.progress(i, len(blocks), name)
            first = len(reports)
            finished = self.source.block(name, self.schemes, reports)
            if walk is not None and i == 0:
                if self.rotation:
                    self.source.outside()
                    turn = rotate.Turn(self.model, self.rotation)
                    turn.begin(walk)
                walk.begin()
            if not finished:
                self._block(walk, i, name, turn)
            if walk is not None:
                walk.run(i, outputs=True)
            self.source.done(name, reports[first:])
        self._rest(walk, path, turn)
        self.source.end()
        if self.progress:
            self.progress(len(blocks), len(blocks), "")
        self.report.after = getattr(self.source, "bytes", 0) or bytes_of(self.model)
        self.report.seconds = time.perf_counter() - begun
        return Compressed(self.model, self.report, self.recipe)

    # -- parts ----------------------------------------------------------------------------------------------------

    def _block(self, walk: Walk | None, i: int, path: str, turn: Any) -> None:
        """Compress block i."""
        block = self.model.get_submodule(path)
        fused = {name: x for name, x in block.named_modules() if is_experts(x)}
        if turn is not None and walk is not None:
            turn.block(walk, i)
        for name, x in fused.items():
            quantized = any(p.startswith(f"{path}.{name}.") for p in self.schemes)
            block.set_submodule(name, ExpertLayers(x) if quantized else x)  # which share memory
        fused.clear()
        quantize = self.quantize
        if quantize is None:
            return
        layers = {name: x for name, x in linear_layers(block).items() if f"{path}.{name}" in self.schemes}
        experts = {name: x for name, x in block.named_modules() if isinstance(x, ExpertLayers)}
        outside = {name: x for name, x in layers.items() if not any(name.startswith(f"{e}.") for e in experts)}
        statistics: dict[str, Statistics] = {}
        if walk is not None and quantize.calibrated:
            folded = quantize.method in ("awq", "smooth")
            statistics = walk.statistics(i, {**outside, **experts} if folded else outside)
            for fold in folds.find(walk, i, layers) if folded else ():
                self._fold(walk, i, path, fold, layers, statistics)
        self._layers(path, outside, statistics)
        routed = walk.routed(i, experts) if walk is not None and quantize.calibrated and experts else {}
        for name, x in experts.items():
            self._experts(f"{path}.{name}", x, routed.get(name))

    def _fold(self, walk: Walk, i: int, path: str, fold: Any, layers: Any, by_layer: dict[str, Statistics]) -> None:
        """Search the factors of a fold, and apply it where the block's outputs stay as they are."""
        assert self.quantize
        read = {name for name in by_layer for x in fold.consumers if x == name or x.startswith(f"{name}.")}
        if not read:
            return
        weights = {name: layers[name].weight.data for name in fold.consumers}
        schemes = {name: self.schemes[f"{path}.{name}"] for name in weights}
        statistics = by_layer[min(read)]
        if self.quantize.method == "awq":
            factors = awq.search(weights, schemes, statistics, fold.tied)
        else:
            factors = fold.tied(smooth.factors(list(weights.values()), statistics.most, self.quantize.strength))
        if factors is not None and fold.apply(walk, i, factors):
            divided = statistics.divided(factors)
            by_layer |= dict.fromkeys(read, divided)

    def _experts(self, path: str, experts: ExpertLayers, routed: list[tuple[Tensor, Tensor]] | None) -> None:
        """Compress experts one after the other: one matrix of moments is held at a time."""
        for e in range(experts.count):
            expert, own = experts[e], f"{path}.{e}"
            if routed is None:
                self._layers(own, linear_layers(expert), {})
                continue
            rows = [x[(index == e).any(1)] for x, index in routed]
            statistics = Statistics(expert.gate_proj.in_features)  # pyright: ignore
            for x in rows:
                statistics.add(x)
            parallel.add_up({"": statistics})
            self._layers(own, {name: getattr(expert, name) for name in GATES}, dict.fromkeys(GATES, statistics))
            statistics = Statistics(expert.down_proj.in_features)  # pyright: ignore
            for x in rows:
                statistics.add(expert.gated(x))
            parallel.add_up({"": statistics})
            self._layers(own, {"down_proj": expert.down_proj}, {"down_proj": statistics})  # pyright: ignore

    def _layers(self, prefix: str, layers: Mapping[str, Any], statistics: Mapping[str, Statistics]) -> None:
        """Replace layers by quantized ones. prefix: path of the module that contains them."""
        paths = {f"{prefix}.{name}" if prefix else name: name for name in layers}
        paths = {path: name for path, name in paths.items() if path in self.schemes}

        def work(path: str) -> tuple[Parts, float, str]:
            return self._rounded(self.schemes[path], layers[paths[path]].weight.data, statistics.get(paths[path]))

        def cost(path: str) -> float:
            n, k = layers[paths[path]].weight.shape
            return (n + k) * k**2

        for path, rounded in parallel.each(list(paths), work, cost):
            self._place(path, layers[paths[path]], statistics.get(paths[path]), *rounded)

    def _rounded(self, scheme: Scheme, weight: Tensor, statistics: Statistics | None) -> tuple[Parts, float, str]:
        """A quantized weight, its error as in `LayerReport`, and a note."""
        assert self.quantize
        parts, note = quantized(weight, scheme, self.quantize, statistics)
        rounded = scheme.dequantize(parts)
        if statistics is not None and statistics.count:
            return parts, statistics.error(weight, rounded), note
        return parts, float((weight.float() - rounded).norm() / weight.float().norm().clamp(min=1e-30)), note

    def _place(
        self, path: str, layer: nn.Linear, statistics: Statistics | None, parts: Parts, error: float, note: str
    ) -> None:
        """Put a quantized layer in the place of a layer."""
        scheme, weight, scale = self.schemes[path], layer.weight.data, None
        if scheme.activations == "int8-static" and statistics is not None:
            scale = statistics.most.max() / 127 if statistics.count else torch.ones(())
            scale = nonzero(scale.to(weight.dtype))  # as files have it
        replacement = QuantizedLinear.from_parts(parts, scheme, layer.bias, weight.dtype, scale)
        if replacement.layout not in KERNELS:
            note = "; ".join(x for x in (note, "dequantized at each call, which is slower") if x)
        self.model.set_submodule(path, replacement)
        self._keep(path, weight)
        after, tokens = scheme.bytes(weight.shape, weight.dtype), statistics.count if statistics else 0
        self.report.layers.append(LayerReport(path, str(scheme), weight.nbytes, after, error, tokens, note))

    def _keep(self, path: str, weight: Tensor) -> None:
        if self.weights is not None:
            self.weights[path] = weight

    def _rest(self, walk: Walk | None, stack: str, turn: Any) -> None:
        """Compress what stands outside of the blocks."""
        if turn is not None and walk is not None:
            turn.end(walk)
        if self.quantize is None:
            return
        outside = {path: x for path, x in linear_layers(self.model).items()
                   if path in self.schemes and not (stack and path.startswith(f"{stack}."))}  # fmt: skip
        embedding, head = _embeddings(self.model)
        tied = head is not None and embedding is not None and head.weight is embedding.weight
        shared = self.quantize.embeddings is not None and tied
        outside = {path: x for path, x in outside.items() if not (shared and x is head)}
        statistics = walk.tail(outside) if walk is not None and outside and self.quantize.calibrated else {}
        self._layers("", outside, statistics)
        if (scheme := self.quantize.embeddings) is not None and embedding is not None:
            path = next(name for name, x in self.model.named_modules() if x is embedding)
            weight = embedding.weight.data
            parts = scheme.quantize(weight)
            self._keep(path, weight)
            table = QuantizedLinear.from_parts(
                parts, scheme, getattr(head, "bias", None) if tied else None, weight.dtype
            )
            self.model.set_submodule(path, QuantizedEmbedding(table, factor_of(embedding)))
            if tied:
                name = next(name for name, x in self.model.named_modules() if x is head)
                self.model.set_submodule(name, table)
                self._keep(name, weight)
            error = float((weight.float() - scheme.dequantize(parts)).norm() / weight.float().norm())
            self.report.layers.append(LayerReport(path, str(scheme), weight.nbytes,
                                                  scheme.bytes(weight.shape, weight.dtype), error))  # fmt: skip


def quantized(weight: Tensor, scheme: Scheme, step: Quantize, statistics: Statistics | None) -> tuple[Parts, str]:
    """A quantized weight (n, k) by the method of a step, and a note if another one was used."""
    parts, note = _quantized(weight, scheme, step, statistics)
    return parts._replace(scales=scheme.stored(parts.scales, weight.dtype)), note


def _quantized(weight: Tensor, scheme: Scheme, step: Quantize, statistics: Statistics | None) -> tuple[Parts, str]:
    if step.method == "hqq":
        return hqq.quantize(weight, scheme), ""
    if step.method in ("gptq", "awq"):
        if statistics is None or not statistics.count:
            return scheme.quantize(weight), "no token reached it: rounded to nearest"
        if step.method == "gptq":
            return gptq.quantize(weight, scheme, statistics.gram, step.damping, step.order), ""
        return awq.clipped(weight, scheme, statistics.gram), ""
    return scheme.quantize(weight), ""


def check_plain(model: nn.Module) -> None:
    """Raise ValueError for a model that is quantized already, or has a layer in two places."""
    if quantized_layers(model) or getattr(getattr(model, "config", None), "quantization_config", None) is not None:
        raise ValueError(f"{type(model).__name__} is quantized already: compress the model that it was made of")
    paths: dict[nn.Module, str] = {}
    for path, x in model.named_modules(remove_duplicate=False):
        if type(x) is nn.Linear and paths.setdefault(x, path) != path:
            raise ValueError(f"{paths[x]} and {path} are one layer, which is not supported: give it two layers")


def check(model: nn.Module, recipe: Recipe) -> dict[str, Scheme]:
    """The scheme of each layer that a recipe quantizes, by path. Raises ValueError if it does not fit the model."""
    check_plain(model)
    step: Quantize | None = recipe.find(Quantize)
    sizes = shapes(model)
    if not sizes or not any(not matches(path, "lm_head") for path in sizes):
        raise ValueError(f"{type(model).__name__} has no linear layers (torch.nn.Linear) to compress")
    if step is None:
        return {}
    paths = list(sizes)
    chosen = selected(paths, step.layers, step.ignore)
    check_patterns(paths, [x for x, _ in step.overrides], "overrides")
    schemes: dict[str, Scheme] = {}
    for path in chosen:
        scheme = next((x for pattern, x in step.overrides if matches(path, pattern)), step.scheme)
        if scheme is not None:
            scheme.check(path, sizes[path][1])
            schemes[path] = scheme
    embedding, head = _embeddings(model)
    untied = any(isinstance(x, Rotate) and x.untie for x in recipe.steps)
    if embedding is not None and head is not None and head.weight is embedding.weight and not untied:
        name = next(path for path, x in model.named_modules() if x is head)
        if step.embeddings is None and name in schemes:
            raise ValueError(f"{name} is tied to the embeddings: quantize both with embeddings=, or ignore it")
        schemes.pop(name, None)
    if step.embeddings is not None:
        if embedding is None:
            raise ValueError(f"{type(model).__name__} has no input embeddings to quantize: embeddings=None")
        factor_of(embedding)
        step.embeddings.check("the embedding", embedding.weight.shape[1])
    if not schemes and step.embeddings is None:
        raise ValueError("the recipe ignores all layers")
    experts = [path for path, x in model.named_modules() if is_experts(x)]
    for path in experts:
        own = [x for x in sizes if x.startswith(f"{path}.")]
        if any(x in schemes and schemes[x].activations == "int8-static" for x in own):
            raise ValueError(f"{path} has experts that data may not reach: their activations are not static")
        if 0 < sum(x in schemes for x in own) < len(own):
            raise ValueError(f"some layers of {path} are quantized and some are not: take all of its experts, or none")
    return schemes


def _embeddings(model: nn.Module) -> tuple[Any, Any]:
    """The input embeddings and the output layer, or None."""
    modules: list[Any] = []
    for name in ("get_input_embeddings", "get_output_embeddings"):
        try:
            modules.append(getattr(model, name)())
        except (AttributeError, NotImplementedError):
            modules.append(None)
    return modules[0], modules[1]


def _vocabulary(model: Any) -> int:
    return model.get_input_embeddings().weight.shape[0]


def bytes_of(model: nn.Module) -> int:
    """Bytes of a compressed model's tensors in a file."""
    total, seen = 0, set()
    for module in model.modules():
        if isinstance(module, (QuantizedLinear, QuantizedEmbedding)):
            if id(module.q) not in seen:
                total += module.scheme.bytes(module.weight.shape, module.dtype)
            seen |= {id(module.q), id(module.scales), id(module.zeros)}
    return total + sum(x.nbytes for x in model.parameters() if id(x) not in seen)
