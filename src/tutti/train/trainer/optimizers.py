"""The optimizer of `tutti.Trainer`: parameter groups, and optimizers that transformers has no name for."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection
from typing import cast

import torch
import transformers
from torch import nn
from torch.optim import Optimizer

from tutti.optim import AdamW8bit, Lamb, Lion, Muon
from tutti.optim.groups import layers_to_head
from tutti.optim.muon import hidden_matrices
from tutti.train.values import NamedValues, Row

OPTIMIZERS = {"muon": Muon, "lion": Lion, "lamb": Lamb, "adamw8bit": AdamW8bit}
"""Values of `TrainingArguments.optim` beyond those of transformers."""


def class_and_options(
    args: transformers.TrainingArguments, model: nn.Module | None = None
) -> tuple[type[Optimizer], NamedValues]:
    """The class and the options of `args.optim`. `args.optim_args` are as in a call: "ns_dtype=torch.float32"."""
    kind = OPTIMIZERS.get(args.optim)
    if kind is None:
        try:
            return transformers.Trainer.get_optimizer_cls_and_kwargs(
                args, cast(transformers.PreTrainedModel | None, model)
            )
        except (ImportError, ValueError) as error:
            name = str(getattr(args.optim, "value", args.optim))
            if "8bit" not in name and "bnb" not in name:
                raise
            raise ValueError(f"optim={name!r} is one of bitsandbytes; use 'adamw8bit', or one of "
                             f"{', '.join(map(repr, OPTIMIZERS))}") from error  # fmt: skip
    parameters = inspect.signature(kind).parameters
    options = {"lr": args.learning_rate}
    if "eps" in parameters:  # an Adam
        options |= {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    arguments = _called_with(args.optim_args or "")
    if unknown := sorted(arguments.keys() - parameters.keys()):
        has = ", ".join(list(parameters)[1:])
        raise ValueError(f"optim_args: {kind.__name__} has no option {unknown[0]!r}; it has {has}")
    return kind, options | arguments


def _called_with(text: str) -> NamedValues:
    """The keyword arguments of a call."""
    try:
        call = ast.parse(f"_({text})", mode="eval").body
        assert isinstance(call, ast.Call) and not call.args
        return {str(x.arg): _value(x.value) for x in call.keywords}
    except (SyntaxError, ValueError, AssertionError, AttributeError):
        raise ValueError(f'optim_args is {text!r}; write "name=value, name=value"') from None


def _value(node: ast.expr) -> object:
    """A Python literal, or `torch.float32` and the like."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
        return getattr(torch, node.attr)
    return ast.literal_eval(node)


def parameter_groups(
    model: nn.Module,
    decayed: Collection[str],
    weight_decay: float,
    lr: float,
    layer_decay: float | None = None,
    muon: bool = False,
) -> list[Row]:
    """The trained parameters by weight decay, by layer if `layer_decay` is given, and with `use_muon` for `muon`.

    decayed: names of parameters with weight decay.
    layer_decay: multiplies the learning rate once for each layer between a parameter and the head, as in
        `tutti.optim.groups`. The first group is the one nearest to the head.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if layer_decay is not None and not 0 < layer_decay <= 1:
        raise ValueError(f"layerwise_lr_decay is {layer_decay!r}; it must be more than 0 and at most 1")
    depths = {} if layer_decay is None else layers_to_head([name for name, _ in model.named_parameters()])
    matrices = hidden_matrices(model) if muon else set()
    groups: dict[tuple, NamedValues] = {}
    for name, p in trained:
        key = depths.get(name, 0), name not in decayed, name not in matrices
        if key not in groups:
            groups[key] = {"params": [], "weight_decay": weight_decay if name in decayed else 0.0}
            if muon:
                groups[key]["use_muon"] = name in matrices
            if layer_decay is not None:
                groups[key]["lr"] = lr * layer_decay ** depths[name]
        groups[key]["params"].append(p)
    return [groups[key] for key in sorted(groups)]
