"""Trainers that keep some of the completions of a round: online DPO and rejection sampling."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import align_models as small
from align_models import logs, vowels
from tutti.align import GRPOConfig, SFTConfig, SFTTrainer
from tutti.align.algorithms.best_of_n import BestOfNConfig, BestOfNTrainer, best_of_n
from tutti.align.algorithms.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from tutti.align.sequences import IGNORED

PROMPTS = [{"prompt": f"{i}+{i}="} for i in range(8)]
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "online_dpo": (OnlineDPOTrainer, OnlineDPOConfig, {}),
    "ipo": (OnlineDPOTrainer, OnlineDPOConfig, {"loss_type": "ipo"}),
    "best_of_n": (BestOfNTrainer, BestOfNConfig, {"num_generations": 4, "mask_truncated_completions": False}),
    "best_of_n near": (BestOfNTrainer, BestOfNConfig, {"num_generations": 4, "mask_truncated_completions": False,
                                                       "beta": 0.01}),
}  # fmt: skip


def trainer_of(kind: str, path: Any, reward: Any = vowels, **more: Any) -> Any:
    trainer_class, config, own = KINDS[kind]
    options = small.policy_options(path, temperature=1.0, **{**own, **more})
    return trainer_class(
        small.model(), reward, config(**options), train_dataset=PROMPTS, processing_class=small.tokenizer()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_rewards_rise(kind, tmp_path):
    trainer = trainer_of(kind, tmp_path, max_steps=16, learning_rate=2e-2)
    trainer.train()
    rewards = logs(trainer, "reward")
    assert sum(rewards[-3:]) / 3 > 1.5 * sum(rewards[:3]) / 3, rewards
    if kind == "online_dpo":
        assert logs(trainer)[0] == pytest.approx(math.log(2) * (1 - logs(trainer, "pairs/tied")[0]), rel=1e-4)
        assert logs(trainer, "rewards/margins")[-1] > 0
    if kind == "best_of_n":
        assert all(best >= mean for best, mean in zip(logs(trainer, "rewards/best"), rewards, strict=True))


@pytest.mark.parametrize("kind", ["online_dpo", "best_of_n"])
def test_devices_and_parts_change_nothing(kind, tmp_path):
    small.check_devices_and_parts(lambda path, **options: trainer_of(kind, path, **options), tmp_path)


@pytest.mark.parametrize("kind", ["online_dpo", "best_of_n near"])
def test_it_stops_where_the_divergence_is_too_large(kind, tmp_path):
    trainer = trainer_of(kind, tmp_path, max_steps=20, learning_rate=0.1, target_kl=0.5)
    trainer.train()
    assert logs(trainer, "stopped_by_kl")[0] > 0.5 and trainer.state.global_step < 20


def made_batch(rewards: list[float], empty: int | None = None) -> dict[str, torch.Tensor]:
    ids = torch.arange(len(rewards) * 4).view(-1, 4)
    labels = ids.clone()
    labels[:, 0] = IGNORED
    if empty is not None:
        labels[empty] = IGNORED
    return {"input_ids": ids, "labels": labels, "rewards": torch.tensor(rewards)}


def test_pairs_have_the_better_completion_first(tmp_path):
    trainer = trainer_of("online_dpo", tmp_path)
    selected = trainer.select_rows(made_batch([1, 2, 3, 0, 1, 1, math.nan, 5, 2, 4], empty=9))
    assert selected["input_ids"][:, :, 0].tolist() == [[4, 0], [8, 12], [16, 20], [24, 28], [36, 32]]
    assert selected["weights"].tolist() == [1, 1, 0, 0, 0]
    batches = trainer_of("online_dpo", tmp_path, generation_batch_size=64)
    assert [len(x["weights"]) for x in batches.round([batches.train_dataset[i % 8] for i in range(32)], 0)] == [16, 16]


def test_the_best_are_kept(tmp_path):
    trainer = trainer_of("best_of_n", tmp_path)
    selected = trainer.select_rows(made_batch([1, 3, 2, 3, math.nan, math.nan, math.nan, -2.0, 9, 1, 2, 0], empty=8))
    assert selected["rewards"].tolist() == [3, -2, 2] and selected["input_ids"][:, 0].tolist() == [4, 28, 40]


def test_rows_for_fine_tuning(tmp_path):
    args = GRPOConfig(str(tmp_path), num_generations=6, max_completion_length=5, seed=1)
    model = small.model()
    rows = best_of_n(model, small.tokenizer(), PROMPTS[:3], vowels, args, keep=2, ended=False)
    assert [x["prompt"] for x in rows] == [x["prompt"] for x in PROMPTS[:3] for _ in range(2)]
    assert all(a["reward"] >= b["reward"] for a, b in zip(rows[::2], rows[1::2], strict=True)) and model.training
    assert [x["reward"] for x in rows] == vowels([x["completion"] for x in rows])
    assert rows == best_of_n(model, small.tokenizer(), PROMPTS[:3], vowels, args, keep=2, ended=False)
    assert best_of_n(model, small.tokenizer(), PROMPTS[:3], vowels, args, least=2.0, ended=False) == []
    assert len(best_of_n(model, small.tokenizer(), PROMPTS[:1], vowels, args, keep=6)) < 6  # few have ended
    chat = [{"prompt": [{"role": "user", "content": "?"}]}]
    (row,) = best_of_n(model, small.tokenizer(), chat, lambda completions: [1.0] * len(completions), args,
                       ended=False)  # fmt: skip
    assert row["completion"][0]["role"] == "assistant"
    args = SFTConfig(str(tmp_path), max_steps=1, report_to="none", disable_tqdm=True, level="O0", plan="single",
                     save_strategy="no")  # fmt: skip
    SFTTrainer(model, args, train_dataset=rows, processing_class=small.tokenizer()).train()


def test_errors(tmp_path):
    with pytest.raises(ValueError, match="pairs have 2 completions"):
        trainer_of("online_dpo", tmp_path, num_generations=4)
    with pytest.raises(ValueError, match="beta is 0"):
        trainer_of("online_dpo", tmp_path, beta=0.0)
    with pytest.raises(ValueError, match="at least 2"):
        trainer_of("best_of_n", tmp_path, num_generations=1)
    args = GRPOConfig(str(tmp_path), max_completion_length=255)
    with pytest.raises(ValueError, match="leave long prompts out"):
        best_of_n(small.model(), small.tokenizer(), PROMPTS, vowels, args)
