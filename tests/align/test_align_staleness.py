"""Rounds that are written ahead: how old their weights are, and that the loss corrects for it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import align_models as small
from align_models import logs, vowels
from tutti.align import (
    GKDConfig,
    GRPOConfig,
    GRPOTrainer,
    OnlineDPOConfig,
    OnlineDPOTrainer,
    PPOConfig,
    PPOTrainer,
    ReinforceConfig,
    ReinforceTrainer,
    RLOOConfig,
    RLOOTrainer,
)
from tutti.align.importance import importance_weights
from tutti.align.objectives import clipped_loss

PROMPTS = [{"prompt": f"{i}+{i}="} for i in range(8)]
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "grpo": (GRPOTrainer, GRPOConfig, {"num_generations": 4}),
    "rloo": (RLOOTrainer, RLOOConfig, {"num_generations": 4}),
    "reinforce": (ReinforceTrainer, ReinforceConfig, {}),
    "ppo": (PPOTrainer, PPOConfig, {"num_ppo_epochs": 2}),
    "online_dpo": (OnlineDPOTrainer, OnlineDPOConfig, {}),
}


def trainer_of(kind: str, path: Any, **more: Any) -> Any:
    trainer_class, config, own = KINDS[kind]
    options = small.policy_options(path, **{"max_steps": 4, **own, **more})
    return trainer_class(
        small.model(), vowels, config(**options), train_dataset=PROMPTS, processing_class=small.tokenizer()
    )


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_rounds_are_exactly_so_old(staleness, tmp_path):
    """Round i is written with the weights after max(0, i - staleness) rounds, each once, and none is written for
    nothing."""
    trainer = trainer_of("grpo", tmp_path, max_steps=10, num_iterations=2, staleness=staleness)
    experience, written = trainer.get_train_dataloader(), []
    first = [
        trainer.generate(experience.rows(i), experience.seed(i)) for i in range(3)
    ]  # with the weights of the model
    begin = trainer.begin

    def recorded(rows: Any, seed: int) -> Any:
        rollouts = begin(rows, seed)()
        written.append((seed, trainer.state.global_step, rollouts))
        return lambda: rollouts

    trainer.begin = recorded
    trainer.train()
    assert [(seed, step) for seed, step, _ in written] == [(experience.seed(i), 2 * max(0, i - staleness))
                                                           for i in range(5)]  # fmt: skip
    for i in range(3):
        assert (written[i][2] == first[i]) == (i <= staleness), i
    assert logs(trainer, "sampling/staleness") == ([min(i, staleness) for i in range(5)] if staleness else [])
    apart = logs(trainer, "sampling/logprob_difference/max")
    assert apart[0] < 1e-5 and (max(apart) < 1e-5) == (staleness == 0)
    assert not trainer.written


@pytest.mark.parametrize("kind", KINDS)
def test_stale_completions_teach(kind, tmp_path):
    trainer = trainer_of(kind, tmp_path, max_steps=20, learning_rate=2e-2, per_device_train_batch_size=32, staleness=2)
    trainer.train()
    rewards = logs(trainer, "reward")
    assert sum(rewards[-3:]) / 3 > 1.5 * sum(rewards[:3]) / 3, rewards
    largest = logs(trainer, "sampling/importance_sampling_ratio/max")
    assert trainer.corrects == (kind != "online_dpo") == bool(largest)
    assert all(x <= 3 + 1e-6 for x in largest)
    if largest:
        assert largest[0] == pytest.approx(1, abs=1e-5) and max(largest) > 1.05


def test_weights_are_1_where_nothing_is_stale(tmp_path):
    plain = trainer_of("grpo", tmp_path / "a")
    plain.train()
    corrected = trainer_of("grpo", tmp_path / "b", importance_sampling_correction=True)
    corrected.train()
    for name in ("min", "mean", "max"):
        assert logs(corrected, f"sampling/importance_sampling_ratio/{name}") == pytest.approx([1] * 4, abs=1e-5)
    assert logs(corrected) == pytest.approx(logs(plain), abs=1e-5) and not plain.corrects


def test_advantages_are_weighted(tmp_path):
    """A sampler whose tokens were likelier by e^0.5 than the trainer has them: weights of e^-0.5, or e^-4 for 8."""
    advantages = {}
    for mode in ("none", "token_truncate", "sequence_truncate"):
        correction = {"importance_sampling_correction": mode != "none"}
        correction |= {"importance_sampling_mode": mode} if mode != "none" else {}
        trainer = trainer_of("grpo", tmp_path, **correction)

        def likelier(rows: Any, seed: int, begin: Any = trainer.begin) -> Any:
            rollouts = begin(rows, seed)()
            for x in rollouts:
                x.logprobs = [logprob + 0.5 for logprob in x.logprobs]
            return lambda: rollouts

        trainer.begin = likelier
        (batch,) = trainer.round([trainer.train_dataset[i] for i in range(4)], 3)
        advantages[mode] = batch["advantages"]
        lengths = (batch["labels"] != -100).sum(1, keepdim=True)
    plain = advantages["none"]
    torch.testing.assert_close(advantages["token_truncate"], plain * math.exp(-0.5), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(advantages["sequence_truncate"], plain * torch.exp(-0.5 * lengths), rtol=1e-3, atol=1e-5)


def test_a_run_that_resumes_has_what_was_written_ahead(tmp_path):
    whole = trainer_of("grpo", tmp_path / "whole", staleness=2)
    whole.train()
    trainer_of("grpo", tmp_path / "run", staleness=2, save_strategy="steps", save_steps=2, max_steps=4).train()
    resumed = trainer_of("grpo", tmp_path / "run", staleness=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert logs(resumed)[-2:] == logs(whole)[-2:]
    assert logs(resumed, "sampling/staleness") == logs(whole, "sampling/staleness")


# -- the correction itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip_max", [None, 1.2])
def test_the_expected_gradient_of_a_bandit(clip_max):
    """With actions drawn from q, the gradient of the loss is that of the expectation under p; truncated, under
    min(p, C q)."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(5, generator=draw, dtype=torch.float64).requires_grad_()
    q = torch.softmax(torch.randn(5, generator=draw, dtype=torch.float64), 0)
    advantages = torch.randn(5, 1, generator=draw, dtype=torch.float64)
    logprobs = torch.log_softmax(logits, 0).unsqueeze(1)  # each action once, as a completion of one token
    mask = torch.ones(5, 1, dtype=torch.float64)
    for mode in ("token_truncate", "sequence_truncate"):
        weights = importance_weights(logprobs.detach(), q.log().unsqueeze(1), mask, mode, clip_max)
        each = clipped_loss((logprobs - logprobs.detach()).exp(), advantages * weights, 0.2, 0.2)
        (gradient,) = torch.autograd.grad((q.unsqueeze(1) * each).sum(), logits, retain_graph=True)
        p = logprobs.detach().exp().squeeze(1)
        measure = p if clip_max is None else torch.minimum(p, clip_max * q)
        (expected,) = torch.autograd.grad(-(measure.unsqueeze(1) * advantages * logprobs).sum(), logits,
                                          retain_graph=True)  # fmt: skip
        torch.testing.assert_close(gradient, expected)
        plain = torch.autograd.grad(-(q.unsqueeze(1) * advantages * logprobs).sum(), logits, retain_graph=True)[0]
        assert float((plain - expected).norm()) > 0.05  # without weights it is another


