"""`transformers.Trainer` and `tutti.Trainer` with the same options: equal logs, events, checkpoints and models."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import tutti

X = np.random.default_rng(0).normal(size=40).astype("float32")
ROWS = [{"x": x, "labels": np.float32(2 * x + 3)} for x in X]
TIMES = ("runtime", "per_second", "total_flos")


class Line(nn.Module):
    """y = a x + b. double: a second output."""

    def __init__(self, a=0.0, b=0.0, double=False):
        super().__init__()
        self.a, self.b, self.double = nn.Parameter(torch.tensor(a)), nn.Parameter(torch.tensor(b)), double
        self.config = None

    def forward(self, x, labels=None):
        y = x * self.a + self.b
        outputs = (y, y + 1) if self.double else (y,)
        return outputs if labels is None else (nn.functional.mse_loss(y, labels), *outputs)


class Events(transformers.TrainerCallback):
    """The names of events, with the step."""

    def __init__(self):
        self.seen: list = []

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def note(args, state, control, **rest):
            self.seen.append((name, state.global_step))

        return note


class Stop(transformers.TrainerCallback):
    """Changes the control at an event."""

    def __init__(self, event, step, **changes):
        self.changes = changes

        def act(args, state, control, **rest):
            if state.global_step >= step:
                for name, value in changes.items():
                    setattr(control, name, value)
            return control

        setattr(self, event, act)


def mean_error(prediction):
    outputs = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    return {"error": float(np.abs(outputs - prediction.label_ids).mean()), "rows": len(outputs)}


class Streamed(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(ROWS)


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def scheduled(model):
    optimizer = sgd(model)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


class OwnLoss:
    """A Trainer with a loss of its own."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(x=inputs["x"])
        loss = (outputs[0] - inputs["labels"]).abs().mean()
        return (loss, {"loss": loss, "y": outputs[0]}) if return_outputs else loss


def absolute(outputs, labels, num_items_in_batch=None):
    return (outputs[0] - labels).abs().sum()


def frozen():
    model = Line()
    model.b.requires_grad_(False)
    return model


