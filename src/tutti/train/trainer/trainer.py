"""`tutti.Trainer`: the interface of `transformers.Trainer` over `tutti.parallelize`."""

from __future__ import annotations

import inspect
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.data.data_collator import DataCollatorWithPadding, default_data_collator
from transformers.feature_extraction_sequence_utils import SequenceFeatureExtractor
from transformers.integrations.integration_utils import get_reporting_integration_callbacks
from transformers.optimization import get_scheduler
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.trainer_callback import (
    CallbackHandler,
    DefaultFlowCallback,
    ExportableState,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from transformers.trainer_pt_utils import LabelSmoother, get_parameter_names
from transformers.trainer_utils import (
    EvalLoopOutput,
    IntervalStrategy,
    PredictionOutput,
    SaveStrategy,
    TrainOutput,
    enable_full_determinism,
    has_length,
    set_seed,
    speed_metrics,
)
from transformers.utils.generic import can_return_loss, find_labels

import tutti
from tutti.data import Mixture, Stream, StreamingSource
from tutti.launch.launch import local_rank, rank
from tutti.optim import Muon, averaged, with_ema
from tutti.tracing.batch import Batch
from tutti.tracing.optimizers.marks import EMA_DECAY
from tutti.train.boost.boost import Boost
from tutti.train.tasks import Task, get_task
from tutti.train.trainer import arguments, batches, checkpointing, evaluation, loss, rows
from tutti.train.trainer.arguments import TrainingArguments, option
from tutti.train.trainer.draws import Draws
from tutti.train.trainer.forward import ForwardPass, forward_pass
from tutti.train.trainer.optimizers import class_and_options, parameter_groups
from tutti.train.trainer.protocols import Loader, Schedule, TrainerStore
from tutti.train.values import Inputs, NamedValues, Outputs, Processor, Rows

NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]  # as in transformers


