"""Alignment: from a base model to one that follows a reward."""

from tutti.extras import extra

with extra("train"):
    from tutti.align.best_of_n import BestOfNConfig, BestOfNTrainer
    from tutti.align.dpo import DPOConfig, DPOTrainer
    from tutti.align.gkd import GKDConfig, GKDTrainer
    from tutti.align.grpo import GRPOConfig, GRPOTrainer
    from tutti.align.kto import KTOConfig, KTOTrainer
    from tutti.align.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
    from tutti.align.orpo import ORPOConfig, ORPOTrainer
    from tutti.align.ppo import PPOConfig, PPOTrainer
    from tutti.align.prm import PRMConfig, PRMTrainer
    from tutti.align.reinforce import ReinforceConfig, ReinforceTrainer
    from tutti.align.reward import RewardConfig, RewardTrainer
    from tutti.align.rloo import RLOOConfig, RLOOTrainer
    from tutti.align.sft import SFTConfig, SFTTrainer

__all__ = [
    "BestOfNConfig", "BestOfNTrainer", "DPOConfig", "DPOTrainer", "GKDConfig", "GKDTrainer", "GRPOConfig",
    "GRPOTrainer", "KTOConfig", "KTOTrainer", "ORPOConfig", "ORPOTrainer", "OnlineDPOConfig",
    "OnlineDPOTrainer", "PPOConfig", "PPOTrainer", "PRMConfig", "PRMTrainer", "RLOOConfig", "RLOOTrainer",
    "ReinforceConfig", "ReinforceTrainer", "RewardConfig", "RewardTrainer", "SFTConfig", "SFTTrainer",
]  # fmt: skip
