"""The options of `tutti.Trainer`: those of `transformers.TrainingArguments`, and how to distribute the step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import transformers

from tutti.launch.launch import world_size

# Options of transformers that mean nothing here: name -> what to use instead.
INSTEAD = {
    "fsdp": 'plan="zero3", or plan="auto"',
    "deepspeed": 'plan="zero1" to "zero3" or plan="auto"; memory="..." lets the plan offload',
    "parallelism_config": 'plan="dp2xtp2" or another name, or plan="auto"',
    "fp16": "bf16=True",
    "fp16_full_eval": "bf16=True",
    "bf16_full_eval": "bf16=True",
    "torch_compile": 'level="O1" or "O2", which is the default',
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
    level: str = field(default="O2", metadata={"help": "O0 runs operators, O1 fuses kernels, O2 compiles layers."})
    global_batch_size: int | None = field(
        default=None,
        metadata={"help": "Rows of a step over all processes and microbatches; replaces per_device_train_batch_size."},
    )
    memory: str | None = field(default=None, metadata={"help": 'Memory limit of each device, as in "2GiB".'})
    boost: Any = field(
        default="O0",
        metadata={"help": "Algorithms that trade accuracy for speed (docs/guide/boost.md): O0 (none) to O3, or names."},
    )


def option(args: transformers.TrainingArguments, name: str) -> Any:
    """An option of `TrainingArguments`; its default for a `transformers.TrainingArguments`."""
    return getattr(args, name, TrainingArguments.__dataclass_fields__[name].default)


def check(args: transformers.TrainingArguments) -> None:
    """Raise ValueError for options that mean nothing here, or do not fit together."""
    for name, instead in INSTEAD.items():
        if getattr(args, name, None):
            raise ValueError(f"{name}={getattr(args, name)!r} is not an option of tutti.Trainer; use {instead}")
    if args.train_sampling_strategy == "batch_rebalance":
        raise ValueError("train_sampling_strategy='batch_rebalance' balances ranks, which have no batches of their own "
                         "here; use 'group_by_length'")  # fmt: skip
    size, parts = option(args, "global_batch_size"), args.gradient_accumulation_steps
    if size is not None and (size < 1 or size % parts):
        raise ValueError(f"global_batch_size is {size}; it must be a multiple of gradient_accumulation_steps ({parts})")


def rows_of_microbatch(args: transformers.TrainingArguments) -> int:
    """Rows of a microbatch over all processes."""
    size = option(args, "global_batch_size")
    return args.per_device_train_batch_size * world_size() if size is None else size // args.gradient_accumulation_steps


def rows_of_evaluation(args: transformers.TrainingArguments) -> int:
    """Rows of a batch of evaluation over all processes."""
    return args.per_device_eval_batch_size * world_size()