class Trainer:
    """Train, evaluate and predict with the interface of `transformers.Trainer`, distributed by a plan.

        from tutti import Trainer, TrainingArguments

        trainer = Trainer(model, TrainingArguments("out", plan="auto"), train_dataset=data, eval_dataset=held_out)
        trainer.train()
        trainer.evaluate()

    Arguments, callbacks, logs and files are those of `transformers.Trainer`; args may be a
    `transformers.TrainingArguments`, too. Start it in several processes with `tutti run -n 4 script.py` or torchrun.

    Subclasses may override `compute_loss`, `create_optimizer`, `create_scheduler`, `get_train_dataloader`,
    `get_eval_dataloader`, `log`, `prediction_step`, `make_step`, `run_step` and `end_step`. `compute_loss` is captured:
    it computes with tensors.

    task: how rows become batches, a loss and scores: a name of `tutti.train.tasks.TASKS`, or a `Task`. Datasets are
        then raw rows: whatever `tutti.data.open_source` takes, or a `tutti.data.Mixture` or `Stream` to train on. It
        replaces data_collator, and compute_metrics where predictions are small.

    equal_items: whether all microbatches have equally many items, so that losses need no weights.
    plans_first: whether the step is made before `on_train_begin`, not with the first batch.

    Losses are means over all items of all ranks and microbatches. The model is live: it has the trained values
    after every step.

    Raises ValueError for arguments that mean nothing here, with what to use instead.
    """

    equal_items, plans_first = False, False

    def __init__(
        self,
        model: nn.Module | None = None,
        args: transformers.TrainingArguments | None = None,
        data_collator: Callable | None = None,
        train_dataset: Rows = None,
        eval_dataset: Rows = None,
        processing_class: Processor = None,
        model_init: Callable[[], nn.Module] | None = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Callable[..., dict] | None = None,
        callbacks: list[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Schedule | None] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], NamedValues] | None = None,
        preprocess_logits_for_metrics: Callable[[Outputs, Outputs], Outputs] | None = None,
        task: Task | str | None = None,
    ):
        args = TrainingArguments("tmp_trainer") if args is None else args
        arguments.check(args)
        _check_overrides(type(self))
        if (model is None) == (model_init is None):
            raise ValueError("Trainer takes either a model or model_init")
        self.args = args
        self.model_init = model_init
        transformers.logging.set_verbosity(args.get_process_log_level())
        enable_full_determinism(args.seed) if args.full_determinism else set_seed(args.seed)
        self.model: nn.Module = model_init() if model is None and model_init else model  # pyright: ignore
        self._check_head()
        inner = batches.without_adapters(self.model)
        self.model_accepts_loss_kwargs = loss.accepts_loss_kwargs(inner)
        self.shifts_labels = loss.shifts_labels(inner)
        names = find_labels(type(inner)) if args.label_names is None else args.label_names
        self.label_names: list[str] = list(names)
        self.can_return_loss = can_return_loss(type(inner))
        self.label_smoother = LabelSmoother(args.label_smoothing_factor) if args.label_smoothing_factor else None
        problem = getattr(getattr(self.model, "config", None), "problem_type", None)
        if self.label_smoother and problem == "multi_label_classification":
            warnings.warn("label_smoothing_factor has no meaning for several labels a row: left out", stacklevel=2)
            self.label_smoother = None
        pads = isinstance(processing_class, PreTrainedTokenizerBase | SequenceFeatureExtractor)
        usual = DataCollatorWithPadding(processing_class) if pads else default_data_collator  # pyright: ignore
        self.data_collator = data_collator or usual
        self.train_dataset, self.eval_dataset, self.processing_class = train_dataset, eval_dataset, processing_class
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.task = get_task(task) if isinstance(task, str) else task
        if self.task is not None:
            rows.take(self, self.task, data_collator is None)
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer: torch.optim.Optimizer | None
        self.lr_scheduler: Schedule | None
        self.optimizer, self.lr_scheduler = optimizers
        if optimizer_cls_and_kwargs is not None and self.optimizer is not None:
            raise ValueError("give optimizers or optimizer_cls_and_kwargs, not both")
        if type(self.lr_scheduler).__name__ == "AdafactorSchedule":
            warnings.warn(
                "AdafactorSchedule reads learning rates from the optimizer's state, which is in the step: the log "
                "shows its initial_lr. Adafactor computes those of its steps all the same",
                stacklevel=2,
            )
        if self.optimizer is not None and option(args, "layerwise_lr_decay") is not None:
            raise ValueError("layerwise_lr_decay needs an optimizer that the Trainer makes; give groups with learning "
                             "rates to yours: tutti.optim.groups(model, lr=..., layer_decay=...)")  # fmt: skip
        self.own_schedule = False  # whether `train` made the schedule, and makes another if it is called again
        self.ema_decay: float | None = option(args, "ema_decay")
        if self.ema_decay is not None and "dim_reduce" in Boost.parse(option(args, "boost")).algorithms:
            raise ValueError("ema_decay averages weights, which steps of dim_reduce do not have: leave one of them out")
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        if args.max_steps <= 0 and self.train_dataset is not None and not has_length(self.train_dataset):
            raise ValueError("the train_dataset has no length: give args.max_steps")
        if args.save_strategy == SaveStrategy.BEST and args.metric_for_best_model is None:
            raise ValueError("save_strategy='best' needs args.metric_for_best_model, such as 'loss'")
        if (
            args.batch_eval_metrics
            and compute_metrics
            and "compute_result" not in inspect.signature(compute_metrics).parameters
        ):
            raise ValueError("batch_eval_metrics=True calls compute_metrics(prediction, compute_result=last) with each "
                             "batch: give it the parameter compute_result")  # fmt: skip
        if args.eval_strategy != "no" and eval_dataset is None:
            raise ValueError(f"eval_strategy={IntervalStrategy(args.eval_strategy).value!r} needs an eval_dataset")
        self.callback_handler = CallbackHandler(
            [DefaultFlowCallback, *get_reporting_integration_callbacks(args.report_to), *(callbacks or [])],
            self.model, processing_class, self.optimizer, self.lr_scheduler,
        )  # fmt: skip
        self.callback_handler.add_callback(PrinterCallback if args.disable_tqdm else ProgressCallback)
        self.control = TrainerControl()
        self.state = self._new_state()
        self.is_in_train = False
        self.step: tutti.Step | None = None  # while training
        self.checkpoints: TrainerStore[Any] = checkpointing.TrainerCheckpoints(self)
        self.draws = Draws(arguments.seed_of_data(args))  # random numbers of training data
        self.position: dict[str, int] = {}  # in the training data
        self.objective = loss.Objective(self)
        self.buckets = batches.Buckets(getattr(self.model, "config", None))
        self._forward: ForwardPass | None = None  # outside of training
        self._hook: RemovableHandle | None = None
        if rank() == 0:
            Path(arguments.output_folder(self.args)).mkdir(parents=True, exist_ok=True)
        self.control = self.callback_handler.on_init_end(args, self.state, self.control)
        if (config := getattr(self.model, "config", None)) is not None:
            config.use_cache = args.use_cache

    def _check_head(self) -> None:
        from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

        kind, parameters = type(self.model).__name__, inspect.signature(self.model.forward).parameters
        if kind in MODEL_MAPPING_NAMES.values() and not {"labels", "return_loss"} & parameters.keys():
            raise ValueError(f"{kind} has no head and computes no loss; use one of AutoModelFor..., such as "
                             "AutoModelForSequenceClassification")  # fmt: skip

    def _new_state(self) -> TrainerState:
        stateful = [x for x in [*self.callback_handler.callbacks, self.control] if isinstance(x, ExportableState)]
        return TrainerState(is_local_process_zero=self.is_local_process_zero(),
                            is_world_process_zero=self.is_world_process_zero(),
                            stateful_callbacks=stateful)  # pyright: ignore[reportArgumentType]  # fmt: skip

    # -- data ------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Loader:
        """Microbatches of all processes. An override returns global microbatches, equal on all ranks."""
        if self.train_dataset is None:
            raise ValueError("Trainer: training needs a train_dataset")
        if isinstance(self.train_dataset, Mixture | Stream | StreamingSource):
            return rows.stream(self)
        data, collate = self._readable(self.train_dataset, "training")
        names = getattr(self.processing_class, "model_input_names", None)
        return batches.training_loader(data, collate, self.args, names[0] if names else None)

    def get_eval_dataloader(self, eval_dataset: Rows = None) -> Loader:
        """Batches of all processes, in the order of the dataset. eval_dataset: a dataset, or the name of one."""
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if chosen is None:
            raise ValueError("Trainer: evaluation needs an eval_dataset")
        data, collate = self._readable(chosen, "evaluation")
        return batches.evaluation_loader(data, collate, self.args)

    def get_test_dataloader(self, test_dataset: Rows) -> Loader:
        """Batches of all processes, in the order of the dataset."""
        return self.get_eval_dataloader(test_dataset)

    def num_examples(self, dataloader: Loader) -> int:
        """The number of rows of a data loader; of one without `dataset`, of full batches."""
        dataset = getattr(dataloader, "dataset", None)
        if dataset is not None:
            return len(dataset)
        assert isinstance(dataloader, Sized)
        return len(dataloader) * arguments.rows_of_microbatch(self.args)

    def get_total_train_batch_size(self, args: transformers.TrainingArguments | None = None) -> int:
        """Rows of a step, of all processes and microbatches."""
        args = args or self.args
        return arguments.rows_of_microbatch(args) * args.gradient_accumulation_steps

    def _readable(self, dataset: Rows, what: str) -> tuple[Rows, Callable]:
        if not self.args.remove_unused_columns or self.task is not None:
            return dataset, self.data_collator
        columns = batches.columns_of(self.model, self.label_names)
        if columns is None:
            return dataset, self.data_collator
        others = None if batches.is_dataset(dataset) else columns  # `readable` removes those of a dataset
        return batches.readable(dataset, columns, what), batches.Collator(self.data_collator, others, what)

    def _pads(self) -> dict[str, int]:
        """The values that pad entries of a batch."""
        own_pad = getattr(self.processing_class or getattr(self.data_collator, "tokenizer", None), "pad_token_id", None)
        config = getattr(self.model, "config", None)
        pad = own_pad if own_pad is not None else getattr(config, "pad_token_id", None)
        labels = dict.fromkeys([*self.label_names, "labels", "shift_labels"], loss.IGNORED)
        return labels | {"input_ids": pad or 0, "decoder_input_ids": pad or 0}

    def _bucketed(self, batch: Inputs) -> NamedValues:
        return self.buckets(batch, self._pads())

    # -- optimizer, schedule and loss --------------------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer of `args.optim`, unless there is one. Biases and norms have no weight decay."""
        if self.optimizer is None:
            model = self.model if model is None else model
            assert model is not None
            kind, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, model)
            groups = parameter_groups(
                model, set(self.get_decay_parameter_names(model)), self.args.weight_decay, self.args.learning_rate,
                option(self.args, "layerwise_lr_decay"), muon=issubclass(kind, Muon),
            )  # fmt: skip
            self.optimizer = kind(groups, **options)
        if self.ema_decay is not None and EMA_DECAY not in self.optimizer.param_groups[0]:
            with_ema(self.optimizer, self.ema_decay)
        return self.optimizer

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: transformers.TrainingArguments, model: nn.Module | None = None
    ) -> tuple[type[torch.optim.Optimizer], dict]:
        """The class and the options of `args.optim`."""
        return class_and_options(args, model)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """The names of parameters with weight decay: all but biases and norms."""
        return get_parameter_names(model, [nn.LayerNorm], NO_DECAY)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Schedule:
        """The learning-rate schedule of `args.lr_scheduler_type`, unless there is one."""
        if self.lr_scheduler is None:
            self.lr_scheduler = get_scheduler(
                self.args.lr_scheduler_type,
                optimizer=optimizer or self._made_optimizer(),
                num_warmup_steps=self.args.get_warmup_steps(num_training_steps),
                num_training_steps=num_training_steps,
                scheduler_specific_kwargs=cast(dict | None, self.args.lr_scheduler_kwargs),
            )
        return self.lr_scheduler

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Create both, unless they exist."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps)

    def compute_loss(self, model: nn.Module, inputs: NamedValues, return_outputs: bool = False,
                     num_items_in_batch: Tensor | None = None) -> Outputs:  # fmt: skip
        """The loss of a microbatch, a 0-d tensor, or (loss, outputs).

        num_items_in_batch: what to divide sums over items by, so that the mean over microbatches is the mean over all
            items: their number in the step, over the number of microbatches.
        """
        if self.task is not None and self.task.loss is not None:
            value = self.task.loss(model, inputs)
            outputs = self.task.outputs(model, inputs) if return_outputs else {}
        else:
            value, outputs = loss.computed(self, model, inputs, num_items_in_batch)
        return (value, outputs) if return_outputs else value

    # -- training ----------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, trial: object = None,
              ignore_keys_for_eval: list[str] | None = None) -> TrainOutput:  # fmt: skip
        """Train. Every rank of a job calls it.

        resume_from_checkpoint: a folder `checkpoint-N`, or True for the newest in `args.output_dir`. Any plan continues
        a checkpoint of any other, with the same losses.
        """
        from tutti.train.trainer.training import Training

        if trial is not None:
            raise ValueError("tutti.Trainer has no hyperparameter_search: call train() from a search library")
        self.is_in_train = True
        try:
            return Training(self, tuple(ignore_keys_for_eval or ())).run(resume_from_checkpoint)
        finally:
            self.is_in_train = False
            if self._hook is not None:
                self._hook.remove()
                self._hook = None

    def make_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, **options: Any) -> tutti.Step:
        """The step that training runs. options: those of `tutti.parallelize`."""
        return tutti.parallelize(model, optimizer, batch, **options)

    def run_step(self, batch: NamedValues) -> Tensor:
        """Train on the batch of a step. Returns its loss, a 0-d tensor."""
        assert self.step is not None
        return self.step(batch)

    def end_step(self) -> None:
        """Called after each step, when its logs, evaluation and checkpoint are done."""

    # -- evaluation --------------------------------------------------------------------------------------------------

    def evaluate(self, eval_dataset: Rows = None, ignore_keys: list[str] | None = None,
                 metric_key_prefix: str = "eval") -> dict[str, float]:  # fmt: skip
        """Loss and metrics of `eval_dataset`, or of each of a dict of them, under the names of `transformers`."""
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, dict):
            all_metrics: dict[str, float] = {}
            for name, dataset in chosen.items():
                all_metrics |= self.evaluate(dataset, ignore_keys, f"{metric_key_prefix}_{name}")
            return all_metrics
        loss_only = self.compute_metrics is None or self.args.prediction_loss_only
        loader, begin = self.get_eval_dataloader(chosen), time.time()
        output = self.evaluation_loop(loader, "Evaluation", loss_only, ignore_keys, metric_key_prefix)
        metrics = output.metrics or {}
        steps = math.ceil(output.num_samples / arguments.rows_of_evaluation(self.args))  # pyright: ignore
        metrics |= speed_metrics(metric_key_prefix, begin, num_samples=output.num_samples, num_steps=steps)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def predict(self, test_dataset: Rows, ignore_keys: list[str] | None = None,
                metric_key_prefix: str = "test") -> PredictionOutput:  # fmt: skip
        """Predictions for a dataset, and loss and metrics if it has labels."""
        loader, begin = self.get_test_dataloader(test_dataset), time.time()
        output = self.evaluation_loop(loader, "Prediction", None, ignore_keys, metric_key_prefix)
        metrics = output.metrics or {}
        steps = math.ceil(output.num_samples / arguments.rows_of_evaluation(self.args))  # pyright: ignore
        metrics |= speed_metrics(metric_key_prefix, begin, num_samples=output.num_samples, num_steps=steps)
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, metrics)
        return PredictionOutput(output.predictions, output.label_ids, metrics)  # pyright: ignore

    def evaluation_loop(self, dataloader: Loader, description: str, prediction_loss_only: bool | None = None,
                        ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval",
                        ) -> EvalLoopOutput:  # fmt: skip
        """Loss, predictions and metrics of a data loader: a `transformers` EvalLoopOutput."""
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        if ignore_keys is None:
            config = getattr(self.model, "config", None)
            ignore_keys = getattr(config, "keys_to_ignore_at_inference", ["cache"])
        self.callback_handler.eval_dataloader = dataloader  # pyright: ignore[reportAttributeAccessIssue]
        with self.averaged():
            return evaluation.evaluation_loop(self, dataloader, metric_key_prefix, loss_only, tuple(ignore_keys or ()),
                                              predicts=description == "Prediction")  # fmt: skip

    def prediction_step(self, model: nn.Module, inputs: Batch, prediction_loss_only: bool,
                        ignore_keys: Iterable[str] | None = None,
                        ) -> tuple[Tensor | None, Outputs, Outputs]:  # fmt: skip
        """(loss, outputs, labels) of a batch; each may be None."""
        return evaluation.prediction_step(self, inputs, prediction_loss_only, tuple(ignore_keys or ()))

    def forward(self, batch: Inputs, *, has_loss: bool, wanted: bool,
                ignored: tuple[str, ...]) -> tuple[Tensor | None, Outputs]:  # fmt: skip
        """Loss and outputs of a batch in evaluation mode, distributed by the plan."""
        objective = self.objective
        objective.wanted, objective.ignored = wanted, ignored
        objective.look()
        bucketed = self._bucketed(batch)
        if has_loss and not self.equal_items:
            bucketed |= loss.items_of(bucketed, self.shifts_labels, 1)
        if has_loss and self._trains():
            assert self.step is not None
            value = self.step.evaluate(bucketed)
            named: Mapping[str, Tensor] = self.step.metrics
        else:
            value, named = forward_pass(self, bucketed, has_loss)(bucketed)
        if not wanted:
            return value, None
        return value, evaluation.cut(objective.structured(named), bucketed, batch)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """With `args.ema_decay`, the step has averaged weights as parameters in this context."""
        if self.ema_decay is None or not self._trains():
            yield
            return
        with averaged(self.step):
            yield

    def _trains(self) -> bool:
        """Whether there is a step of the model."""
        return self.step is not None and self.step.model is self.model

    def autocast(self) -> AbstractContextManager[object]:
        """The context in which the model computes: bfloat16 autocast with `args.bf16`."""
        kind = next((p.device.type for p in self.model.parameters()), "cpu")
        return torch.autocast(kind, torch.bfloat16) if self.args.bf16 else nullcontext()

    # -- what others ask -------------------------------------------------------------------------------------------

    @property
    def model_wrapped(self) -> nn.Module:
        """The model: nothing wraps it."""
        return self.model

    def get_num_trainable_parameters(self) -> int:
        """The number of values that training changes."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def get_learning_rates(self) -> list[float]:
        """The present learning rate of each parameter group. Raises ValueError before there is an optimizer."""
        return [float(group["lr"]) for group in self._made_optimizer().param_groups]

    def get_optimizer_group(self, param: Tensor | None = None) -> list[list[Tensor]] | NamedValues | None:
        """The parameter group of a parameter, or the parameters of each group."""
        groups = self._made_optimizer().param_groups
        if param is None:
            return [group["params"] for group in groups]
        return next((group for group in groups if any(x is param for x in group["params"])), None)

    def _made_step(self) -> tutti.Step:
        assert self.step is not None
        return self.step

    def _made_schedule(self) -> Schedule:
        assert self.lr_scheduler is not None
        return self.lr_scheduler

    def _made_optimizer(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise ValueError("the Trainer has no optimizer yet: call train or create_optimizer before")
        return self.optimizer

    def __getattr__(self, name: str) -> Any:
        remedy = arguments.ABSENT.get(name)
        if remedy:
            raise AttributeError(f"tutti.Trainer has no {name}: {remedy}")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    # -- files, logs, callbacks --------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model for `from_pretrained`, and the processing class. Every rank of a job calls it."""
        checkpointing.save_model(self, Path(output_dir or arguments.output_folder(self.args)))

    def save_state(self) -> None:
        """Save `trainer_state.json` in `args.output_dir`."""
        if self.is_world_process_zero():
            self.state.save_to_json(str(Path(arguments.output_folder(self.args), checkpointing.TRAINER_JSON)))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log numbers: to the state's history and to callbacks."""
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
            if start_time is not None:
                logs |= speed_metrics("train", start_time, num_tokens=self.state.num_input_tokens_seen)
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)

    def log_metrics(self, split: str, metrics: dict[str, float]) -> None:
        """Print the metrics of a split."""
        transformers.Trainer.log_metrics(self, split, metrics)  # pyright: ignore

    def save_metrics(self, split: str, metrics: dict[str, float], combined: bool = True) -> None:
        """Save metrics as `{split}_results.json`, and in `all_results.json` if `combined`."""
        transformers.Trainer.save_metrics(self, split, metrics, combined)  # pyright: ignore

    def metrics_format(self, metrics: dict[str, float]) -> NamedValues:
        """Metrics as texts."""
        return transformers.Trainer.metrics_format(self, metrics)  # pyright: ignore

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a `transformers.TrainerCallback`, or its class."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        """Remove a callback and return it."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Remove a callback."""
        self.callback_handler.remove_callback(callback)

    def is_local_process_zero(self) -> bool:
        """Whether this is the first process of this machine."""
        return local_rank() == 0

    def is_world_process_zero(self) -> bool:
        """Whether this is the first process of the job."""
        return rank() == 0

    def floating_point_ops(self, inputs: Batch) -> int:
        """Floating-point operations of a step."""
        return self.step.flops if self.step else 0


def _check_overrides(kind: type) -> None:
    """Raise ValueError if a subclass overrides a method of `transformers.Trainer` that is never called here."""
    for base in kind.__mro__[: kind.__mro__.index(Trainer)]:
        for name in vars(base):
            if callable(getattr(transformers.Trainer, name, None)) and not hasattr(Trainer, name):
                raise ValueError(
                    f"{base.__name__} overrides {name}, which tutti.Trainer does not call; override compute_loss, "
                    "create_optimizer, create_scheduler, get_train_dataloader, get_eval_dataloader or log, or use a "
                    "callback"
                )
