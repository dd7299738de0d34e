"""Trainers on what the model writes: they learn, resume, say what they saw, and refuse what they cannot do."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

import align_models as small
from align_models import logs, vowels
from tutti.align import (
    GRPOConfig,
    GRPOTrainer,
    PPOConfig,
    PPOTrainer,
    ReinforceConfig,
    ReinforceTrainer,
    RLOOConfig,
    RLOOTrainer,
)
from tutti.align.policy import completions_of
from tutti.align.rewards.scoring import ModelReward
from tutti.align.rollouts.rollout import Sampler
from tutti.align.sequences import IGNORED
from tutti.serve import Sampling

PROMPTS = [{"prompt": f"{i}+{i}=", "target": "a"} for i in range(8)]
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "grpo": (GRPOTrainer, GRPOConfig, {"num_generations": 4}),
    "gspo": (GRPOTrainer, GRPOConfig, {"num_generations": 4, "importance_sampling_level": "sequence", "beta": 0.01}),
    "rloo": (RLOOTrainer, RLOOConfig, {"num_generations": 4}),
    "reinforce": (ReinforceTrainer, ReinforceConfig, {}),
    "ppo": (PPOTrainer, PPOConfig, {"num_ppo_epochs": 2}),
}


def trainer_of(kind: str, path: Any, reward: Any = vowels, rows: Any = PROMPTS, **more: Any) -> Any:
    trainer_class, config, own = KINDS[kind]
    options = small.policy_options(path, **{**own, **more})
    model, held_out = options.pop("model", None) or small.model(), options.pop("eval_dataset", None)
    return trainer_class(model, reward, config(**options), train_dataset=rows, eval_dataset=held_out,
                         processing_class=small.tokenizer())  # fmt: skip


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: x.detach().clone() for name, x in trainer.model.state_dict().items()}


@pytest.mark.parametrize("kind", KINDS)
def test_rewards_rise(kind, tmp_path):
    trainer = trainer_of(kind, tmp_path, max_steps=16, learning_rate=2e-2, per_device_train_batch_size=32)
    trainer.train()
    rewards = logs(trainer, "reward")
    assert sum(rewards[-3:]) / 3 > 2 * sum(rewards[:3]) / 3
    assert all(x == x for x in logs(trainer))
    if trainer.needs_old:
        assert max(logs(trainer, "sampling/logprob_difference/max")) < 1e-5
    assert all(x >= 0 for x in logs(trainer, "kl"))


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_devices_and_parts_change_nothing(kind, tmp_path):
    small.check_devices_and_parts(lambda path, **options: trainer_of(kind, path, **options), tmp_path)


@pytest.mark.parametrize("kind", ["gspo", "ppo"])
def test_a_run_that_resumes_goes_on_bit_for_bit(kind, tmp_path):
    """In the middle of a round: what is left of it, the weights, and what adapts are in the checkpoint."""
    options = {"generation_batch_size": 32, "num_iterations": 2} if kind == "gspo" else {"kl_target": 0.1}
    whole = trainer_of(kind, tmp_path / "whole", max_steps=6, **options)
    whole.train()
    trainer_of(kind, tmp_path / "run", max_steps=3, save_strategy="steps", save_steps=3, **options).train()
    resumed = trainer_of(kind, tmp_path / "run", max_steps=6, **options)
    resumed.train(resume_from_checkpoint=True)
    assert logs(resumed)[-3:] == logs(whole)[-3:]
    after = weights(resumed)
    assert all(torch.equal(x, after[name]) for name, x in weights(whole).items())


def test_the_engine_has_the_weights_of_the_moment(tmp_path):
    trainer = trainer_of("rloo", tmp_path, max_steps=3)
    trainer.train()
    engine = trainer.sampler.engine
    trainer.sampler.update(trainer.policy_weights())
    own = trainer.model.state_dict()
    for name in engine.runner.store.names("param"):
        assert torch.equal(engine.runner.store.whole(name), own[name.removeprefix("param:model.")]), name
    assert max(logs(trainer, "sampling/logprob_difference/max")) < 1e-5, "after each of the updates"


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.7}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.3, "temperature": 1.5}]
)
def test_log_probabilities_are_of_one_distribution(sampling, tmp_path):
    """However tokens are chosen: a truncated distribution compared with a whole one would differ by what it keeps."""
    trainer = trainer_of("rloo", tmp_path, max_steps=1, **sampling)
    trainer.train()
    assert logs(trainer, "sampling/logprob_difference/max")[0] < 1e-5


def test_padding_and_prompts_are_not_learned(tmp_path):
    trainer = trainer_of("grpo", tmp_path, rows=[{"prompt": "a" * (1 + 5 * i)} for i in range(4)])
    rows = [trainer.train_dataset[i] for i in range(4)]
    rollouts = trainer.generate(rows, 0)
    batch = trainer.batch_of_rollouts(rollouts, torch.zeros(16))
    for row, x in enumerate(rollouts):
        labels = batch["labels"][row]
        assert labels[labels != IGNORED].tolist() == x.tokens
        assert batch["attention_mask"][row].sum() == len(x.prompt) + len(x.tokens)
        assert batch["input_ids"][row, : len(x.prompt)].tolist() == x.prompt


def test_truncated_completions_are_masked_where_asked(tmp_path):
    trainer = trainer_of("grpo", tmp_path, mask_truncated_completions=True, max_completion_length=2)
    rollouts = trainer.generate([trainer.train_dataset[i] for i in range(4)], 0)
    labels = trainer.batch_of_rollouts(rollouts, torch.zeros(16))["labels"]
    for row, x in enumerate(rollouts):
        assert bool((labels[row] != IGNORED).any()) == x.ended
    assert not all(x.ended for x in rollouts)
    trainer.train()
    assert all(x == x for x in logs(trainer))


def test_rewards_that_are_no_numbers_are_counted_and_teach_nothing(tmp_path):
    def some(completions: list[str]) -> list[float | None]:
        return [None if i % 4 == 0 else float("nan") if i % 4 == 1 else float(i % 4) for i in range(len(completions))]

    trainer = trainer_of("grpo", tmp_path, some)
    trainer.train()
    assert logs(trainer, "rewards/without") == [0.5, 0.5]
    assert all(x == x for x in [*logs(trainer), *logs(trainer, "reward"), *logs(trainer, "grad_norm")])


def test_equal_rewards_change_nothing(tmp_path):
    trainer = trainer_of("grpo", tmp_path, lambda completions: [1.0] * len(completions))
    before = weights(trainer)
    trainer.train()
    assert all(torch.equal(x, before[name]) for name, x in weights(trainer).items())
    assert logs(trainer, "frac_reward_zero_std") == [1.0, 1.0]


def test_several_rewards_are_weighted_and_logged(tmp_path):
    def one(completions: list[str]) -> list[float]:
        return [1.0] * len(completions)

    def target(completions: list[str], target: list[str]) -> list[float]:
        return [2.0 * (x == "a") for x in target]

    trainer = trainer_of("grpo", tmp_path, [one, target], reward_weights=[0.5, 0.25], log_completions=True)
    trainer.train()
    assert logs(trainer, "rewards/one/mean") == [1, 1] and logs(trainer, "rewards/target/mean") == [2, 2]
    assert logs(trainer, "reward") == [1, 1]
    rows = [json.loads(x) for x in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert len(rows) == 32 and rows[0]["one"] == 1 and rows[0]["reward"] == 1 and rows[-1]["step"] == 1


def test_a_model_as_reward(tmp_path):
    from transformers import LlamaForSequenceClassification

    torch.manual_seed(0)
    config = small.model().config
    config.num_labels = 1
    reward = LlamaForSequenceClassification(config).eval()
    trainer = trainer_of("grpo", tmp_path, reward)
    rollouts = trainer.generate([trainer.train_dataset[i] for i in range(4)], 0)
    rows = [PROMPTS[0]] * 16
    rewards = trainer.rewards(completions_of(rollouts, rows))
    for i, x in enumerate(rollouts):
        with torch.no_grad():
            expected = reward(torch.tensor([x.prompt + x.tokens])).logits
        torch.testing.assert_close(rewards[i], expected[0], rtol=1e-4, atol=1e-5)


def test_a_reward_model_pads_with_the_token_that_it_looks_for():
    from transformers import LlamaForSequenceClassification

    config = small.model().config
    config.num_labels, config.pad_token_id = 1, 3  # the tokenizer has 0
    model = LlamaForSequenceClassification(config)
    reward = ModelReward(model, small.tokenizer())
    rewards = reward([[5], [5, 6, 7]], [[8, 9], [8, 9, 10, 11, 12, 13]])
    with torch.no_grad():
        assert rewards[0] == pytest.approx(float(model(torch.tensor([[5, 8, 9]])).logits), abs=1e-5)


def test_it_stops_where_the_divergence_is_too_large(tmp_path):
    trainer = trainer_of("gspo", tmp_path, max_steps=20, learning_rate=0.1, target_kl=0.5)
    trainer.train()
    assert logs(trainer, "stopped_by_kl") and trainer.state.global_step < 20


def adapted(kind: str) -> Any:
    """A model with adapters that change it."""
    from peft import IA3Config, LoraConfig, get_peft_model

    targets = {"embedding": ["embed_tokens", "q_proj"], "head": ["lm_head"]}.get(kind.removeprefix("tied "))
    lora = LoraConfig(r=4, target_modules=targets or ["q_proj", "down_proj"], use_dora=kind == "dora")
    if "module" in kind:
        lora.modules_to_save = ["embed_tokens" if "tied" in kind else "lm_head", "norm"]
    if "tokens" in kind:
        lora.trainable_token_indices = {"embed_tokens": [5, 7, 20]}
    ia3 = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    return get_peft_model(small.model(tie_word_embeddings="tied" in kind), ia3 if kind == "ia3" else lora)


def change(model: Any) -> None:
    """Change the parameters that learn."""
    with torch.no_grad():
        for x in model.parameters():
            if x.requires_grad:
                x += 0.1 * torch.randn_like(x)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
@pytest.mark.parametrize("plan", ["single", "tp2"])
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("kind", ["lora", "dora", "ia3", "embedding", "head", "module", "tokens", "tied embedding",
                                  "tied module", "tied tokens"])  # fmt: skip
def test_the_engine_generates_with_the_adapters_of_the_moment(kind, plan):
    tuned = adapted(kind)
    sampler = Sampler(tuned, small.tokenizer(), Sampling(max_tokens=8), 32, 4, plan=plan,
                      cluster="cpu:2" if plan == "tp2" else "cpu:1")  # fmt: skip
    used = (x for name, x in tuned.named_parameters() if "original_module" not in name)
    frozen = {x.data_ptr() for x in used if not x.requires_grad}
    store = sampler.engine.runner.store
    for _ in range(2):
        change(tuned)
        sampler.update(tuned.state_dict())
        ((rollout,),) = sampler.generate([[5, 6, 7]], 1, seed=0)
        with torch.no_grad():
            logits = tuned.eval()(torch.tensor([rollout.prompt + rollout.tokens])).logits[0].log_softmax(-1)
        expected = logits[2:-1].gather(1, torch.tensor(rollout.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, rtol=0, atol=1e-5)
    stored = {x.data_ptr() for parts in store.parts for x in parts.values()}
    assert (plan == "tp2" and not frozen & stored) or frozen <= stored, "frozen parameters are not copied"
    own = {x.data_ptr() for x in tuned.parameters() if x.requires_grad}
    assert not own & stored, "those that learn are: a step may change them while the engine generates"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_adapters_of_a_quantized_engine_are_not_rounded(quantize):
    from peft import LoraConfig, get_peft_model

    tuned = get_peft_model(small.model(hidden_size=64), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    sampler = Sampler(tuned, small.tokenizer(), Sampling(max_tokens=8), 32, 4, quantize=quantize)
    change(tuned)
    sampler.update(tuned.state_dict())
    store, layer = sampler.engine.runner.store, "model.layers.0.self_attn.q_proj"
    own = tuned.get_base_model().state_dict()
    for name in (f"{layer}.lora_A.default.weight", f"{layer}.lora_B.default.weight"):
        assert torch.equal(store.whole(f"param:model.{name}"), own[name])
    assert store.whole(f"param:model.{layer}.base_layer.q").dtype != torch.float32
    assert len(sampler.generate([[5, 6, 7]], 1, seed=0)[0][0].tokens) > 0


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_adapters_alone_learn_and_the_reference_is_the_model_without_them(tmp_path):
    from peft import LoraConfig, get_peft_model

    base = small.model()
    before = {name: x.clone() for name, x in base.state_dict().items()}
    torch.manual_seed(0)
    tuned = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "lm_head"], task_type="CAUSAL_LM"))
    trainer = trainer_of("rloo", tmp_path, model=tuned, max_steps=4)
    assert trainer.ref_model is None
    trainer.train()
    after = {name.replace("base_layer.", ""): x for name, x in tuned.get_base_model().state_dict().items()}
    assert all(torch.equal(x, after[name]) for name, x in before.items())
    assert max(logs(trainer, "sampling/logprob_difference/max")) < 1e-5, "the engine has the adapters' weights"
    kl = logs(trainer, "kl")
    assert kl[0] < 1e-6 < kl[-1], "the reference has none of them"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`", "ignore:Model has `tie_word_embeddings=True`")
def test_rollouts_have_adapters_of_one_of_two_tied_embeddings_and_modules_that_are_saved(tmp_path):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    lora = LoraConfig(r=4, target_modules=["embed_tokens"], modules_to_save=["norm"], task_type="CAUSAL_LM")
    trainer = trainer_of(
        "rloo", tmp_path, model=get_peft_model(small.model(tie_word_embeddings=True), lora), max_steps=3
    )
    trainer.train()
    assert max(logs(trainer, "sampling/logprob_difference/max")) < 1e-5 and logs(trainer, "kl")[-1] > 1e-6


def test_a_saved_policy_is_a_plain_model(tmp_path):
    from transformers import AutoModelForCausalLM

    trainer = trainer_of("ppo", tmp_path)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    model, about = loaded
    assert not about["unexpected_keys"] and not about["missing_keys"]
    assert torch.equal(model.lm_head.weight, trainer.model.lm_head.weight)


def message(kind: str, path: Any, *args: Any, **more: Any) -> str:
    with pytest.raises(ValueError) as caught:
        trainer_of(kind, path, *args, **more).train()
    return str(caught.value)


def test_errors(tmp_path):
    assert "there is no reward" in message("grpo", tmp_path, [])
    assert "a round of 16 completions; it must be a multiple of num_generations (3)" in message(
        "grpo", tmp_path, num_generations=3
    )
    assert "num_generations must be at least 2" in message("grpo", tmp_path, num_generations=1)
    assert "temperature is 0" in message("grpo", tmp_path, temperature=0)
    assert "nothing is left for prompts" in message("grpo", tmp_path, max_completion_length=256)
    long = [{"prompt": "a" * 300}]
    assert "the prompt has 301 tokens; 248 fit" in message("grpo", tmp_path, rows=long)
    assert "it needs prompt" in message("grpo", tmp_path, rows=[{"text": "a"}])
    assert "returned 1 numbers for 16 completions" in message("grpo", tmp_path, lambda completions: [1.0])
    assert "takes words, which is no column" in message("grpo", tmp_path, lambda words: words)
    assert "2 reward_weights for 1 rewards" in message("grpo", tmp_path, reward_weights=[1, 2])
    assert "target_kl measures the divergence" in message("grpo", tmp_path, target_kl=1.0)
    assert "gamma is 2" in message("ppo", tmp_path, gamma=2.0)


def test_options_that_ppo_calls_otherwise_are_refused(tmp_path):
    for name, value, own in (
        ("beta", 0.0, "kl_coef"),
        ("num_iterations", 1, "num_ppo_epochs"),
        ("epsilon", 0.1, "cliprange"),
    ):
        assert f"{name}={value}: PPO calls it {own}: give {own}={value}" in message("ppo", tmp_path, **{name: value})
    args = PPOConfig(str(tmp_path), kl_coef=0.1, num_ppo_epochs=3, cliprange=0.3)
    assert (args.beta, args.num_iterations, args.epsilon) == (0.1, 3, 0.3)
    assert dataclasses.replace(args, seed=1).beta == 0.1


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_completions_of_held_out_prompts_are_scored_and_change_nothing(kind, tmp_path):
    plain = trainer_of(kind, tmp_path / "plain", learning_rate=0.1)
    plain.train()
    trainer = trainer_of(kind, tmp_path / "run", eval_dataset=PROMPTS[:4], eval_strategy="steps", eval_steps=1,
                         learning_rate=0.1)  # fmt: skip
    before = trainer.evaluate()
    assert before["eval_reward"] == trainer.evaluate(PROMPTS[:4])["eval_reward"] == before["eval_rewards/vowels/mean"]
    trainer.train()
    assert logs(trainer) == logs(plain)
    during, after = logs(trainer, "eval_reward"), trainer.evaluate()["eval_reward"]
    assert len(during) == 2 and during[-1] == after != before["eval_reward"]
    assert trainer.evaluate({"a": PROMPTS[:2]})["eval_a_completions/max_length"] <= 8
    with pytest.raises(ValueError, match="use evaluate"):
        trainer.predict(PROMPTS)
