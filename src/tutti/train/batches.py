"""The batches of `tutti.Trainer`: the rows of a dataset in the order of `transformers.Trainer`, made by a collator.

An epoch's order is the permutation of accelerate's `SeedableRandomSampler`: `torch.randperm` of a generator with seed
`data_seed + epoch`. A microbatch is collated at once; the microbatches of a step are padded to one length and joined.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedModel
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.utils.import_utils import is_datasets_available

from tutti.train.arguments import rows_of_evaluation, rows_of_microbatch

PADS = {"labels": -100, "decoder_input_ids": 0, "special_tokens_mask": 1}  # other entries are padded with 0
EVERY = 8  # lengths are padded to multiples of this, or of an eighth of the next power of two if that is more


class Order:
    """The row numbers of each microbatch of an epoch: a batch sampler of torch.

    first: microbatches to leave out at the beginning of the next epoch that is read.
    """

    def __init__(self, dataset: Any, args: transformers.TrainingArguments, model_input: str | None):
        self.args, self.dataset, self.model_input = args, dataset, model_input
        self.rows, self.epoch, self.first = rows_of_microbatch(args), 0, 0

    def __len__(self) -> int:
        whole, rest = divmod(len(self.dataset), self.rows)
        return whole if self.args.dataloader_drop_last or not rest else whole + 1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order, first, self.first = self.order(), self.first, 0
        for i in range(first, len(self)):
            yield order[i * self.rows : (i + 1) * self.rows]

    def order(self) -> list[int]:
        """The order of all rows in this epoch."""
        args, n = self.args, len(self.dataset)
        if args.train_sampling_strategy == "sequential":
            return list(range(n))
        generator = torch.Generator().manual_seed(
            (args.seed if args.data_seed is None else args.data_seed) + self.epoch
        )
        if args.train_sampling_strategy == "group_by_length":
            known = is_dataset(self.dataset) and args.length_column_name in self.dataset.column_names
            return list(
                LengthGroupedSampler(
                    self.rows * args.gradient_accumulation_steps,
                    dataset=self.dataset,
                    lengths=list(self.dataset[args.length_column_name]) if known else None,
                    model_input_name=self.model_input,
                    generator=generator,
                )
            )
        return torch.randperm(n, generator=generator).tolist()


def training_loader(dataset: Any, collate: Callable, args: transformers.TrainingArguments,
                    model_input: str | None) -> DataLoader:  # fmt: skip
    """Microbatches to train on, over all processes."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return DataLoader(dataset, rows_of_microbatch(args), collate_fn=collate, drop_last=args.dataloader_drop_last,
                          **_workers(args))  # fmt: skip
    if len(dataset) == 0:
        raise ValueError("train_dataset is empty: there is nothing to train on")
    return DataLoader(dataset, batch_sampler=Order(dataset, args, model_input), collate_fn=collate, **_workers(args))


def evaluation_loader(dataset: Any, collate: Callable, args: transformers.TrainingArguments) -> DataLoader:
    """Batches to evaluate, over all processes, in the order of the dataset."""
    if hasattr(dataset, "__len__") and len(dataset) == 0:
        raise ValueError("the dataset to evaluate is empty")
    return DataLoader(dataset, rows_of_evaluation(args), collate_fn=collate, **_workers(args))


def _workers(args: transformers.TrainingArguments) -> dict[str, Any]:
    count = args.dataloader_num_workers
    known = {"num_workers": count, "pin_memory": args.dataloader_pin_memory and torch.cuda.is_available()}
    if count:
        known |= {"persistent_workers": args.dataloader_persistent_workers,
                  "prefetch_factor": args.dataloader_prefetch_factor}  # fmt: skip
    return known


def is_dataset(dataset: Any) -> bool:
    """Whether this is a map-style dataset of the library `datasets`."""
    if not is_datasets_available():
        return False
    import datasets

    return isinstance(dataset, datasets.Dataset)


