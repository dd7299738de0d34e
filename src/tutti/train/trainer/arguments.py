"""The options of `tutti.Trainer`: those of `transformers.TrainingArguments`, and how to distribute the step."""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import torch
import transformers
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.training_args import OptimizerNames

from tutti.exec.runtimes.runtime import in_job, join_job
from tutti.keywords import names_nearest
from tutti.launch.launch import local_rank, world_size
from tutti.train.trainer.optimizers import OPTIMIZERS

# Options of transformers that mean nothing here: name -> what to use instead.
INSTEAD = {
    "fsdp": 'plan="zero3", or plan="auto"',
    "deepspeed": 'plan="zero1" to "zero3" or plan="auto"; memory="..." lets the plan offload',
    "parallelism_config": 'plan="dp2xtp2" or another name, or plan="auto"',
    "fp16": "bf16=True",
    "fp16_full_eval": "bf16=True",
    "bf16_full_eval": "bf16=True",
    "torch_compile": 'level="O2", or "auto", which is the default',
    "use_liger_kernel": 'level="O2", which fuses kernels',
    "auto_find_batch_size": "memory=... with gradient_accumulation_steps: `tutti plan` says what fits",
    "torch_empty_cache_steps": "nothing: memory is planned",
    "optim_target_modules": "adapters of peft",
    "push_to_hub": "trainer.save_model(folder), then huggingface_hub.upload_folder",
    "enable_jit_checkpoint": "save_strategy",
    "save_on_each_node": "an output_dir that all machines see",
    "ddp_find_unused_parameters": "nothing: the step is captured, so unused parameters are known",
    "ddp_bucket_cap_mb": "nothing: collectives are planned",
    "ddp_broadcast_buffers": "nothing: buffers equal those of one device",
    "ddp_static_graph": "nothing: the step is captured",
    "debug": "`tutti diagnose`",
    "activation_checkpointing_kwargs": "a plan: tutti.parallelize(..., recompute=...) chooses what is recomputed",
    "liger_kernel_config": 'level="O2", which fuses kernels',
    "ddp_backend": "nothing: NCCL for GPUs, Gloo for CPUs",
    "eval_use_gather_object": "nothing: every process has all predictions",
    "predict_with_generate": "`tutti eval FOLDER --task seq2seq --data FILE --metrics bleu,rouge`, which generates",
    "generation_max_length": "`tutti eval --task seq2seq`, or model.generate",
    "generation_num_beams": "`tutti eval --task seq2seq`, or model.generate",
    "generation_config": "model.generation_config",
    "sortish_sampler": "train_sampling_strategy='group_by_length'",
}
ABSENT = {  # attributes of transformers.Trainer that there are not -> what to use instead
    "accelerator": "the step is captured and distributed by a plan; trainer.step has it while it trains",
    "hyperparameter_search": "call train() from a search library such as optuna, with a new Trainer each",
    "create_model_card": "write it with huggingface_hub.ModelCard",
    "push_to_hub": INSTEAD["push_to_hub"],
    "init_hf_repo": INSTEAD["push_to_hub"],
    "training_step": "override run_step, or compute_loss, which is captured",
    "get_batch_samples": "override get_train_dataloader",
    "store_flos": "state.total_flos is counted step by step",
    "autocast_smart_context_manager": "args.bf16; trainer.autocast() is the context",
    "compute_loss_context_manager": "args.bf16; trainer.autocast() is the context",
    "call_model_init": "model_init is called by train",
    "num_tokens": "args.include_num_input_tokens_seen counts tokens while it trains",
    "set_initial_training_values": "trainer.state has the numbers of steps and epochs",
}
ONLY: dict[str, tuple[object, str]] = {  # name -> the value that it may have, and what to use instead of others
    "average_tokens_across_devices": (True, "nothing: losses are means over the items of all processes"),
    "skip_memory_metrics": (True, "`tutti diagnose`, which tells peak memory"),
    "ddp_timeout": (1800, "`tutti run --hang SECONDS`"),
}
ACCELERATOR = {  # the same for accelerator_config
    "split_batches": "global_batch_size",
    "dispatch_batches": "a tutti.data.Stream, of which each process reads its part",
    "even_batches": "nothing: smaller last batches are computed as they are",
    "use_seedable_sampler": "data_seed",
    "non_blocking": "nothing: batches are copied while steps run",
    "gradient_accumulation_kwargs": "gradient_accumulation_steps",
    "use_configured_state": "nothing: the job is joined once",
}


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """Options of a training run, with the names, defaults and meanings of `transformers.TrainingArguments`, and more.

    `per_device_train_batch_size` counts rows per process, whatever the plan: a step sees that many rows times the
    processes times `gradient_accumulation_steps`. `global_batch_size` is the number of rows of a step instead, so that
    a script computes the same numbers on any number of processes.
    """

    plan: str = field(
        default="auto",
        metadata={"help": 'How the step is distributed: "auto", a name ("dp", "zero3", "dp2xtp2"), or a saved plan.'},
    )
    cluster: str = field(
        default="auto",
        metadata={"help": 'Devices: "auto" is the processes of this job; "cpu:4" in one process: virtual devices.'},
    )
    level: str = field(
        default="auto",
        metadata={"help": "O0 runs operators, O1 fuses kernels, O2 compiles layers; auto begins with O0 and goes on "
                          "with O2 once that is compiled, if it is faster."},
    )  # fmt: skip
    global_batch_size: int | None = field(
        default=None,
        metadata={"help": "Rows of a step over all processes and microbatches; replaces per_device_train_batch_size."},
    )
    memory: str | None = field(default=None, metadata={"help": 'Memory limit of each device, as in "2GiB".'})
    fp32_master_weights: bool = field(
        default=False, metadata={"help": "Keep and update float32 copies of low-precision parameters."}
    )
    stochastic_rounding: bool = field(
        default=False, metadata={"help": "Update bfloat16 parameters without float32 copies, rounded at random."}
    )
    max_nonfinite_steps: int | None = field(
        default=None,
        metadata={"help": "Steps in a row that may be skipped because their loss or gradients are not finite. One more "
                          "is an error. None: do not check."},
    )  # fmt: skip
    ema_decay: float | None = field(
        default=None,
        metadata={"help": "Decay of a moving average of the weights, as in 0.999. Evaluations, saved models and the "
                          "trained model have the averages."},
    )  # fmt: skip
    layerwise_lr_decay: float | None = field(
        default=None, metadata={"help": "Factor of the learning rate for each layer between a parameter and the head."}
    )
    boost: Any = field(
        default="O0",
        metadata={"help": "Algorithms that can reach a target sooner, at some risk for accuracy: O0 (none) to O3, or "
                          "names. No level has a reliable gain on a CPU: 0.9 to 1.15 times (docs/guide/boost.md)."},
    )  # fmt: skip

    def __post_init__(self) -> None:
        own, default = self.optim, transformers.TrainingArguments.__dataclass_fields__["optim"].default
        if own in OPTIMIZERS:
            self.optim = default
        elif own not in (names := [*OPTIMIZERS, *(x.value for x in OptimizerNames)]):
            near = get_close_matches(str(own), names, 1)
            raise ValueError(f"optim is {own!r}; {f'did you mean {near[0]!r}? ' if near else ''}"
                             f"There are {', '.join(names)}")  # fmt: skip
        if self.deepspeed:  # transformers would ask for the package
            raise ValueError(_instead("deepspeed", self.deepspeed, INSTEAD["deepspeed"]))
        self.use_cpu = self.use_cpu or not torch.cuda.is_available()
        if in_job():  # before transformers does, with our timeouts and cores
            join_job(torch.device("cpu") if self.use_cpu else torch.device("cuda", local_rank()))
        super().__post_init__()
        if own in OPTIMIZERS:
            self.optim = own


