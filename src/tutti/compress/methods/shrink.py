"""Structured pruning: heads, channels of the MLP, experts and whole layers are removed, so that less is computed.

What is left is an ordinary model of `transformers` with another config. What a layer with weight W (n, k) loses when
only the inputs S are left is measured over the calibration data, with G = sum x x^T of its inputs:

    heads, channels   those whose share ||W[:, j] x_j||^2 = ||W[:, j]||^2 G[j, j] of the output is least; then W
                      becomes W[:, S] + W[:, R] G[R, S] (G[S, S] + damping)^-1 for the removed inputs R, the
                      least-squares fit of the whole output to what is left (the optimal brain surgeon's correction
                      for a group of weights, Hassibi and Stork 1993)
    experts           those that are given the fewest tokens
    layers            those whose outputs have the largest mean cosine with their inputs (block influence, Men et al.
                      2024, arXiv:2403.03853)

A head is removed with its key and value heads, in grouped-query attention as a whole group.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tutti.compress import parallel
from tutti.compress.blocks import Batch, Walk, first, stack_of
from tutti.compress.experts import is_experts
from tutti.compress.recipe import Shrink
from tutti.compress.statistics import Statistics
from tutti.progress import Count

ATTENTION = "q_proj", "k_proj", "v_proj", "o_proj"
MLP = "gate_proj", "up_proj", "down_proj"
DAMPING = 0.01  # of the mean diagonal


@dataclass
class Removed:
    """What has been removed. counts: how many there were and are, by kind. errors: ||X W^T - X' W'^T|| / ||X W^T|| of
    the layers that were fitted again, by path."""

    counts: dict[str, tuple[int, int]]
    errors: dict[str, float]


@torch.no_grad()
def shrink(model: Any, step: Shrink, batches: Sequence[Batch], progress: Count | None = None) -> tuple[Any, Removed]:
    """A smaller copy of a model, and what was removed. The model is not changed.

    batches: calibration data. Raises ValueError for a model whose blocks have no layers of these names, and for a step
    that would remove nothing or everything of a kind.
    """
    check(model, step)
    smaller = copy.deepcopy(model).eval()
    removed = Removed({}, {})
    if step.layers:
        _drop_layers(smaller, step.layers, batches, removed)
    path, blocks = _stack(smaller)
    if step.heads < 1 or step.channels < 1 or step.experts < 1:
        walk = Walk(smaller, blocks, batches)
        walk.begin()
        for i, block in enumerate(blocks):
            if progress:
                progress(i, len(blocks), f"{path}.{i}")
            for name, module in list(block.named_modules()):
                where = f"{path}.{i}.{name}"
                if step.heads < 1 and _has(module, ATTENTION):
                    _shrink_attention(module, _statistics(walk, i, f"{name}.o_proj"), step.heads, where, removed)
                if step.channels < 1 and _has(module, MLP):
                    _shrink_mlp(module, _statistics(walk, i, f"{name}.down_proj"), step.channels, where, removed)
            if step.experts < 1:
                _shrink_experts(walk, i, step.experts, removed)
            walk.run(i, outputs=True)
    _describe(smaller, removed)
    _check_described(smaller)
    return smaller, removed


def check(model: Any, step: Shrink) -> None:
    """Raise ValueError if a step does not fit a model."""
    _, blocks = _stack(model)
    if step.layers >= len(blocks):
        raise ValueError(f"the model has {len(blocks)} layers: {step.layers} cannot be removed")
    modules = [x for block in blocks for x in block.modules()]
    asked = {"heads": (step.heads, any(_has(x, ATTENTION) for x in modules), ATTENTION),
             "channels": (step.channels, any(_has(x, MLP) for x in modules), MLP),
             "experts": (step.experts, any(is_experts(x) for x in modules), ("experts",))}  # fmt: skip
    for kind, (share, sizes, names) in asked.items():
        if share < 1 and not sizes:
            raise ValueError(f"{type(model).__name__} has no modules with {', '.join(names)}: {kind}={share} does not "
                             "fit it")  # fmt: skip
    for x in modules:
        if step.heads < 1 and _has(x, ATTENTION):
            _check_heads(x)
            count_of(_groups(x), step.heads, "key and value heads")
        if step.channels < 1 and _has(x, MLP):
            count_of(x.down_proj.in_features, step.channels, "channels")  # pyright: ignore
        if step.experts < 1 and is_experts(x):
            left, top = count_of(x.num_experts, step.experts, "experts"), model.config.num_experts_per_tok  # pyright: ignore
            if left < top:
                raise ValueError(f"each token is given to {top} experts: {left} are too few")
        if step.channels < 1 and any(map(is_experts, x.children())) and any(_has(y, MLP) for y in x.modules()):
            raise ValueError(f"{type(x).__name__} has an MLP beside its experts, whose size the config names apart: "
                             "channels=1")  # fmt: skip


def _check_heads(attention: Any) -> None:
    """Raise ValueError for attention with more weights that depend on the number of heads."""
    heads, width = attention.q_proj.out_features // attention.head_dim, attention.head_dim
    if attention.o_proj.in_features != heads * width or heads % _groups(attention):
        raise ValueError(f"{type(attention).__name__}: o_proj does not read the {heads} heads of {width}: heads=1")
    for name, x in attention.named_parameters():
        if name.partition(".")[0] not in ATTENTION and x.shape != (width,):
            raise ValueError(f"{type(attention).__name__} has {name} of {tuple(x.shape)}, which is not of one head: "
                             "heads=1")  # fmt: skip


def count_of(count: int, share: float, what: str) -> int:
    """Return how many of a kind stay. If there are more than 64, it is a multiple of 64, which groups of scales divide.
    Raises ValueError if all or none stay."""
    left = round(count * share)
    if count > 64:
        left = max(64, round(left / 64) * 64)
    if not 0 < left < count:
        raise ValueError(f"a share of {share} of {count} {what} leaves {left}: choose another share")
    return left


def least_squares(weight: Tensor, gram: Tensor, keep: Tensor) -> Tensor:
    """The weight (n, len(keep)) for the inputs `keep` that is nearest to a weight (n, k). gram: sum of x x^T (k, k)."""
    gram, weight = gram.double(), weight.double()
    gone = torch.ones(len(gram), dtype=torch.bool)
    gone[keep] = False
    inner = gram[keep][:, keep]
    inner.diagonal().add_(DAMPING * inner.diagonal().mean().clamp(min=1e-12))
    return weight[:, keep] + torch.linalg.solve(inner, gram[keep][:, gone] @ weight[:, gone].T).T


# -- parts ---------------------------------------------------------------------------------------------------------


def _stack(model: Any) -> tuple[str, nn.ModuleList]:
    stack = stack_of(model)
    if stack is None:
        raise ValueError(f"{type(model).__name__} has no single list of blocks, which structured pruning needs")
    return stack


def _has(module: nn.Module, names: Sequence[str]) -> bool:
    return all(type(getattr(module, name, None)) is nn.Linear for name in names)


def _statistics(walk: Walk, i: int, path: str) -> Statistics:
    return walk.statistics(i, {path: walk.blocks[i].get_submodule(path)})[path]


def _keep_rows(layer: Any, rows: Tensor) -> None:
    layer.weight = nn.Parameter(layer.weight[rows].clone(), requires_grad=False)
    if layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias[rows].clone(), requires_grad=False)
    layer.out_features = len(rows)


def _refit(layer: Any, statistics: Statistics, keep: Tensor, path: str, removed: Removed) -> None:
    """Leave the inputs `keep` of a layer."""
    old = layer.weight.float()
    new = least_squares(old, statistics.gram, keep)
    change = old.clone()
    change[:, keep] -= new.float()
    removed.errors[path] = float((statistics.loss(change) / statistics.loss(old).clamp(min=1e-30)).sqrt())
    layer.weight = nn.Parameter(new.to(layer.weight.dtype), requires_grad=False)
    layer.in_features = len(keep)


def _groups(attention: Any) -> int:
    """The number of key and value heads."""
    return attention.k_proj.out_features // attention.head_dim


def _shrink_attention(attention: Any, statistics: Statistics, share: float, path: str, removed: Removed) -> None:
    width, groups = attention.head_dim, _groups(attention)
    heads = attention.q_proj.out_features // width
    left = count_of(groups, share, "key and value heads")
    energy = attention.o_proj.weight.float().square().sum(0) * statistics.gram.diagonal()
    groups_left = energy.view(groups, -1).sum(1).topk(left).indices.sort().values
    of_group = torch.arange(heads * width).view(groups, -1)[groups_left].flatten()
    _refit(attention.o_proj, statistics, of_group, f"{path}.o_proj", removed)
    _keep_rows(attention.q_proj, of_group)
    for layer in (attention.k_proj, attention.v_proj):
        _keep_rows(layer, torch.arange(groups * width).view(groups, width)[groups_left].flatten())
    for name, count in (("num_heads", heads), ("num_attention_heads", heads), ("num_key_value_heads", groups)):
        if hasattr(attention, name):
            setattr(attention, name, count * left // groups)
    removed.counts["heads"] = heads, heads * left // groups
    removed.counts["key and value heads"] = groups, left


def _shrink_mlp(mlp: Any, statistics: Statistics, share: float, path: str, removed: Removed) -> None:
    count = mlp.down_proj.in_features
    left = count_of(count, share, "channels")
    energy = mlp.down_proj.weight.float().square().sum(0) * statistics.gram.diagonal()
    keep = energy.topk(left).indices.sort().values
    _refit(mlp.down_proj, statistics, keep, f"{path}.down_proj", removed)
    for layer in (mlp.gate_proj, mlp.up_proj):
        _keep_rows(layer, keep)
    if hasattr(mlp, "intermediate_size"):
        mlp.intermediate_size = left
    removed.counts["channels"] = count, left


def _shrink_experts(walk: Walk, i: int, share: float, removed: Removed) -> None:
    """Leave the experts that most tokens are given to, and their rows of the router."""
    block = walk.blocks[i]
    mixtures: Any = {name: x for name, x in block.named_modules() if is_experts(x)}
    routed = walk.routed(i, mixtures)
    for name, experts in mixtures.items():
        count = experts.num_experts
        left = count_of(count, share, "experts")
        own = torch.bincount(torch.cat([index.flatten() for _, index in routed[name]]), minlength=count)
        tokens = torch.stack(parallel.gathered(own)).sum(0)
        keep = tokens.topk(left).indices.sort().values
        parent = block.get_submodule(name.rpartition(".")[0])
        routers = [x for x in parent.modules() if x is not experts and _routes(x, count)]
        if len(routers) != 1:
            raise ValueError(f"layer {i} has no single router with {count} rows beside its experts: experts=1")
        for x in (experts, *routers):
            for key, value in [*x.named_parameters(recurse=False), *x.named_buffers(recurse=False)]:
                if value.shape[:1] == (count,):
                    tensors = x._parameters if key in x._parameters else x._buffers
                    tensors[key] = nn.Parameter(value[keep].clone(), False) if tensors is x._parameters else value[keep]
        for x in parent.modules():
            for key in ("num_experts", "num_local_experts", "n_routed_experts"):
                if getattr(x, key, None) == count:
                    setattr(x, key, left)
        for x in routers:
            if type(x) is nn.Linear:
                x.out_features = left
        removed.counts["experts"] = count, left


def _routes(module: Any, count: int) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.ndim == 2 and len(weight) == count


def _drop_layers(model: Any, number: int, batches: Sequence[Batch], removed: Removed) -> None:
    """Remove the blocks that change the hidden states least, all measured in the whole model."""
    path, blocks = _stack(model)
    walk, influence = Walk(model, blocks, batches), []
    walk.begin()
    for i in range(len(blocks)):
        before = list(walk.hidden)
        walk.run(i, outputs=True)
        alike = []
        for at, (x, y) in enumerate(zip(before, map(first, walk.hidden), strict=True)):
            walk._at = at
            alike.append(torch.cosine_similarity(walk.tokens(x).float(), walk.tokens(y).float(), dim=-1))
        influence.append(1 - torch.cat(parallel.gathered(torch.cat(alike))).mean())
    gone = torch.stack(influence).topk(number, largest=False).indices.tolist()
    left = nn.ModuleList([x for i, x in enumerate(blocks) if i not in gone])
    for i, block in enumerate(left):
        for x in block.modules():
            if hasattr(x, "layer_idx"):
                x.layer_idx = i  # pyright: ignore
    model.set_submodule(path, left)
    config, stay = model.config, [i for i in range(len(blocks)) if i not in gone]
    dense = getattr(config, "mlp_only_layers", None)
    if dense is not None:  # the numbers of layers without experts
        every = getattr(config, "decoder_sparse_step", 1)
        config.mlp_only_layers = [at for at, i in enumerate(stay) if i in dense or (i + 1) % every]
        config.decoder_sparse_step = 1
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = sum(i < config.first_k_dense_replace for i in stay)
    for key in ("layer_types", "mlp_layer_types", "no_rope_layers"):
        values = getattr(config, key, None)
        if isinstance(values, list) and len(values) == len(blocks):
            setattr(config, key, [x for i, x in enumerate(values) if i not in gone])
    config.num_hidden_layers = len(left)
    removed.counts["layers"] = len(blocks), len(left)


def _describe(model: Any, removed: Removed) -> None:
    """Write the new sizes into the config, so that `transformers` makes the same model."""
    config, names = model.config, {
        "heads": ("num_attention_heads",), "key and value heads": ("num_key_value_heads",),
        "channels": ("intermediate_size",), "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    }  # fmt: skip
    if "heads" in removed.counts:
        width = {x.head_dim for x in model.modules() if _has(x, ATTENTION)}
        config.head_dim = width.pop()  # which is hidden_size / heads no more
    for kind, (_, count) in removed.counts.items():
        for name in names.get(kind, ()):
            if hasattr(config, name):
                setattr(config, name, count)


def _check_described(model: Any) -> None:
    """Raise ValueError if the config does not say what is left: `transformers` would make another model."""
    with torch.device("meta"):
        said = type(model)(copy.deepcopy(model.config))
    shapes = {name: x.shape for name, x in said.named_parameters()}
    for name, x in model.named_parameters():
        if shapes.get(name) != x.shape:
            raise ValueError(f"the config of {type(model).__name__} cannot say that {name} is of {tuple(x.shape)}: "
                             "do not shrink what it belongs to")  # fmt: skip
