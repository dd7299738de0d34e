"""The loss of `tutti.Trainer`, as `tutti.parallelize` captures it.

The loss of a step is the mean over all items (labels other than -100) of all ranks and microbatches. Models of
transformers that read `num_items_in_batch` divide the sum of a microbatch by it. For others, the mean of a microbatch
is weighted with its number of items.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from transformers import masking_utils

from tutti.train.values import Inputs, NamedValues, Outputs

if TYPE_CHECKING:
    from tutti.train.trainer.trainer import Trainer

ITEMS = "num_items_in_batch"
IGNORED = -100  # the label of positions without loss
PLAIN = (bool, int, float, str, type(None))


class Objective:
    """`loss(model, batch)` of a Trainer: the loss, and in evaluation mode the model's outputs if they are `wanted`.

    The Trainer is referenced weakly, so that capture does not watch its state. read: attributes of the Trainer that a
    `compute_loss` of the user's own names; a change of one captures the step again.
    """

    structure: pytree.TreeSpec | None

    def __init__(self, trainer: Trainer):
        self._reference = weakref.ref(trainer)
        self.wanted, self.structure = False, None
        self.ignored: tuple[str, ...] = ()  # outputs that nobody wants
        self.read: NamedValues = {}
        self._names = _read_by(type(trainer)) | frozenset(_names(trainer.compute_loss_func))

    def _trainer(self) -> Trainer:
        trainer = self._reference()
        assert trainer is not None
        return trainer

    def look(self) -> None:
        """Read what the loss depends on besides the batch."""
        trainer = self._trainer()
        attributes = vars(trainer) | {"global_step": trainer.state.global_step, "epoch": trainer.state.epoch}
        self.read.update(
            {name: attributes[name] for name in self._names & attributes.keys() if isinstance(attributes[name], PLAIN)}
        )

    def __call__(self, model: nn.Module, batch: NamedValues) -> Outputs:
        trainer, inputs = self._trainer(), dict(batch)
        items = inputs.pop(ITEMS, None)
        if model.training or not self.wanted:
            return trainer.compute_loss(model, inputs, num_items_in_batch=items)
        loss, outputs = trainer.compute_loss(model, inputs, return_outputs=True, num_items_in_batch=items)
        return loss, self.named(outputs, inputs, trainer)

    def named(self, outputs: Outputs, inputs: Inputs, trainer: Trainer) -> dict[str, Tensor]:
        """The tensors of the outputs besides the loss, by number. `structured` is the inverse."""
        if isinstance(outputs, Mapping):
            logits = tuple(x for key, x in outputs.items() if key not in ("loss", *self.ignored))
        else:
            logits = tuple(outputs[1:])
        logits = logits[0] if len(logits) == 1 else logits
        if trainer.preprocess_logits_for_metrics is not None:
            labels = labels_of(inputs, trainer.label_names)
            logits = trainer.preprocess_logits_for_metrics(logits, labels)
        leaves, self.structure = pytree.tree_flatten(logits)
        return {str(i): x for i, x in enumerate(leaves) if isinstance(x, Tensor)}

    def structured(self, named: Mapping[str, Tensor]) -> Outputs:
        """The outputs of the model from tensors by number."""
        assert self.structure is not None
        leaves = [named.get(str(i)) for i in range(self.structure.num_leaves)]
        return pytree.tree_unflatten(leaves, self.structure)


def computed(trainer: Trainer, model: nn.Module, inputs: NamedValues, items: Tensor | None) -> tuple[Tensor, Outputs]:
    """The loss and the outputs of a model, as `transformers.Trainer.compute_loss` defines them."""
    labels = None
    if (trainer.label_smoother is not None or trainer.compute_loss_func is not None) and "labels" in inputs:
        labels = inputs.pop("labels")
    extra = {ITEMS: items} if trainer.model_accepts_loss_kwargs and items is not None else {}
    with Reads(items) as reads, unpacked(inputs):
        outputs = model(**inputs, **extra)
        if trainer.compute_loss_func is not None:
            loss = trainer.compute_loss_func(outputs, labels, num_items_in_batch=items)
        elif trainer.label_smoother is not None and labels is not None:
            shifts = {"shift_labels": True} if trainer.shifts_labels else {}
            loss = trainer.label_smoother(outputs, labels, num_items_in_batch=items, **shifts)
        elif isinstance(outputs, Mapping) and "loss" not in outputs:
            raise ValueError(
                f"the model returned no loss, only {', '.join(outputs)}; it read {', '.join(inputs)}. Models compute a "
                "loss from labels: name the column that has them `labels`, or give compute_loss_func"
            )
        else:
            loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
    targets = inputs.get("labels") if labels is None else labels
    if items is not None and not reads.seen and _has_a_loss_for_each(targets, outputs):
        loss = loss * (count(targets, trainer.shifts_labels) / items)  # pyright: ignore[reportArgumentType]
    return loss, outputs


@contextmanager
def unpacked(inputs: Inputs) -> Iterator[None]:
    """Let models of transformers compute with sequences that are not packed, unless the batch has `position_ids`.

    Without a cache and a mask they look for packed sequences in the positions that they made themselves. A capture has
    no values to find that there are none, so it would contain a mask, and attention that reads it.
    """
    before = masking_utils.find_packed_sequence_indices
    if "position_ids" not in inputs:
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = before


def _has_a_loss_for_each(labels: object, outputs: Outputs) -> bool:
    """Whether the loss is the mean over labels: each has logits of its own."""
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else None
    if not (isinstance(labels, Tensor) and isinstance(logits, Tensor)) or labels.is_floating_point():
        return False
    return logits.shape[:-1] == labels.shape


def count(labels: Tensor, shifted: bool) -> Tensor:
    """The number of labels with a loss, 0-d int64. shifted: the first of each row has none."""
    return labels[..., 1:].ne(IGNORED).sum() if shifted else labels.ne(IGNORED).sum()


def items_of(batch: Inputs, shifted: bool, parts: int) -> dict[str, Tensor]:
    """The entry of a batch that says by how many items the loss of each of its `parts` microbatches is divided."""
    labels = batch.get("shift_labels", batch.get("labels"))
    if not isinstance(labels, Tensor):
        return {}
    number = count(labels, shifted and "shift_labels" not in batch)
    return {ITEMS: number.to(torch.float32) / parts}


def labels_of(inputs: Inputs, names: list[str]) -> object:
    """The labels in a batch: a tensor, a tuple if there are several, or None."""
    labels = tuple(inputs.get(name) for name in names)
    if not labels or any(x is None for x in labels):
        return None
    return labels[0] if len(labels) == 1 else labels


class Reads(TorchFunctionMode):
    """Notices whether an operation reads a tensor."""

    def __init__(self, tensor: Tensor | None):
        super().__init__()
        self.tensor, self.seen = tensor, False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if self.tensor is not None and any(x is self.tensor for x in (*args, *(kwargs or {}).values())):
            self.seen = True
        return func(*args, **(kwargs or {}))


def accepts_loss_kwargs(model: nn.Module) -> bool:
    """Whether forward takes `num_items_in_batch`, as `transformers.Trainer` finds out."""
    if hasattr(model, "accepts_loss_kwargs"):
        return bool(model.accepts_loss_kwargs)
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())


def shifts_labels(model: nn.Module) -> bool:
    """Whether the model's loss compares logits with the labels of the next position."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    kind = LOSS_MAPPING.get(getattr(model, "loss_type", None))  # pyright: ignore[reportArgumentType]
    return kind is ForCausalLMLoss and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)


def _read_by(kind: type) -> frozenset[str]:
    """Names in a `compute_loss` of the user's own, in those it inherits, and in methods that these name."""
    names: set[str] = set()
    todo = ["compute_loss"]
    while todo:
        name = todo.pop()
        for base in kind.__mro__:
            new = set(_names(vars(base).get(name))) - names
            names |= new
            todo += new
    return frozenset(names)


def _names(function: object) -> tuple[str, ...]:
    code = getattr(function, "__code__", None)
    return () if code is None or function.__module__ == "tutti.train.trainer.trainer" else code.co_names
