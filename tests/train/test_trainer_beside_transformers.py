"""What a user of `transformers.Trainer` sees, there and here: the same calls on both, and equal results."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import tutti

BOTH = [(transformers.Trainer, transformers.TrainingArguments), (tutti.Trainer, tutti.TrainingArguments)]
X = np.random.default_rng(0).normal(size=64).astype("float32")
ROWS = [{"x": x, "labels": np.float32(2 * x + 3)} for x in X]


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.config = nn.Parameter(torch.tensor(0.0)), nn.Parameter(torch.tensor(0.0)), None

    def forward(self, x, labels=None):
        y = x * self.a + self.b
        return (y,) if labels is None else (nn.functional.mse_loss(y, labels), y)


@pytest.fixture(params=BOTH, ids=["transformers", "tutti"])
def make(request, tmp_path):
    kind, arguments = request.param

    def trainer_of(model=None, callbacks=(), rows=ROWS, folder=tmp_path, compute_metrics=None, **options):
        options = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "max_steps": 4,
                   "per_device_train_batch_size": 8, "learning_rate": 0.2, "logging_steps": 1} | options  # fmt: skip
        own = {"level": "O0", "cluster": "cpu:1"} if kind is tutti.Trainer else {}
        return kind(model or Line(), arguments(str(folder), **own, **options), train_dataset=rows, eval_dataset=rows,
                    callbacks=list(callbacks), compute_metrics=compute_metrics)  # fmt: skip

    return trainer_of


def rates(trainer):
    return [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]


def test_the_best_is_only_known_with_a_metric(make):
    with pytest.raises(ValueError, match="metric_for_best_model"):
        make(save_strategy="best", eval_strategy="steps", eval_steps=2)


def test_smoothing_is_left_out_where_rows_have_several_labels(make):
    config = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
                        num_labels=3, problem_type="multi_label_classification", hidden_dropout_prob=0.0,
                        attention_probs_dropout_prob=0.0)  # fmt: skip
    torch.manual_seed(0)
    model = BertForSequenceClassification(config)
    rows = [{"input_ids": [1, 2, 3], "labels": [1.0, 0.0, 1.0]}] * 16
    loss = model(torch.tensor([[1, 2, 3]] * 16), labels=torch.tensor([[1.0, 0.0, 1.0]] * 16)).loss.item()
    with pytest.warns(UserWarning, match="(?i)label.smoothing"):
        trainer = make(model, rows=rows, label_smoothing_factor=0.1)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-5)


def test_predictions_are_returned_where_metrics_are_taken_by_batch(make):
    counts = []

    def rows_so_far(prediction, compute_result):
        counts.append(len(prediction.predictions))
        return {"rows": sum(counts)} if compute_result else {}

    trainer = make(batch_eval_metrics=True, compute_metrics=rows_so_far)
    output = trainer.predict(ROWS)
    assert output.predictions.shape == output.label_ids.shape == (64,) and output.metrics["test_rows"] == 64
    with pytest.raises(ValueError, match="compute_result"):
        make(batch_eval_metrics=True, compute_metrics=lambda prediction: {})


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("greedy", {"patience": 1, "factor": 0.5}, [0.2, 0.2, 0.4]),
        ("reduce_lr_on_plateau", {"patience": 0, "threshold": 1.0}, [0.2, 0.02, 0.002]),
    ],
)
def test_schedules_that_follow_a_metric(make, name, options, expected):
    trainer = make(lr_scheduler_type=name, lr_scheduler_kwargs=options, eval_strategy="epoch", max_steps=-1,
                   num_train_epochs=3, logging_strategy="epoch", metric_for_best_model="eval_loss")  # fmt: skip
    trainer.train()
    assert rates(trainer) == pytest.approx(expected)


def test_the_schedule_stays_after_training_and_a_second_run_has_its_own(make):
    trainer = make(lr_scheduler_type="linear")
    trainer.train()
    assert {*trainer.lr_scheduler.get_last_lr()} == {*trainer.get_learning_rates()} == {0.0}
    first = rates(trainer)
    trainer.train()
    assert rates(trainer) == pytest.approx(first)


def test_numbers_of_a_trainer(make):
    trainer = make(gradient_accumulation_steps=2)
    trainer.create_optimizer()
    assert trainer.get_num_trainable_parameters() == 2 and trainer.model_wrapped is trainer.model
    assert trainer.get_total_train_batch_size(trainer.args) == 16
    assert sum(map(len, trainer.get_optimizer_group())) == 2
    assert any(x is trainer.model.a for x in trainer.get_optimizer_group(trainer.model.a)["params"])

    class Loader:  # without `dataset`
        def __len__(self):
            return 3

    assert trainer.num_examples(Loader()) == 24


def test_what_a_trainer_has_not_says_what_to_use(tmp_path):
    trainer = tutti.Trainer(Line(), tutti.TrainingArguments(str(tmp_path), report_to="none", use_cpu=True))
    assert not hasattr(trainer, "accelerator")
    with pytest.raises(AttributeError, match="has no hyperparameter_search: call train"):
        trainer.hyperparameter_search()
    with pytest.raises(AttributeError, match="Trainer has no attribute 'nonsense'"):
        _ = trainer.nonsense


def test_arguments_that_differ_from_those_of_a_checkpoint(tmp_path):
    def trainer_of(**options):
        arguments = tutti.TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, disable_tqdm=True,
                                            save_strategy="steps", level="O0", **options)  # fmt: skip
        return tutti.Trainer(Line(), arguments, train_dataset=ROWS)

    trainer_of(save_steps=2, max_steps=2).train()
    with pytest.warns(UserWarning, match="of a run with other arguments: save_steps was 2 and is 3"):
        trainer_of(save_steps=3, max_steps=3).train(resume_from_checkpoint=True)