def columns_of(model: torch.nn.Module, label_names: Sequence[str]) -> list[str] | None:
    """The columns of a dataset that a model reads; None for a module of the user's own that takes any."""
    inner = without_adapters(model)
    parameters = inspect.signature(inner.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and not isinstance(inner, PreTrainedModel):
        return None
    return [*parameters, "label", "label_ids", *label_names]


def without_adapters(model: Any) -> Any:
    """The model inside of one of peft."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def readable(dataset: Any, columns: Sequence[str], what: str) -> Any:
    """A dataset of `datasets` without the columns that the model does not read. Raises ValueError if none is left."""
    if not is_dataset(dataset):
        return dataset
    unread = [name for name in dataset.column_names if name not in columns]
    if len(unread) == len(dataset.column_names):
        raise ValueError(
            f"no column of the {what} dataset ({', '.join(unread)}) is an argument of the model's forward "
            f"({', '.join(columns[:8])}, ...); tokenize it first, give task=..., or give remove_unused_columns=False "
            "and a data_collator"
        )
    return dataset.remove_columns(unread)


class OnlyColumns:
    """A collator that drops the entries of rows that the model does not read."""

    def __init__(self, collate: Callable, columns: Sequence[str]):
        self.collate, self.columns = collate, frozenset(columns)

    def __call__(self, features: list[Any]) -> Any:
        if features and isinstance(features[0], dict):
            features = [{key: x for key, x in row.items() if key in self.columns} for row in features]
        return self.collate(features)


def joined(parts: Sequence[Mapping[str, Any]], pads: Mapping[str, int]) -> dict[str, Any]:
    """One batch of several: tensors are padded on the right to one shape and concatenated along dim 0."""
    batch = {}
    for key in parts[0]:
        values = [part[key] for part in parts]
        if not isinstance(values[0], torch.Tensor) or values[0].ndim == 0:
            batch[key] = values[0]
            continue
        if values[0].ndim > 1:
            lengths = [max(x.shape[1] for x in values)] * len(values)
            values = [padded(x, n, pads.get(key, PADS.get(key, 0))) for x, n in zip(values, lengths, strict=True)]
        batch[key] = torch.cat(values) if len(values) > 1 else values[0]
    return batch


def bucketed(batch: Mapping[str, Any], pads: Mapping[str, int], most: int | None,
             two_sequences: bool) -> dict[str, Any]:  # fmt: skip
    """Pad token sequences to one of a few lengths, so that few shapes are compiled.

    Only entries beside an `attention_mask` are padded: those of its length, and those of the decoder.

    most: no sequence is padded beyond this length. two_sequences: the model has an encoder and a decoder.
    """
    mask = batch.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        return dict(batch)
    made, length = dict(batch), mask.shape[1]
    tensors = [x for x in batch.values() if isinstance(x, torch.Tensor)]
    if any(x.is_floating_point() and x.ndim > 1 and x.shape[1] == length for x in tensors):  # sound, not tokens
        return made
    others = {"labels", "decoder_input_ids", "decoder_attention_mask"} if two_sequences else set()
    for key, x in batch.items():
        if isinstance(x, torch.Tensor) and x.ndim == 2 and (key in others or x.shape[1] == length):
            target = bucket(x.shape[1])
            if most is not None and x.shape[1] <= most:
                target = min(target, most)
            made[key] = padded(x, target, pads.get(key, PADS.get(key, 0)))
    return made


def bucket(length: int) -> int:
    """The length that sequences of a length are padded to: a multiple of an eighth of the next power of two."""
    every = max(EVERY, 1 << max(0, (length - 1).bit_length() - 3))
    return -(-length // every) * every


def padded(x: torch.Tensor, length: int, value: int) -> torch.Tensor:
    """Pad dim 1 on the right."""
    if x.shape[1] >= length:
        return x
    filler = x.new_full((x.shape[0], length - x.shape[1], *x.shape[2:]), value)
    return torch.cat([x, filler], 1)
