"""Alignment: from a base model to one that follows a reward."""

from tutti.extras import extra

with extra("train"):
    from tutti.align.sft import SFTConfig, SFTTrainer

__all__ = ["SFTConfig", "SFTTrainer"]
