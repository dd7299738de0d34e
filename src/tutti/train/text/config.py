"""The options of a training run: one frozen dataclass for each section of the config file.

A run is a TOML file whose tables are these sections, `[optimizer] lr = 3e-4`; the command line overrides it with
`--optimizer.lr 3e-4`. An unknown key is an error that names the nearest key. So is a value of another type.
"""

from dataclasses import asdict, dataclass, field
from typing import Literal

from tutti.train.values import NamedValues


@dataclass(frozen=True)
class Data:
    """The training text."""

    source: str = "stdlib"
    """Folder of text files, read with its subfolders; "stdlib" is the source code of Python's own library. Or a
    config of `tutti corpus`, ending in .toml: that corpus is prepared first, and its documents are the text."""
    patterns: tuple[str, ...] = ("*.py",)
    """File names to read, with * and ? as in a shell."""
    held_out: float = 0.02
    """Fraction of the files kept from training, to measure the loss on; the hash of a file decides."""
    cache: str = "out/cache"
    """Folder for tokenizers and packed tokens, shared by runs; what is there is used again."""
    ahead: int = 2
    """Batches that a thread makes before their steps begin."""


@dataclass(frozen=True)
class Tokenizer:
    """The byte-level BPE tokenizer, learned from the training files."""

    vocab_size: int = 4096
    """Number of tokens, at least 257."""
    sample_mb: float = 10.0
    """Learn from this much text, in megabytes; merges hardly change with more."""


@dataclass(frozen=True)
class Model:
    """A transformers causal language model with random weights."""

    type: str = "llama"
    """Model type as transformers names it: llama, gpt2, qwen3, ..."""
    hidden_size: int = 256
    """Width of the residual stream."""
    num_hidden_layers: int = 4
    """Number of layers."""
    num_attention_heads: int = 4
    """Attention heads in a layer."""
    options: dict[str, int | float | str | bool] = field(default_factory=dict)
    """Any other key of the model type's config in transformers, such as intermediate_size."""


@dataclass(frozen=True)
class Batch:
    """What one optimizer step sees, over all devices together."""

    size: int = 16
    """Windows of text in a step."""
    seq: int = 256
    """Tokens in a window."""
    accumulate: int = 1
    """Pass the batch through the model in this many parts, one after the other, to save memory."""


@dataclass(frozen=True)
class Optimizer:
    """The optimizer and its options."""

    name: Literal["adamw", "adam", "sgd", "muon", "lion", "lamb", "adamw8bit"] = "adamw"
    """The optimizer, of torch.optim or of tutti.optim. Muon gives embeddings, heads and vectors to AdamW."""
    lr: float = 1e-3
    """Highest learning rate, reached when warm-up ends."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the running means of the gradient and of its square (all but SGD)."""
    momentum: float = 0.9
    """Momentum (SGD)."""
    weight_decay: float = 0.1
    """Weight decay of matrices; vectors (norms, biases) have none."""
    layer_decay: float | None = None
    """Factor of the learning rate for each layer between a parameter and the head."""
    ema_decay: float | None = None
    """Decay of a moving average of the weights, which held-out losses and the exported model then have."""
    clip_norm: float | None = 1.0
    """Scale the gradient down to this global norm when it is longer; None leaves it."""
    stochastic_rounding: bool = False
    """Update bfloat16 weights and their optimizer state without float32 masters: 6 bytes per parameter, not 14."""
    max_nonfinite_steps: int | None = 0
    """How many steps in a row may be skipped if their loss or gradients are not finite. One more stops the run with an
    error that names the operator. None does not check."""


@dataclass(frozen=True)
class Schedule:
    """The number of steps, and the learning rate."""

    steps: int = 500
    """Optimizer steps in all."""
    warmup: int = 50
    """Steps in which the learning rate rises in a line from 0."""
    floor: float = 0.1
    """The cosine falls to this fraction of the highest learning rate at the last step."""


