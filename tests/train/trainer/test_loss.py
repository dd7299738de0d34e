"""The loss of a Trainer, and the outputs beside it."""

from types import SimpleNamespace

import pytest
import torch

from tutti.train.trainer.loss import Objective


class Trainer:
    compute_loss_func = None


@pytest.mark.parametrize("outputs", [1, 2])
def test_outputs_of_a_tuple_are_those_behind_the_loss(outputs):
    owner = Trainer()
    objective = Objective(owner)
    values = tuple(torch.randn(2) for _ in range(outputs))
    settings = SimpleNamespace(preprocess_logits_for_metrics=None, label_names=[])
    named = objective.named((torch.tensor(1.0), *values), {}, settings)
    assert list(named) == [str(i) for i in range(outputs)]
    structured = objective.structured(named)
    assert all(torch.equal(x, y) for x, y in zip(structured if outputs > 1 else [structured], values, strict=True))
