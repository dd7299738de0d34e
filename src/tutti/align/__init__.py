"""Alignment: from a base model to one that follows a reward."""

from tutti.extras import extra

with extra("train"):
    from tutti.align.algorithms.best_of_n import BestOfNConfig, BestOfNTrainer
    from tutti.align.algorithms.dpo import DPOConfig, DPOTrainer
    from tutti.align.algorithms.gkd import GKDConfig, GKDTrainer
    from tutti.align.algorithms.grpo import GRPOConfig, GRPOTrainer
    from tutti.align.algorithms.kto import KTOConfig, KTOTrainer
    from tutti.align.algorithms.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
    from tutti.align.algorithms.orpo import ORPOConfig, ORPOTrainer
    from tutti.align.algorithms.ppo import PPOConfig, PPOTrainer
    from tutti.align.algorithms.prm import PRMConfig, PRMTrainer
    from tutti.align.algorithms.reinforce import ReinforceConfig, ReinforceTrainer
    from tutti.align.algorithms.reward import RewardConfig, RewardTrainer
    from tutti.align.algorithms.rloo import RLOOConfig, RLOOTrainer
    from tutti.align.algorithms.sft import SFTConfig, SFTTrainer

__all__ = [
    "BestOfNConfig", "BestOfNTrainer", "DPOConfig", "DPOTrainer", "GKDConfig", "GKDTrainer", "GRPOConfig",
    "GRPOTrainer", "KTOConfig", "KTOTrainer", "ORPOConfig", "ORPOTrainer", "OnlineDPOConfig",
    "OnlineDPOTrainer", "PPOConfig", "PPOTrainer", "PRMConfig", "PRMTrainer", "RLOOConfig", "RLOOTrainer",
    "ReinforceConfig", "ReinforceTrainer", "RewardConfig", "RewardTrainer", "SFTConfig", "SFTTrainer",
]  # fmt: skip
