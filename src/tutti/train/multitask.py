"""Multi-task training: one encoder, a head for each task, and batches in which rows of several tasks are mixed.

Each row has the number of its task. All heads see all rows, and a row's logits are those of its task. So shapes do not
depend on the mixture, and one captured step trains all tasks under any plan. Afterwards `single` gives the model of
one task, for further training.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from tutti.tracing.batch import Batch
from tutti.train.values import Outputs, Row

NEVER = -1e4  # the logit of a class that a task does not have


class MultiTaskModel(nn.Module):
    """Sequence classifiers of several tasks over one encoder.

    model: a model of transformers whose body is the encoder, such as a masked language model that was trained before.
    tasks: name -> number of classes.
    """

    accepts_loss_kwargs = True

    def __init__(self, model: PreTrainedModel, tasks: Mapping[str, int]):
        super().__init__()
        if not tasks:
            raise ValueError("MultiTaskModel needs at least one task")
        self.config, self.tasks = model.config, dict(tasks)
        heads = {name: _classifier(model, classes) for name, classes in tasks.items()}
        first = next(iter(heads.values()))
        self.prefix = first.base_model_prefix
        self.body = getattr(first, self.prefix)
        self.body.load_state_dict(getattr(model, self.prefix).state_dict(), strict=False)
        for head in heads.values():
            setattr(head, self.prefix, _Said())
        self.heads = nn.ModuleDict(heads)
        self.most = max(tasks.values())

    def number(self, task: str) -> int:
        """The number of a task, for the entry `task` of its rows."""
        return list(self.tasks).index(task)

    def forward(self, task: Tensor, labels: Tensor | None = None, num_items_in_batch: Tensor | None = None,
                **inputs: Batch) -> SequenceClassifierOutput:  # fmt: skip
        """task: number of each row's task, (rows,) int64. labels: (rows,) int64. Logits: (rows, most classes)."""
        said = self.body(**inputs)
        logits_of_tasks = []
        for name, head in self.heads.items():
            getattr(head, self.prefix).said = said
            logits = head().logits
            logits_of_tasks.append(nn.functional.pad(logits, (0, self.most - self.tasks[name]), value=NEVER))
            getattr(head, self.prefix).said = None
        own = nn.functional.one_hot(task, len(logits_of_tasks)).to(logits_of_tasks[0].dtype)  # (rows, tasks)
        logits = (torch.stack(logits_of_tasks, 1) * own[:, :, None]).sum(1)
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
            loss = loss / (len(labels) if num_items_in_batch is None else num_items_in_batch)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    def single(self, task: str) -> PreTrainedModel:
        """A classifier of transformers for one task, with copies of the trained body and head."""
        model = cast(PreTrainedModel, copy.deepcopy(self.heads[task]))
        setattr(model, self.prefix, copy.deepcopy(self.body))
        return model


class _Said(nn.Module):
    """Stands for the body of a classifier: returns what the shared body said."""

    said: Outputs = None

    def forward(self, *args: object, **kwargs: object) -> Outputs:
        return self.said


def _classifier(model: PreTrainedModel, classes: int) -> PreTrainedModel:
    config = copy.deepcopy(model.config)
    config.num_labels = classes
    config.problem_type = "single_label_classification"
    return AutoModelForSequenceClassification.from_config(config)


def mixed(features: Mapping[str, Sequence[Row]], model: MultiTaskModel) -> list[Row]:
    """The features of all tasks, each with its task's number, as rows for a `tutti.Trainer`."""
    for name in features:
        if name not in model.tasks:
            raise ValueError(f"the model has no task {name!r}; it has {', '.join(model.tasks)}")
    return [{**row, "task": model.number(name)} for name, rows in features.items() for row in rows]
