"""The batches of `tutti.Trainer`: the rows of a dataset in the order of `transformers.Trainer`, made by a collator.

An epoch's order is the permutation of accelerate's `SeedableRandomSampler`: `torch.randperm` of a generator with seed
`data_seed + epoch`. A microbatch is collated at once; the microbatches of a step are padded to one length and joined.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import transformers
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedModel
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import has_length
from transformers.utils.import_utils import is_datasets_available

from tutti.data.buckets import PADDED, bucket
from tutti.train.trainer.arguments import rows_of_evaluation, rows_of_microbatch, seed_of_data
from tutti.train.values import Inputs, NamedValues, Rows


class Order:
    """The row numbers of each microbatch of an epoch: a batch sampler of torch.

    first: microbatches to leave out at the beginning of the next epoch that is read.
    """

    def __init__(self, dataset: Rows, args: transformers.TrainingArguments, model_input: str | None):
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
        generator = torch.Generator().manual_seed(seed_of_data(args) + self.epoch)
        if args.train_sampling_strategy == "group_by_length":
            has_lengths = is_dataset(self.dataset) and args.length_column_name in self.dataset.column_names
            return list(
                LengthGroupedSampler(
                    self.rows * args.gradient_accumulation_steps,
                    dataset=self.dataset,
                    lengths=list(self.dataset[args.length_column_name]) if has_lengths else None,
                    model_input_name=self.model_input,
                    generator=generator,
                )
            )
        return torch.randperm(n, generator=generator).tolist()


def training_loader(dataset: Rows, collate: Callable, args: transformers.TrainingArguments,
                    model_input: str | None) -> DataLoader:  # fmt: skip
    """Microbatches to train on, over all processes."""
    rows: Rows = dataset
    if isinstance(dataset, IterableDataset) or not has_length(dataset):
        return DataLoader(rows, rows_of_microbatch(args), collate_fn=collate, drop_last=args.dataloader_drop_last,
                          **_workers(args))  # fmt: skip
    if not len(rows):
        raise ValueError("train_dataset is empty: there is nothing to train on")
    return DataLoader(rows, batch_sampler=Order(dataset, args, model_input), collate_fn=collate, **_workers(args))


def evaluation_loader(dataset: Rows, collate: Callable, args: transformers.TrainingArguments) -> DataLoader:
    """Batches to evaluate, over all processes, in the order of the dataset."""
    rows: Rows = dataset
    if has_length(dataset) and not len(rows):
        raise ValueError("the dataset to evaluate is empty")
    return DataLoader(rows, rows_of_evaluation(args), collate_fn=collate, **_workers(args))


def _workers(args: transformers.TrainingArguments) -> NamedValues:
    count = args.dataloader_num_workers
    options = {"num_workers": count, "pin_memory": args.dataloader_pin_memory and torch.cuda.is_available()}
    if count:
        options |= {"persistent_workers": args.dataloader_persistent_workers,
                  "prefetch_factor": args.dataloader_prefetch_factor, "in_order": args.dataloader_in_order,
                  "multiprocessing_context": args.dataloader_multiprocessing_context}  # fmt: skip
    return options


def is_dataset(dataset: Rows) -> bool:
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


def without_adapters(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside of one of peft."""
    base = getattr(model, "get_base_model", None)
    return model if base is None else base()


def readable(dataset: Rows, columns: Sequence[str], what: str) -> Rows:
    """A dataset of `datasets` without the columns that the model does not read. Raises ValueError if none is left."""
    if not is_dataset(dataset):
        return dataset
    unread = [name for name in dataset.column_names if name not in columns]
    if len(unread) == len(dataset.column_names):
        raise _unread(what, unread, columns)
    return dataset.remove_columns(unread)


def _unread(what: str, unread: Iterable[str], columns: Sequence[str]) -> ValueError:
    return ValueError(
        f"no column of the {what} dataset ({', '.join(unread)}) is an argument of the model's forward "
        f"({', '.join(columns[:8])}, ...); tokenize it first, give task=..., or give remove_unused_columns=False "
        "and a data_collator"
    )


class Collator:
    """A collator that drops the entries of rows that the model does not read.

    columns: what it reads; None if rows have nothing else. what: the dataset, for errors.

    Raises ValueError if the model reads none, or if the rows have different lengths and the collator does not pad.
    """

    def __init__(self, collate: Callable, columns: Sequence[str] | None, what: str):
        self.collate, self.columns, self.what = collate, columns, what
        self.read = frozenset(columns or ())

    def __call__(self, features: Rows) -> NamedValues:
        if self.columns is not None and features and isinstance(features[0], dict):
            whole = features
            features = [{key: x for key, x in row.items() if key in self.read} for row in whole]
            if not features[0] and whole[0]:
                raise _unread(self.what, whole[0], self.columns)
        try:
            return self.collate(features)
        except ValueError as error:
            if uneven := _uneven(features):
                raise ValueError(f"rows of the {self.what} dataset have different lengths ({uneven}), which the "
                                 "data_collator does not pad: give processing_class=tokenizer, or a data_collator such "
                                 "as DataCollatorWithPadding(tokenizer)") from error  # fmt: skip
            raise