STEPS = {"max_steps": 6}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
BEST = {**EVALUATED, "save_steps": 2, "load_best_model_at_end": True}
CASES = {
    "nothing": {},
    "epochs": {"num_train_epochs": 2},
    "part of an epoch": {"num_train_epochs": 1.5},
    "steps beyond epochs": {"max_steps": 13, "num_train_epochs": 1},
    "drop_last": {"num_train_epochs": 2, "per_device_train_batch_size": 16, "dataloader_drop_last": True},
    "last batch is smaller": {"num_train_epochs": 2, "per_device_train_batch_size": 16},
    "accumulation": {"num_train_epochs": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3},
    "accumulation of whole steps": {**STEPS, "gradient_accumulation_steps": 2},
    "clipping": {**STEPS, "max_grad_norm": 0.1},
    "no clipping": {**STEPS, "max_grad_norm": 0.0},
    "seed": {**STEPS, "seed": 7},
    "data_seed": {**STEPS, "data_seed": 7},
    "weight decay": {**STEPS, "weight_decay": 0.3},
    "betas": {**STEPS, "adam_beta1": 0.5, "adam_beta2": 0.7, "adam_epsilon": 1e-3},
    "sgd": {**STEPS, "optim": "sgd"},
    "adagrad": {**STEPS, "optim": "adagrad"},
    "rmsprop": {**STEPS, "optim": "rmsprop"},
    "adafactor": {**STEPS, "optim": "adafactor"},
    "optim_args": {**STEPS, "optim": "rmsprop", "optim_args": "momentum=0.5"},
    "warmup_steps": {**STEPS, "warmup_steps": 3},
    "warmup as a fraction": {**STEPS, "warmup_steps": 0.5},
    "cosine": {**STEPS, "lr_scheduler_type": "cosine"},
    "constant": {**STEPS, "lr_scheduler_type": "constant"},
    "constant_with_warmup": {**STEPS, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2},
    "inverse_sqrt": {**STEPS, "lr_scheduler_type": "inverse_sqrt", "warmup_steps": 2},
    "polynomial": {**STEPS, "lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0}},
    "restarts": {**STEPS, "lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}},
    "minimum": {**STEPS, "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 0.05}},
    "plateau": {**EVALUATED, "max_steps": 8, "lr_scheduler_type": "reduce_lr_on_plateau",
                "lr_scheduler_kwargs": {"patience": 0, "factor": 0.3}, "metric_for_best_model": "loss"},
    "logging by epoch": {"num_train_epochs": 2, "logging_strategy": "epoch"},
    "logging every third": {"max_steps": 7, "logging_steps": 3},
    "logging as a fraction": {"max_steps": 8, "logging_steps": 0.25},
    "logging_first_step": {"max_steps": 5, "logging_steps": 3, "logging_first_step": True},
    "no logging": {**STEPS, "logging_strategy": "no"},
    "evaluation by step": {**STEPS, **EVALUATED},
    "evaluation by epoch": {"num_train_epochs": 2, "eval_strategy": "epoch"},
    "eval_on_start": {**STEPS, **EVALUATED, "eval_on_start": True},
    "eval_delay": {**STEPS, **EVALUATED, "eval_delay": 3},
    "eval batch": {**STEPS, **EVALUATED, "per_device_eval_batch_size": 7},
    "prediction_loss_only": {**STEPS, **EVALUATED, "prediction_loss_only": True},
    "eval_accumulation_steps": {**STEPS, **EVALUATED, "per_device_eval_batch_size": 7, "eval_accumulation_steps": 2},
    "include_for_metrics": {**STEPS, **EVALUATED, "include_for_metrics": ["loss"]},
    "save by step": {**STEPS, "save_steps": 2},
    "save by epoch": {"num_train_epochs": 2, "save_strategy": "epoch"},
    "save_total_limit": {"max_steps": 8, "save_steps": 2, "save_total_limit": 2},
    "save as a fraction": {"max_steps": 8, "save_steps": 0.25},
    "save_only_model": {**STEPS, "save_steps": 3, "save_only_model": True},
    "best": {**STEPS, **BEST},
    "best of a metric": {**STEPS, **BEST, "metric_for_best_model": "error", "greater_is_better": False},
    "worst of a metric": {**STEPS, **BEST, "metric_for_best_model": "error", "greater_is_better": True},
    "best is kept": {"max_steps": 8, **BEST, "metric_for_best_model": "error", "greater_is_better": True,
                     "save_total_limit": 1},
    "save_strategy best": {**STEPS, **EVALUATED, "save_strategy": "best", "metric_for_best_model": "loss"},
    "include_num_input_tokens_seen": {**STEPS, "include_num_input_tokens_seen": "all"},
    "remove_unused_columns": {**STEPS, "remove_unused_columns": False},
    "workers": {**STEPS, "dataloader_num_workers": 1},
    "skip_memory_metrics": {**STEPS, "skip_memory_metrics": True},
    "log_on_each_node": {**STEPS, "log_on_each_node": False},
    "full_determinism": {**STEPS, "full_determinism": False},
    "layerwise": {**STEPS, "gradient_checkpointing": False},
    "nan filter": {**STEPS, "logging_nan_inf_filter": False},
}  # fmt: skip
KINDS = {  # case -> what is given besides options: model, rows, ...
    "own optimizer": {"optimizers": lambda m: (sgd(m), None)},
    "own optimizer and schedule": {"optimizers": scheduled},
    "optimizer_cls_and_kwargs": {"more": {"optimizer_cls_and_kwargs": (torch.optim.Adamax, {"lr": 0.05})}},
    "own loss": {"base": OwnLoss, "options": EVALUATED},
    "compute_loss_func": {
        "model": lambda: Line(double=True), "more": {"compute_loss_func": absolute},
    },
    "frozen parameters": {"model": frozen},
    "several outputs": {"model": lambda: Line(double=True), "options": EVALUATED},
    "several evaluation sets": {"held_out": {"one": ROWS[:9], "two": ROWS[9:]}, "options": EVALUATED},
    "a stream": {"rows": Streamed(), "options": {"max_steps": 7}},
    "a stream to evaluate": {"held_out": Streamed(), "options": EVALUATED},
    "an early stop": {
        "callbacks": lambda: [transformers.EarlyStoppingCallback(1)],
        "options": {"max_steps": 20, **BEST, "metric_for_best_model": "error", "greater_is_better": True},
    },
    "stop of training": {"callbacks": lambda: [Stop("on_step_end", 3, should_training_stop=True)]},
    "stop of an epoch": {"callbacks": lambda: [Stop("on_step_end", 3, should_epoch_stop=True)],
                         "options": {"num_train_epochs": 2, "max_steps": -1}},
    "a callback evaluates": {"callbacks": lambda: [Stop("on_step_end", 4, should_evaluate=True)]},
    "a callback saves": {"callbacks": lambda: [Stop("on_step_end", 5, should_save=True)]},
    "a callback logs": {
        "callbacks": lambda: [Stop("on_step_end", 5, should_log=True)], "options": {"logging_steps": 50},
    },
    "columns that nobody reads": {"rows": [{**row, "id": 3} for row in ROWS]},
    "logits through a function": {
        "more": {"preprocess_logits_for_metrics": lambda logits, labels: 2 * logits}, "options": EVALUATED,
    },
}  # fmt: skip


def trained(kind, arguments, folder, options, setup):
    own = {"level": "O0", "cluster": "cpu:1"} if arguments is tutti.TrainingArguments else {}
    saves = "steps" if "save_steps" in options else "no"
    usual = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "learning_rate": 0.1, "logging_steps": 1,
             "per_device_train_batch_size": 8, "save_strategy": saves}  # fmt: skip
    base = setup.get("base")
    kind = type("Own", (base, kind), {}) if base else kind
    model, events = setup.get("model", Line)(), Events()
    optimizers = setup["optimizers"](model) if "optimizers" in setup else (None, None)
    trainer = kind(
        model, arguments(str(folder), **own, **(usual | options)), train_dataset=setup.get("rows", ROWS),
        eval_dataset=setup.get("held_out", ROWS), compute_metrics=mean_error, optimizers=optimizers,
        callbacks=[events, *setup.get("callbacks", list)()], **setup.get("more", {}),
    )  # fmt: skip
    output = trainer.train()
    evaluated = trainer.evaluate()
    predicted = trainer.predict(ROWS[:8])
    return SimpleNamespace(trainer=trainer, output=output, events=events.seen, evaluated=evaluated, predicted=predicted)


def rows_of(log):
    return [{key: x for key, x in row.items() if not any(part in key for part in TIMES)} for row in log]


def same(a, b, where=""):
    """Assert that nested values are equal, numbers within 1e-4."""
    if isinstance(a, dict):
        assert set(a) == set(b), where
        for key in a:
            same(a[key], b[key], f"{where} {key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, pair in enumerate(zip(a, b, strict=True)):
            same(*pair, f"{where} {i}")
    elif isinstance(a, float) and math.isnan(a):
        assert math.isnan(b), where
    elif isinstance(a, int | float | np.ndarray):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5, err_msg=where)
    else:
        assert a == b, where


BOTH = ((transformers.Trainer, transformers.TrainingArguments), (tutti.Trainer, tutti.TrainingArguments))
STATE = (
    "global_step", "max_steps", "num_train_epochs", "epoch", "best_metric", "best_global_step", "logging_steps",
    "eval_steps", "save_steps", "train_batch_size", "num_input_tokens_seen",
)  # fmt: skip
ALL = {**{name: (options, {}) for name, options in CASES.items()},
       **{name: (STEPS | setup.get("options", {}), setup) for name, setup in KINDS.items()}}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ALL)
def test_the_same_options_do_the_same(name, tmp_path):
    options, setup = ALL[name]
    theirs = trained(transformers.Trainer, transformers.TrainingArguments, tmp_path / "theirs", options, setup)
    ours = trained(tutti.Trainer, tutti.TrainingArguments, tmp_path / "ours", options, setup)
    logs = [rows_of(x.trainer.state.log_history) for x in (theirs, ours)]
    if options.get("max_grad_norm") == 0:  # without clipping there is no norm here: updates go along the backward pass
        logs[0] = [{key: x for key, x in row.items() if key != "grad_norm"} for row in logs[0]]
    same(*logs)
    assert theirs.events == ours.events
    for attribute in STATE:
        same(getattr(theirs.trainer.state, attribute), getattr(ours.trainer.state, attribute), attribute)
    same(theirs.output.global_step, ours.output.global_step)
    same(theirs.output.training_loss, ours.output.training_loss, "training_loss")
    same(rows_of([theirs.evaluated]), rows_of([ours.evaluated]), "evaluate")
    same(theirs.predicted.predictions, ours.predicted.predictions, "predict")
    same(theirs.predicted.label_ids, ours.predicted.label_ids, "predict")
    for (key, x), y in zip(theirs.trainer.model.state_dict().items(), ours.trainer.model.state_dict().values(),
                           strict=True):  # fmt: skip
        same(x.numpy(), y.numpy(), key)
    assert checkpoints(tmp_path / "theirs") == checkpoints(tmp_path / "ours")


def checkpoints(folder):
    return sorted(x.name for x in folder.glob("checkpoint-*"))


RESUMED = {
    "newest": ({}, True),
    "a folder": ({}, "checkpoint-2"),
    "within an epoch": ({"num_train_epochs": 3, "max_steps": -1, "save_steps": 3}, True),
    "accumulation": ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}, True),
    "more steps": ({"later": {"max_steps": 9}}, True),
    "data skipped": ({"later": {"ignore_data_skip": True}}, True),
    "cosine": ({"lr_scheduler_type": "cosine", "warmup_steps": 1}, True),
    "momentum": ({"optim": "sgd", "optim_args": "momentum=0.9"}, True),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_goes_on_in_the_same_way(name, tmp_path):
    options, where = RESUMED[name]
    later = options.get("later", {})
    options = {"max_steps": 6, "save_steps": 2, **{key: x for key, x in options.items() if key != "later"}}
    logs, folders = [], []
    for kind, arguments in BOTH:
        folder = tmp_path / arguments.__module__
        own = {"level": "O0", "cluster": "cpu:1"} if kind is tutti.Trainer else {}
        usual = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "learning_rate": 0.1, "logging_steps": 1,
                 "per_device_train_batch_size": 8, "save_strategy": "steps", **own}  # fmt: skip

        def trainer_of(options, callbacks=(), kind=kind, arguments=arguments, folder=folder, usual=usual):
            args = arguments(str(folder), **(usual | options))
            return kind(Line(), args, train_dataset=ROWS, callbacks=list(callbacks))

        trainer_of(options, [Stop("on_step_end", 5, should_training_stop=True)]).train()
        resumed = trainer_of(options | later)
        resumed.train(resume_from_checkpoint=where if where is True else str(folder / where))
        logs.append(rows_of(resumed.state.log_history))
        folders.append(checkpoints(folder))
    same(*logs)
    assert folders[0] == folders[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("where", [True, "nowhere"])
def test_resuming_from_nothing_is_an_error(where, tmp_path):
    for kind, arguments in BOTH:
        args = arguments(str(tmp_path), report_to="none", max_steps=1, use_cpu=True)
        with pytest.raises((ValueError, OSError)):
            kind(Line(), args, train_dataset=ROWS).train(where if where is True else str(tmp_path / where))
