"""Alignment: from a base model to one that follows a reward."""

from tutti.extras import extra

with extra("train"):
    from tutti.align.dpo import DPOConfig, DPOTrainer
    from tutti.align.kto import KTOConfig, KTOTrainer
    from tutti.align.orpo import ORPOConfig, ORPOTrainer
    from tutti.align.prm import PRMConfig, PRMTrainer
    from tutti.align.reward import RewardConfig, RewardTrainer
    from tutti.align.sft import SFTConfig, SFTTrainer

__all__ = [
    "DPOConfig", "DPOTrainer", "KTOConfig", "KTOTrainer", "ORPOConfig", "ORPOTrainer", "PRMConfig", "PRMTrainer",
    "RewardConfig", "RewardTrainer", "SFTConfig", "SFTTrainer",
]  # fmt: skip
