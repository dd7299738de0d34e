"""Rewards of completions: functions, models and texts that are checked, weighted and summed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import tutti
from tutti.align.arguments import positions_of
from tutti.align.sequences import batch_of
from tutti.exec.runtimes.runtime import from_rank_0


@dataclass
class Completed:
    """Completions of prompts that are to be scored.

    prompts, completions: texts, or lists of messages where the prompt is one. prompt_ids, completion_ids: their tokens.
    rows: the rows of the dataset, whose other columns functions may ask for.
    """

    prompts: list[Any]
    completions: list[Any]
    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    rows: Sequence[Mapping[str, Any]]


class ModelReward:
    """Rewards completions with the only output of a model, such as one that `RewardTrainer` has trained.

    model: model of `AutoModelForSequenceClassification`. tokenizer: tokenizer of prompts and completions, which the
    policy must share.
    """

    def __init__(self, model: Any, tokenizer: Any, batch: int = 32):
        if getattr(model.config, "num_labels", None) != 1:
            raise ValueError(f"a reward model has one output, and the model has {model.config.num_labels}")
        self.model, self.tokenizer, self.size = model.eval(), tokenizer, batch
        if model.config.pad_token_id is None:
            own = tokenizer.pad_token_id
            model.config.pad_token_id = own if own is not None else tokenizer.eos_token_id
        self.pad = model.config.pad_token_id  # by which the model finds the last token of a sequence
        self.__name__ = type(model).__name__
        self._function: Any = None

    def __call__(self, prompt_ids: list[list[int]], completion_ids: list[list[int]], **_: Any) -> list[float]:
        """The reward of each completion."""
        rows: list[dict[str, Any]] = []
        for prompt, completion in zip(prompt_ids, completion_ids, strict=True):
            ids = [*prompt, *completion]
            rows.append({"input_ids": ids, "labels": ids})
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]["input_ids"]))
        rewards = torch.zeros(len(rows))
        for at in range(0, len(order), self.size):
            part = order[at : at + self.size]
            batch = batch_of([rows[i] for i in part], self.pad, positions=positions_of(self.model))
            batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
            if self._function is None:
                self._function = tutti.function(self._score, batch, store=tutti.Store(model=self.model), plan="dp")
            rewards[part] = self._function(batch).float()
        return rewards.tolist()

    @torch.no_grad()
    def _score(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.model(**batch).logits[:, 0]


class Rewards:
    """Several rewards and their weights.

    functions: each is called with `prompts`, `completions`, `prompt_ids`, `completion_ids`, and the columns of the
    dataset, as far as it takes them, and returns a number for each completion, or None where it does not apply; or a
    model, for `ModelReward`. Functions are called by process 0 of a job, so that what differs from process to process,
    such as a test whose time is over, does not. weights: 1 by default.
    """

    def __init__(self, functions: Any, weights: Sequence[float] | None = None, tokenizer: Any = None):
        functions = functions if isinstance(functions, list | tuple) else [functions]
        if not functions:
            raise ValueError("there is no reward: give reward_funcs")
        self.functions: list[Any] = [ModelReward(x, tokenizer) if isinstance(x, nn.Module) else x for x in functions]
        self.names = _unique([getattr(x, "__name__", type(x).__name__) for x in self.functions])
        self.weights = torch.tensor([1.0] * len(functions) if weights is None else list(weights))
        if len(self.weights) != len(functions):
            raise ValueError(f"{len(self.weights)} reward_weights for {len(functions)} rewards")

    def __call__(self, completed: Completed) -> Tensor:
        """The rewards (rows, functions), float32; nan where one does not apply, or is no finite number.

        Raises ValueError, naming the function, for results of another length, or if none applies to a completion.
        """
        columns = []
        for name, function in zip(self.names, self.functions, strict=True):
            call = partial(function, **_arguments(function, completed))
            values = call() if isinstance(function, ModelReward) else from_rank_0(call)
            if values is None or len(values) != len(completed.completions):
                count = "nothing" if values is None else f"{len(values)} numbers"
                raise ValueError(f"reward {name} returned {count} for {len(completed.completions)} completions")
            try:
                numbers = torch.tensor([float("nan") if x is None else float(x) for x in values])
            except (TypeError, ValueError) as error:
                raise ValueError(f"reward {name} returned what is no number: {error}") from None
            columns.append(torch.where(numbers.isfinite(), numbers, torch.nan))
        return torch.stack(columns, 1)

    def measures(self) -> dict[str, float]:
        """Measures of the last completions, for the log, from rewards with a method `measures`."""
        return {f"rewards/{name}": x for function in self.functions if hasattr(function, "measures")
                for name, x in function.measures().items()}  # fmt: skip

    def total(self, rewards: Tensor) -> Tensor:
        """The weighted sum of those that apply, (rows); nan where none does."""
        total = (rewards * self.weights).nansum(1)
        return torch.where(rewards.isnan().all(1), torch.nan, total)


def _arguments(function: Any, completed: Completed) -> dict[str, Any]:
    """The arguments, among those available, that a function takes."""
    columns = {key: [x.get(key) for x in completed.rows] for key in dict.fromkeys(k for x in completed.rows for k in x)}
    arguments = {**columns, "prompts": completed.prompts, "completions": completed.completions,
             "prompt_ids": completed.prompt_ids, "completion_ids": completed.completion_ids}  # fmt: skip
    parameters = inspect.signature(function).parameters
    if any(x.kind is x.VAR_KEYWORD for x in parameters.values()):
        arguments.pop("prompt", None)
        return arguments
    missing = [x.name for x in parameters.values() if x.name not in arguments and x.default is x.empty]
    if missing:
        raise ValueError(f"reward {getattr(function, '__name__', function)} takes {', '.join(missing)}, which is no "
                         f"column; there are {', '.join(sorted(arguments))}")  # fmt: skip
    return {name: arguments[name] for name in parameters if name in arguments}


def _unique(names: Sequence[str]) -> list[str]:
    """Names, of which equal ones are numbered."""
    return [x if list(names).count(x) == 1 else f"{x}-{i}" for i, x in enumerate(names)]