TrainingArguments.__init__ = names_nearest(TrainingArguments.__init__)


def option(args: transformers.TrainingArguments, name: str) -> Any:
    """An option of `TrainingArguments`; its default for a `transformers.TrainingArguments`."""
    return getattr(args, name, TrainingArguments.__dataclass_fields__[name].default)


def check(args: transformers.TrainingArguments) -> None:
    """Raise ValueError for options that mean nothing here, or do not fit together."""
    for name, instead in INSTEAD.items():
        if getattr(args, name, None):
            raise ValueError(_instead(name, getattr(args, name), instead))
    for name, (value, instead) in ONLY.items():
        if getattr(args, name) != value:
            raise ValueError(_instead(name, getattr(args, name), instead))
    plain, config = AcceleratorConfig(), args.accelerator_config
    for name, instead in ACCELERATOR.items():
        if getattr(config, name) != getattr(plain, name):
            raise ValueError("accelerator_config: " + _instead(name, getattr(config, name), instead))
    if args.train_sampling_strategy == "batch_rebalance":
        raise ValueError("train_sampling_strategy='batch_rebalance' balances ranks, which have no batches of their own "
                         "here; use 'group_by_length'")  # fmt: skip
    size, parts = option(args, "global_batch_size"), args.gradient_accumulation_steps
    if size is not None and (size < 1 or size % parts):
        raise ValueError(f"global_batch_size is {size}; it must be a multiple of gradient_accumulation_steps ({parts})")


def _instead(name: str, value: object, instead: str) -> str:
    return f"{name}={value!r} is not an option of tutti.Trainer; use {instead}"


def output_folder(args: transformers.TrainingArguments) -> str:
    """The folder of a run, which has a default."""
    assert args.output_dir is not None
    return args.output_dir


def seed_of_data(args: transformers.TrainingArguments) -> int:
    """The seed of the order of rows, and of what collators draw."""
    return args.seed if args.data_seed is None else args.data_seed


def rows_of_microbatch(args: transformers.TrainingArguments) -> int:
    """Rows of a microbatch over all processes."""
    size = option(args, "global_batch_size")
    return args.per_device_train_batch_size * world_size() if size is None else size // args.gradient_accumulation_steps


def rows_of_evaluation(args: transformers.TrainingArguments) -> int:
    """Rows of a batch of evaluation over all processes."""
    return args.per_device_eval_batch_size * world_size()
