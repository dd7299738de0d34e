"""Log-probabilities with the bits that the engine reports: after updates, under plans, and where it cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import align_models as small
import tutti
from align_models import logs, vowels
from tutti.align import GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer
from tutti.align.rollouts.invariant import check_invariant, invariant_logprobs
from tutti.align.sequences import model_logprobs

PROMPTS = [{"prompt": f"{i}+{i}="} for i in range(8)]


def trainer_of(path: Any, kind: Any = (PPOTrainer, PPOConfig), **more: Any) -> Any:
    trainer_class, config = kind
    options = small.policy_options(path, batch_invariant=True, **more)
    return trainer_class(
        small.model(), vowels, config(**options), train_dataset=PROMPTS, processing_class=small.tokenizer()
    )


@pytest.mark.parametrize("name, options", [
    ("one device", {}),
    ("tp2", {"plan": "tp2", "cluster": "cpu:2", "engine": {"plan": "tp2", "cluster": "cpu:2"}}),
    ("dp2", {"plan": "dp2", "cluster": "cpu:2"}),
])  # fmt: skip
def test_bits_are_equal_after_each_update(name, options, tmp_path):
    trainer = trainer_of(tmp_path, max_steps=3, num_ppo_epochs=1, temperature=0.7, top_p=0.9, **options)
    trainer.train()
    assert logs(trainer, "sampling/logprob_difference/max") == [0, 0, 0], name
    kl = logs(trainer, "objective/kl")
    assert kl[0] == 0, "the reference is scored as the policy is"
    assert abs(kl[1]) > 1e-4 and logs(trainer, "grad_norm")[0] > 0


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_adapters_have_equal_bits(tmp_path):
    from peft import LoraConfig

    lora = LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj", "lm_head"], task_type="CAUSAL_LM")
    options = small.policy_options(tmp_path, batch_invariant=True, max_steps=3, num_ppo_epochs=1)
    trainer = PPOTrainer(small.model(), vowels, PPOConfig(**options), train_dataset=PROMPTS,
                         processing_class=small.tokenizer(), peft_config=lora)  # fmt: skip
    trainer.train()
    assert logs(trainer, "sampling/logprob_difference/max") == [0, 0, 0]
    kl = logs(trainer, "objective/kl")
    assert kl[0] == 0 and abs(kl[1]) > 1e-5


def test_rounds_written_ahead_are_scored_with_the_weights_of_now(tmp_path):
    trainer = trainer_of(tmp_path, (GRPOTrainer, GRPOConfig), max_steps=3, staleness=1, num_generations=4)
    trainer.train()
    differences = logs(trainer, "sampling/logprob_difference/max")
    assert differences[0] == 0 and differences[1] > 1e-3


def test_values_of_padding_are_zero():
    model = small.model().eval()
    ids = torch.arange(10, 30).view(2, 10)
    labels = torch.where(torch.arange(10) < torch.tensor([[6], [10]]), ids, -100)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    score = tutti.function(lambda batch: invariant_logprobs(model, batch, 1.0).detach(), batch,
                           store=tutti.Store(model=model), plan="single")  # fmt: skip
    with torch.no_grad():
        expected = model_logprobs(model, batch)
    scores = score(batch)
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-6)
    assert not scores[0, 5:].any() and scores[1].all()
    whole = score({name: x.flip(0) for name, x in batch.items()}).flip(0)
    assert torch.equal(whole, scores), "the order of rows changes no bit"


def test_another_plan_of_the_engine_is_an_error(tmp_path):
    trainer = trainer_of(tmp_path, plan="tp2", cluster="cpu:2")
    with pytest.raises(RuntimeError, match=r"of \d+ log-probabilities of the engine differ .* plans 'tp2' \(trainer\)"):
        trainer.train()


def test_errors(tmp_path):
    with pytest.raises(ValueError, match="engine's quantize='int8', which changes its bits"):
        trainer_of(tmp_path, engine={"quantize": "int8"})
    with pytest.raises(ValueError, match="needs the kernels of a CPU"):
        check_invariant(small.model().to("meta"), {})
    scaled = small.model(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(ValueError, match="depend on the length"):
        check_invariant(scaled, {})