@dataclass(frozen=True)
class Parallel:
    """The devices, and how the training step is distributed over them."""

    processes: int = 1
    """Processes to start on this machine; under torchrun or `tutti run`, theirs are used instead."""
    restarts: int = 0
    """How often all processes restart from the newest checkpoint when one of them fails or dies."""
    hang: float | None = 600.0
    """Seconds without progress after which the job ends with an error that names the rank that hangs; six times as many
    while a rank compiles, saves or loads. None waits forever."""
    compare: int | None = None
    """Steps between comparisons of checksums of replicated tensors. A difference ends the run with an error that names
    the tensor and the rank. None compares nothing."""
    cluster: str = "auto"
    """Devices to plan for: "auto" is the processes of this job; "cpu:4" in one process: 4 virtual devices."""
    plan: str = "auto"
    """"auto" searches; dp, tp, zero1, zero2, zero3, dp2xtp2, ... are textbook plans; a path: a saved one."""
    level: Literal["auto", "O0", "O1", "O2"] = "auto"
    """O0 runs operator by operator, O1 compiles what fuses into one kernel, O2 whole layers. "auto" begins with O0,
    compiles beside training, and goes on with O2 if it is faster. Levels round differently: choose one of them to
    compare runs bit for bit."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of weights and activations. bfloat16 keeps float32 masters, except with stochastic rounding. "auto" is
    bfloat16 where the device multiplies it faster."""
    memory: str | None = None
    """Memory limit of each device, as in "2GiB". Plans with offload, or "auto", store what does not fit outside the
    device: on the host for a GPU, on disk for a CPU. None uses all memory."""


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoints, from which an interrupted run resumes."""

    every: int = 100
    """Steps between checkpoints; there is one more at the end and when the run is interrupted."""
    keep: int = 2
    """How many of the newest checkpoints stay on disk."""
    second: str = ""
    """Another folder, to which each checkpoint is copied; empty: none."""
    memory_every: int = 0
    """Steps between copies of the state in the memory of machines (/dev/shm, or TUTTI_MEMORY). A job that lost
    processes or a machine continues from them. 0: none."""


@dataclass(frozen=True)
class Eval:
    """The loss on held-out text, while training."""

    every: int = 100
    """Steps between evaluations; there is one more at the end."""
    batches: int = 8
    """Batches of held-out text, always the same ones, spread evenly over it."""


@dataclass(frozen=True)
class Monitor:
    """Recording for `tutti diagnose`."""

    every: int = 20
    """Every rank records when its calls end in each step of this number; 0 records none. At least two such steps must
    remain, because the first is not reported."""


@dataclass(frozen=True)
class Sample:
    """The text generated at the end, for the report."""

    prompt: str = "def "
    """The text to continue."""
    tokens: int = 200
    """Tokens to generate."""
    temperature: float = 0.7
    """0 takes the most likely token each time; larger is more varied."""


@dataclass(frozen=True)
class Config:
    """Train a language model, planned for the available devices. Run the same command to resume it."""

    out: str = "out/run"
    """Folder for everything the run writes: checkpoints, logs, the report."""
    seed: int = 0
    """Seed of the initial weights, the order of the text, dropout and the sample."""
    data: Data = field(default_factory=Data)
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    model: Model = field(default_factory=Model)
    batch: Batch = field(default_factory=Batch)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    parallel: Parallel = field(default_factory=Parallel)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    eval: Eval = field(default_factory=Eval)
    monitor: Monitor = field(default_factory=Monitor)
    sample: Sample = field(default_factory=Sample)


# Sections that must not change when a run resumes.
_FIXED = (
    "seed",
    "data.",
    "tokenizer.",
    "model.",
    "batch.size",
    "batch.seq",
    "optimizer.name",
    "optimizer.ema_decay",
    "optimizer.stochastic_rounding",
    "parallel.precision",
)
_FREE = ("data.cache", "data.ahead")

_AT_LEAST = {
    "seed": 0,
    "data.ahead": 1,
    "batch.size": 1,
    "batch.seq": 2,
    "batch.accumulate": 1,
    "schedule.steps": 1,
    "schedule.warmup": 0,
    "schedule.floor": 0,
    "optimizer.lr": 0,
    "optimizer.max_nonfinite_steps": 0,
    "parallel.processes": 1,
    "parallel.restarts": 0,
    "parallel.compare": 1,
    "checkpoint.every": 1,
    "checkpoint.keep": 1,
    "checkpoint.memory_every": 0,
    "eval.every": 1,
    "eval.batches": 1,
    "monitor.every": 0,
    "sample.tokens": 1,
    "sample.temperature": 0,
    "tokenizer.vocab_size": 257,
}


def check(config: Config) -> None:
    """Raise ValueError for a number out of range."""
    flat = flatten(asdict(config))
    for key, lowest in _AT_LEAST.items():
        if flat[key] is not None and flat[key] < lowest:
            raise ValueError(f"{key} must be at least {lowest}, not {flat[key]}")
    if config.parallel.hang is not None and not config.parallel.hang > 0:
        raise ValueError(f"parallel.hang must be more than 0 seconds, not {config.parallel.hang}")
    warmup, steps = config.schedule.warmup, config.schedule.steps
    if warmup > steps:
        raise ValueError(f"schedule.warmup ({warmup}) exceeds schedule.steps ({steps}): "
                         f"add --schedule.warmup {steps // 10}, or another number up to {steps}")  # fmt: skip
    if config.batch.size % config.batch.accumulate:
        parts = config.batch.accumulate
        raise ValueError(f"batch.size ({config.batch.size}) is not a multiple of batch.accumulate ({parts})")


def flatten(table: NamedValues) -> NamedValues:
    """`{"optimizer": {"lr": 1e-3}}` -> `{"optimizer.lr": 1e-3}`, for `asdict` of a config."""
    flat: NamedValues = {}
    for name, value in table.items():
        flat |= {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def is_fixed(key: str) -> bool:
    """Whether an option must not change when a run resumes."""
    return key.startswith(_FIXED) and key not in _FREE


def changes(before: NamedValues, now: NamedValues) -> dict[str, str]:
    """The differences between the configs of two runs, given as JSON data: key -> sentence."""
    was, is_ = flatten(before), flatten(now)
    return {key: f"{key} was {was.get(key)} and is {is_[key]}" for key in is_ if was.get(key) != is_[key]}