def test_weights_of_sequences_by_enumeration():
    """Sequences of two tokens from q, weighted, have the expectation of those of p; and weights of tokens have not."""
    draw = torch.Generator().manual_seed(1)
    p, q = (torch.softmax(torch.randn(3, 3, generator=draw, dtype=torch.float64), 1) for _ in range(2))
    pairs = [(a, b) for a in range(3) for b in range(3)]  # the first token of row 0, the second of row 1 + a % 2

    def logs_of(x: Tensor) -> Tensor:
        return torch.tensor([[float(x[0, a].log()), float(x[1 + a % 2, b].log())] for a, b in pairs])

    of_p, of_q, reward = logs_of(p), logs_of(q), torch.randn(9, generator=draw)
    mask = torch.ones(9, 2)
    weights = importance_weights(of_p, of_q, mask, "sequence_truncate", None)
    assert torch.equal(weights[:, 0], weights[:, 1])
    expected = (of_p.sum(1).exp() * reward).sum()
    torch.testing.assert_close((of_q.sum(1).exp() * weights[:, 0] * reward).sum(), expected)
    tokens = importance_weights(of_p, of_q, mask, "token_truncate", None)
    torch.testing.assert_close(tokens.prod(1), weights[:, 0])


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_long_products_are_finite_and_bounded(mode):
    logprobs, sampled = torch.full((3, 300), -0.1), torch.full((3, 300), -0.1)
    logprobs[0] -= 5.0  # products of e^-1500, 1 and e^+1500
    sampled[2] -= 5.0
    mask = torch.ones(3, 300)
    mask[:, 250:] = 0
    for clip_max in (3.0, None):
        weights = importance_weights(logprobs, sampled, mask, mode, clip_max)
        assert bool(weights.isfinite().all()) and bool((weights >= 0).all())
        assert bool((weights[1] == 1).all()) and bool((weights[:, 250:] == 1).all())
        if clip_max:
            low = math.exp(-5) if mode.startswith("token") else 0
            assert float(weights[0, 0]) == pytest.approx(low, rel=1e-4)
            assert float(weights[2, 0]) == pytest.approx(3 if mode.endswith("truncate") else 0)


def test_errors(tmp_path):
    with pytest.raises(ValueError, match="staleness is -1"):
        GRPOConfig(str(tmp_path), staleness=-1)
    with pytest.raises(ValueError, match="expected one of token_truncate"):
        GRPOConfig(str(tmp_path), importance_sampling_mode="token")
    with pytest.raises(ValueError, match="a completion is one action"):
        RLOOConfig(str(tmp_path), importance_sampling_mode="token_mask")
    with pytest.raises(ValueError, match="as soon as they are written"):
        GKDConfig(str(tmp_path), staleness=1)
    with pytest.raises(ValueError, match="clip_max is 0"):
        GRPOConfig(str(tmp_path), importance_sampling_clip_max=0.0)