def _uneven(features: Rows) -> str:
    """The first entry of rows that is a list of different lengths, with two of them."""
    if not all(isinstance(row, dict) for row in features):
        return ""
    for key in features[0]:
        lengths = sorted({len(row[key]) for row in features if isinstance(row.get(key), list)})
        if len(lengths) > 1:
            return f"{key}: {lengths[0]} and {lengths[-1]}"
    return ""


def joined(parts: Sequence[NamedValues], pads: Mapping[str, int]) -> NamedValues:
    """One batch of several: tensors are padded at the ends of dims to one shape and concatenated along dim 0.

    Raises ValueError if token ids without an attention mask have different lengths, or if entries that are shared by
    all rows differ.
    """
    if len(parts) == 1:
        return dict(parts[0])
    batch = {}
    for key in parts[0]:
        values = [part[key] for part in parts]
        if isinstance(values[0], torch.Tensor) and values[0].ndim:
            sizes = [max(x.shape[d] for x in values) for d in range(1, values[0].ndim)]
            uneven = any(list(x.shape[1:]) != sizes for x in values)
            if uneven and key == "input_ids" and "attention_mask" not in parts[0]:
                raise ValueError(
                    "microbatches have sequences of different lengths and no attention_mask: use a collator that makes "
                    "one, or pad all rows to one length"
                )
            batch[key] = torch.cat([padded(x, sizes, pads.get(key, PADDED.get(key, 0))) for x in values])
        elif any(not _same(x, values[0]) for x in values):
            raise ValueError(f"the batch entry {key!r} differs between microbatches and has no rows: give it one value "
                             "for each row, as a tensor")  # fmt: skip
        else:
            batch[key] = values[0]
    return batch


def _same(a: object, b: object) -> bool:
    return bool(torch.equal(a, b)) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b


POSITIONS = {"start_positions", "end_positions"}  # labels that are positions of tokens


class Buckets:
    """Pads token sequences to one of a few lengths, so that few shapes are compiled.

    Nothing is padded before a second length occurs. Only entries beside an `attention_mask` are padded: those of its
    length, and those of the decoder. No two lengths of a batch become equal, and none becomes the number of classes,
    so that outputs can be cut again by their sizes. A loss over positions, as of question answering, counts padding
    too: batches with such labels stay as they are.
    """

    def __init__(self, config: object):
        self.most = getattr(config, "max_position_embeddings", None)
        self.two_sequences = bool(getattr(config, "is_encoder_decoder", False))
        self.classes = getattr(config, "num_labels", None)
        self.seen: set[int] = set()

    def __call__(self, batch: Inputs, pads: Mapping[str, int]) -> NamedValues:
        mask, padded_batch = batch.get("attention_mask"), dict(batch)
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or POSITIONS & batch.keys():
            return padded_batch
        length = mask.shape[1]
        tensors = [x for x in batch.values() if isinstance(x, torch.Tensor)]
        if any(x.is_floating_point() and x.ndim > 1 and x.shape[1] == length for x in tensors):  # sound, not tokens
            return padded_batch
        others = {"labels", "decoder_input_ids", "decoder_attention_mask"} if self.two_sequences else set()
        targets: dict[int, int] = {}
        for key, x in batch.items():
            if not isinstance(x, torch.Tensor) or x.ndim != 2 or x.is_floating_point():
                continue
            if key in others or x.shape[1] == length:
                self.seen.add(x.shape[1] if key not in others else -x.shape[1])
                if x.shape[1] not in targets:
                    targets[x.shape[1]] = self.target(x.shape[1], {*targets.values(), self.classes})
                padded_batch[key] = padded(x, [targets[x.shape[1]]], pads.get(key, PADDED.get(key, 0)))
        return padded_batch

    def target(self, length: int, taken: set[int | None]) -> int:
        """The length that sequences of a length are padded to."""
        if sum(n > 0 for n in self.seen) < 2 and sum(n < 0 for n in self.seen) < 2:
            return length
        size = bucket(length)
        while size in taken:
            size = bucket(size + 1)
        return length if self.most is not None and size > self.most else size


def padded(x: torch.Tensor, sizes: Sequence[int], value: int) -> torch.Tensor:
    """Pad dims 1, 2, ... at their ends to some sizes."""
    gaps = [size - n for size, n in zip(sizes, x.shape[1:], strict=False)]
    if not any(gaps):
        return x
    rest = x.ndim - 1 - len(gaps)
    return torch.nn.functional.pad(x, [0, 0] * rest + [n for gap in reversed(gaps) for n in (0, gap)], value=value)
