"""Options that the trainers of alignment share, with the names of TRL's."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from tutti.train.trainer.arguments import TrainingArguments


@dataclass
class AlignArguments(TrainingArguments):
    """Options of all trainers of alignment. Defaults are those of TRL where it has them."""

    logging_steps: float = field(default=10, metadata={"help": "Steps between two logs."})
    max_length: int | None = field(
        default=1024, metadata={"help": "Longest sequence in tokens; longer ones are cut. None: no limit."}
    )
    truncation_mode: str = field(
        default="keep_start", metadata={"help": "Which end of a long sequence stays: keep_start or keep_end."}
    )
    pad_to_multiple_of: int | None = field(
        default=None,
        metadata={"help": "Sequences of a batch are padded to a multiple of this; None: to one of a few lengths."},
    )
    pad_token: str | None = field(default=None, metadata={"help": "Token that pads; None: that of the tokenizer."})
    disable_dropout: bool = field(
        default=True,
        metadata={"help": "Set all dropout of the model and its config to 0, so that scores of one text are equal."},
    )
    dataset_num_proc: int | None = field(
        default=None, metadata={"help": "Ignored: rows are tokenized when they are read."}
    )
    remove_unused_columns: bool | None = field(
        default=False, metadata={"help": "Ignored: trainers of alignment know which columns they read."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.truncation_mode not in ("keep_start", "keep_end"):
            raise ValueError(f"truncation_mode is {self.truncation_mode!r}; it must be keep_start or keep_end")
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"max_length is {self.max_length}; a sequence needs 2 tokens, or None for no limit")

    @property
    def keep(self) -> str:
        """The end of a long sequence that is kept: "start" or "end"."""
        return self.truncation_mode.removeprefix("keep_")


def pad_of(args: AlignArguments, tokenizer: Any) -> int:
    """The id of the token that pads. Raises ValueError if there is none, or if `pad_token` is not known."""
    if args.pad_token is not None:
        pad = tokenizer.convert_tokens_to_ids(args.pad_token)
        if pad is None or pad == tokenizer.unk_token_id:
            raise ValueError(f"pad_token {args.pad_token!r} is not a token of the tokenizer")
        return int(pad)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if pad is None:
        raise ValueError("the tokenizer has neither a padding token nor an end-of-text token: give pad_token")
    return int(pad)


DROPOUT = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout


def without_dropout(model: nn.Module) -> None:
    """Set all dropout probabilities to 0: those of modules, and those that models of transformers apply as functions.

    The latter are attributes of modules or of configs, such as attention_dropout, resid_pdrop and layerdrop: all
    numbers with "drop" in their names.
    """
    for module in model.modules():
        if isinstance(module, DROPOUT):
            module.p = 0.0
        for owner in (module, getattr(module, "config", None)):
            numbers = [name for name, x in getattr(owner, "__dict__", {}).items() if isinstance(x, float)]
            for name in numbers:
                if "drop" in name:
                    setattr(owner, name, 0.0)


def longest_of(args: AlignArguments, model: Any) -> int | None:
    """Tokens of the longest sequence: `max_length`, or the model's positions if they are fewer. None: no limit."""
    return min((x for x in (args.max_length, positions_of(model)) if x is not None), default=None)


def positions_of(model: Any) -> int | None:
    """Positions that a model has embeddings for. None: it does not say."""
    config = getattr(model, "config", None)
    return getattr(config.get_text_config() if config is not None else None, "max_position_embeddings", None)


def adapters_in(name: str) -> Path | None:
    """The config of the adapters in a folder; None if it has none."""
    file = Path(name) / "adapter_config.json"
    return file if file.is_file() else None


def pretrained(auto_class: Any, name: str, **options: Any) -> Any:
    """A model of an auto class by its name or folder. Adapters of peft in a folder are merged into their base.

    Raises ValueError if these do not name their base, or are no safetensors: other files are pickled.
    """
    file = adapters_in(name)
    if file is None:
        return auto_class.from_pretrained(name, trust_remote_code=False, **options)
    if not file.with_name("adapter_model.safetensors").is_file():
        raise ValueError(f"{file.parent} has no adapter_model.safetensors, and adapters are read from no other file")
    from peft import PeftModel

    base = json.loads(file.read_text()).get("base_model_name_or_path")
    if not base:
        raise ValueError(
            f"{file} does not say of which model it has adapters: save the merged model (merge_and_unload)"
        )
    model = auto_class.from_pretrained(base, trust_remote_code=False, **options)
    return PeftModel.from_pretrained(model, name).merge_and_unload().requires_grad_(True)  # pyright: ignore[reportCallIssue]


def is_adapted(model: nn.Module) -> bool:
    """Whether a model is one of peft, with adapters."""
    return hasattr(model, "disable_adapter")
