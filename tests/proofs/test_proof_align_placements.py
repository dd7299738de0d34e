"""PPO with actor, reference, critic and reward model on four processes makes the steps of one device."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

import align_models as small
from tutti.align import PPOConfig, PPOTrainer
from tutti.exec.runtimes.runtime import join_job

PLANS = "dp4", "dp2xtp2", "tp4", "zero3", "pp2xtp2"
ROWS = 16
PROMPTS = [{"prompt": f"{i}+{i}="} for i in range(2 * ROWS)]


class Trained(NamedTuple):
    """What two steps of PPO, each on completions of its own, have computed: tokens, rewards, log-probabilities of actor
    and reference and values of each round, losses, and weights."""

    tokens: list[list[list[int]]]
    rounds: list[dict[str, torch.Tensor]]
    losses: list[float]
    weights: dict[str, torch.Tensor]
    plans: dict[str, str]  # of the step, the actor's and the reference's log-probabilities, and the values


class Noted(PPOTrainer):
    """Keeps what rounds have computed."""

    def __init__(self, *args: Any, **options: Any):
        self.noted: list[dict[str, torch.Tensor]] = []
        self.tokens: list[list[list[int]]] = []
        super().__init__(*args, **options)

    def advantages(self, rollouts: Any, rewards: torch.Tensor, batch: Any) -> dict[str, torch.Tensor]:
        advantages = super().advantages(rollouts, rewards, batch)
        if "old_values" in batch and len(rewards) == ROWS and self.sampler is not None:
            names = "old_logprobs", "ref_logprobs", "old_values"
            self.noted.append({"rewards": rewards.clone(), **{x: batch[x].clone() for x in names}, **advantages})
            self.tokens.append([x.tokens for x in rollouts])
        return advantages


def reward_model() -> Any:
    """A model that rates a text by one number."""
    from transformers import LlamaForSequenceClassification

    config = small.model().config
    config.num_labels = 1
    torch.manual_seed(1)
    return LlamaForSequenceClassification(config).eval()


def trained(path: str, plan: str, ranks: int = 1, **more: Any) -> Trained:
    torch.set_num_threads(1)
    options = small.policy_options(path, plan=plan, per_device_train_batch_size=ROWS // ranks, num_ppo_epochs=1,
                                   kl_coef=0.1, vf_coef=0.5, adam_epsilon=1e-4, **more)  # fmt: skip
    trainer = Noted(small.model(), [reward_model(), small.vowels], PPOConfig(**options), train_dataset=PROMPTS,
                    processing_class=small.tokenizer())  # fmt: skip
    trainer.train()
    assert trainer.step is not None
    weights = {name: x.detach().clone() for name, x in trainer.step.state_dict().items()}
    plans = {"step": trainer.step.plan.name, **{name: x.plan.name for name, x in trainer.scorer.items()}}
    return Trained(trainer.tokens, trainer.noted, small.logs(trainer), weights, plans)


def _rank(path: str, plan: str) -> Trained:
    join_job(torch.device("cpu"))
    return trained(path, plan, ranks=4)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory) -> Trained:
    return trained(str(tmp_path_factory.mktemp("one")), "single")


def check(own: Trained, expected: Trained, plan: str) -> None:
    """Under this plan, equal tokens; all numbers within rounding of float32."""
    assert own.plans == dict.fromkeys(("step", "policy", "reference", "values"), plan)
    assert own.tokens == expected.tokens and len(own.rounds) == 2
    for ours, theirs in zip(own.rounds, expected.rounds, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)
    assert own.losses == pytest.approx(expected.losses, rel=1e-5)
    torch.testing.assert_close(own.weights, expected.weights, rtol=1e-5, atol=1e-6)


def test_what_is_compared_depends_on_every_model(one_device):
    """The actor and the critic move, the reference does not, and rewards differ."""
    first, second = one_device.rounds
    assert torch.equal(first["old_logprobs"], first["ref_logprobs"])
    assert (second["old_logprobs"] - second["ref_logprobs"]).abs().max() > 1e-2
    assert not first["old_values"].any() and second["old_values"].abs().max() > 1e-2
    assert all(x["rewards"].std() > 0.05 for x in one_device.rounds)
    before = small.model().state_dict()
    assert all((one_device.weights[name] - x).abs().max() > 1e-3 for name, x in before.items())


@pytest.mark.parametrize("plan", PLANS)
def test_two_steps_on_four_processes_are_those_of_one_device(plan, pool, one_device, tmp_path):
    first, *others = pool.run(_rank, str(tmp_path), plan)
    assert all(x.tokens == first.tokens and x.losses == first.losses for x in others)
    check(first, one_device, plan)


@pytest.mark.parametrize("plan", PLANS)
def test_two_steps_on_four_virtual_devices_are_those_of_one(plan, one_device, tmp_path):
    check(trained(str(tmp_path), plan, cluster="cpu:4"), one_device, plan)
