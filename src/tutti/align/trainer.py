"""Base of all alignment trainers: model, data, and the log of measures of the losses."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tutti.align.arguments import (
    AlignArguments,
    adapters_in,
    longest_of,
    pad_of,
    positions_of,
    pretrained,
    without_dropout,
)
from tutti.align.chat import Encoder, Tokens
from tutti.align.sequences import IGNORED, cut, remainder
from tutti.compat.adapters import peft_model
from tutti.data import Mapped, StreamingSource, open_source
from tutti.train.trainer.trainer import Trainer


class AlignTrainer(Trainer):
    """A `tutti.Trainer` whose loss has measures, and whose data is texts or conversations.

    Subclasses define `features` (a row of the dataset to what `collate` takes), `collate` and `losses`.

    model: model of transformers or of peft, or a name or folder for `from_pretrained`. peft_config: adapters to add,
    which alone are trained. processing_class: the tokenizer; by default that of the model's folder.
    """

    args: AlignArguments

    equal_items = True
    arguments: type[AlignArguments] = AlignArguments
    auto_class = "AutoModelForCausalLM"
    config_options: Mapping[str, Any] = {}  # of the config of a model that is loaded

    def __init__(
        self,
        model: nn.Module | str,
        args: AlignArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        peft_config: Any = None,
        **options: Any,
    ):
        args = self.arguments("trainer_output") if args is None else args
        if not isinstance(args, self.arguments):
            raise ValueError(f"args is a {type(args).__name__}; {type(self).__name__} takes {self.arguments.__name__}")
        self.args, loaded = args, self._loaded(model)
        self.tokenizer = _tokenizer(processing_class, model if isinstance(model, str) else loaded)
        if peft_config is not None:
            if isinstance(model, str) and adapters_in(model):
                raise ValueError(f"{model} has adapters, and new ones cannot stand on them, as no file has their base: "
                                 "train without peft_config ([lora]), which merges them, or save the merged model "
                                 "(merge_and_unload of peft)")  # fmt: skip
            loaded = peft_model(loaded, peft_config)
        if args.disable_dropout:
            without_dropout(loaded)
        self.encoder = Encoder(self.tokenizer)
        self.pad, self.longest = pad_of(args, self.tokenizer), longest_of(args, loaded)
        self.positions = positions_of(loaded)
        self.measured: list[dict[str, Tensor]] = []  # since the last log
        self.names: tuple[str, ...] = ()  # of the measures
        self.cuts, self.counts_cuts, self._warned = 0, False, False  # sequences that were cut, and how that is reported
        both = [None if x is None else self.rows(x, args) for x in (train_dataset, eval_dataset)]
        super().__init__(loaded, args, lambda rows: self.collate(rows), both[0], both[1], self.tokenizer, **options)
        self.compute_metrics = self.compute_metrics or self._means

    def _loaded(self, model: nn.Module | str) -> nn.Module:
        if not isinstance(model, str):
            return model
        import transformers

        return pretrained(getattr(transformers, self.auto_class), model, dtype="auto", **self.config_options)

    # -- to be defined ---------------------------------------------------------------------------------------------

    def features(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a row of the dataset to the entries that `collate` takes."""
        raise NotImplementedError

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """The batch of some features."""
        raise NotImplementedError

    def losses(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, 0-d, and measures, a number for each row (rows). It is captured: it computes with tensors."""
        raise NotImplementedError

    # -- parts -----------------------------------------------------------------------------------------------------

    def rows(self, dataset: Any, args: Any) -> Any:
        """The features of a dataset, made when they are read; or of each of a dict of datasets."""
        if isinstance(dataset, dict):
            return {name: self.rows(x, args) for name, x in dataset.items()}
        source = open_source(dataset)
        if isinstance(source, StreamingSource):
            raise ValueError(f"{type(self).__name__} needs rows by index: give a dataset with a length")
        if not len(source):
            raise ValueError("the dataset is empty")
        return Mapped(source, self.features)

    def encoder_of(self, row: Mapping[str, Any]) -> Encoder:
        """The encoder of a row, whose `tools` and `chat_template_kwargs` the chat template gets."""
        if not (row.get("tools") or row.get("chat_template_kwargs")):
            return self.encoder
        return Encoder(self.tokenizer, row.get("tools"), row.get("chat_template_kwargs") or {})

    def remainder(self, count: int) -> slice:
        """Slice of a sequence of `count` tokens that is kept. Warns of the first cut, unless cuts are counted."""
        if self.longest is not None and count > self.longest:
            self.cuts += 1
            if not self.counts_cuts:
                self._warn_of_cuts(f"a sequence of {count} tokens is cut to {self.longest}, as are others")
        return remainder(count, self.longest, self.args.keep)

    @contextmanager
    def counting_cuts(self, rows: int) -> Iterator[None]:
        """Within, each of some rows is read once; the warning has the number of sequences that are cut."""
        self.cuts, self.counts_cuts = 0, True
        try:
            yield
        finally:
            self.counts_cuts = False
        if self.cuts:
            self._warn_of_cuts(f"{self.cuts} sequences of {rows} rows are cut to {self.longest} tokens")

    def _warn_of_cuts(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"{what}: raise max_length, up to the model's positions, if that is not wanted", stacklevel=3)

    def cut(self, tokens: Tokens) -> dict[str, list[int]]:
        """A row for `sequences.batch_of`, of at most the longest length."""
        self.remainder(len(tokens.ids))  # warns
        return cut(tokens.ids, tokens.learned, self.longest, self.args.keep)

    def cut_pair(self, tokens: Tokens, completion: str) -> dict[str, list[int]]:
        """A prompt and its completion as `cut` has it. Raises ValueError if nothing is left of the completion."""
        row = self.cut(tokens)
        if all(x == IGNORED for x in row["labels"]):
            raise ValueError(f"the prompt fills all {self.longest} tokens, so nothing is left of {completion}: raise "
                             "max_length, give truncation_mode='keep_end', or leave the row out")  # fmt: skip
        return row

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False,
                     num_items_in_batch: Tensor | None = None) -> Any:  # fmt: skip
        """The loss with its measures while it trains; in evaluation those are the outputs, if they are wanted."""
        loss, measures = self.losses(model, inputs)
        self.names = tuple(measures)
        if model.training or return_outputs:
            return loss, measures
        return loss

    # -- evaluation ------------------------------------------------------------------------------------------------

    def evaluate(self, eval_dataset: Any = None, ignore_keys: list[str] | None = None,
                 metric_key_prefix: str = "eval") -> dict[str, float]:  # fmt: skip
        """Loss and measures of `eval_dataset`, rows as those of the constructor; or of each of a dict of datasets."""
        chosen, metrics = self.held_out(eval_dataset), {}
        for name, rows in chosen.items() if isinstance(chosen, dict) else [("", chosen)]:
            metrics |= self.evaluate_rows(rows, ignore_keys, f"{metric_key_prefix}_{name}".removesuffix("_"))
        return metrics

    def evaluate_rows(self, rows: Any, ignore_keys: list[str] | None, prefix: str) -> dict[str, float]:
        """Loss and measures of the features of a dataset, under names that begin with a prefix."""
        return super().evaluate(rows, ignore_keys, prefix)

    def predict(self, test_dataset: Any, ignore_keys: list[str] | None = None,
                metric_key_prefix: str = "test") -> Any:  # fmt: skip
        """Measures of each row of a dataset, and their means."""
        return super().predict(self.held_out(test_dataset), ignore_keys, metric_key_prefix)

    def held_out(self, dataset: Any) -> Any:
        """The features of a dataset to evaluate, or of each of a dict. None: `eval_dataset`; a text: one of its dict.

        Raises ValueError if there is none.
        """
        own = self.eval_dataset
        named = own if isinstance(own, dict) else {}
        if isinstance(dataset, str) and dataset not in named:
            raise ValueError(f"eval_dataset has no dataset {dataset!r}; it has {', '.join(named) or 'no names'}")
        chosen = own if dataset is None else named[dataset] if isinstance(dataset, str) else dataset
        if chosen is None:
            raise ValueError(f"{type(self).__name__}: evaluation needs an eval_dataset")
        prepared = any(chosen is x for x in (own, self.train_dataset, *named.values()))
        return chosen if prepared else self.rows(chosen, self.args)

    def run_step(self, batch: dict[str, Any]) -> Tensor:
        """Train on the batch of a step. Its measures are averaged in the next log."""
        loss = super().run_step(batch)
        assert self.step is not None
        self.measured.append({name: x.detach().float().nanmean() for name, x in self.step.metrics.items()})
        return loss

    def prediction_step(self, model: nn.Module, inputs: Any, prediction_loss_only: bool,
                        ignore_keys: Any = None) -> tuple[Any, Any, Any]:  # fmt: skip
        """(loss, measures, zeros) of a batch: measures need no labels, whose lengths differ from batch to batch."""
        loss, measures, _ = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        return loss, measures, None if measures is None else torch.zeros(len(inputs["input_ids"]))

    def _means(self, prediction: Any) -> dict[str, float]:
        """The means of the measures of an evaluation."""
        measures = prediction.predictions if isinstance(prediction.predictions, tuple) else (prediction.predictions,)
        return {name: float(np.nanmean(x)) for name, x in zip(self.names, measures, strict=True)}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log numbers, and the means of what was measured in the steps since the last log."""
        if "loss" in logs and self.measured:
            logs |= averages(self.measured)
            self.measured = []
        super().log(logs, start_time)


def averages(measured: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """The mean of each measure over the steps that have it and where it is a number."""
    means = {}
    for name in dict.fromkeys(x for each in measured for x in each):
        values = torch.stack([x[name] for x in measured if name in x])
        values = values[values.isfinite()]
        means[name] = float(values.mean()) if len(values) else float("nan")
    return means


def _tokenizer(tokenizer: Any, model: Any) -> Any:
    from transformers import AutoTokenizer

    if tokenizer is not None:
        return tokenizer
    place = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", "")
    if not place:
        raise ValueError("the model has no folder with a tokenizer: give processing_class")
    return AutoTokenizer.from_pretrained(place, trust_remote_code=False)
