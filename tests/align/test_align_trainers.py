"""Trainers of alignment on small models: what they learn, what they log, and what they refuse."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForSequenceClassification, LlamaForTokenClassification

import align_models as small
from tutti.align import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    ORPOConfig,
    ORPOTrainer,
    PRMConfig,
    PRMTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

COMPLETIONS = [{"prompt": f"{i}+{i}=", "completion": str(2 * i)} for i in range(16)]
PAIRS = [{"prompt": f"{i}+{i}=", "chosen": str(2 * i), "rejected": str(3 * i + 1)} for i in range(16)]
LABELLED = [{"prompt": f"{i}+{i}=", "completion": str(2 * i + i % 2), "label": i % 2 == 0} for i in range(16)]
STEPS = [{"prompt": f"{i}?", "completions": ["a" * (i + 1), "b"], "labels": [True, i % 2 == 0]} for i in range(8)]
KINDS: dict[str, tuple[Any, Any, Any]] = {
    "sft": (SFTTrainer, SFTConfig, COMPLETIONS),
    "dft": (SFTTrainer, SFTConfig, COMPLETIONS),
    "dpo": (DPOTrainer, DPOConfig, PAIRS),
    "kto": (KTOTrainer, KTOConfig, LABELLED),
    "orpo": (ORPOTrainer, ORPOConfig, PAIRS),
    "reward": (RewardTrainer, RewardConfig, PAIRS),
    "prm": (PRMTrainer, PRMConfig, STEPS),
}
CHANGES = {"dft": {"loss_type": "dft"}}


def options(path: Any, **more: Any) -> dict[str, Any]:
    return {"output_dir": str(path), "max_steps": 3, "logging_steps": 1, "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 8, "learning_rate": 1e-2, "report_to": "none", "disable_tqdm": True,
            "seed": 0, "save_strategy": "no", "level": "O0", "plan": "single", "lr_scheduler_type": "constant",
            **more}  # fmt: skip


def model_for(kind: str) -> Any:
    base = small.model()
    if kind not in ("reward", "prm"):
        return base
    config = copy.deepcopy(base.config)
    config.num_labels = 1 if kind == "reward" else 2
    torch.manual_seed(1)
    return (LlamaForSequenceClassification if kind == "reward" else LlamaForTokenClassification)(config)


def trainer_of(kind: str, path: Any, rows: Any = None, model: Any = None, **more: Any) -> Any:
    trainer_class, config, data = KINDS[kind]
    args = config(**options(path, **CHANGES.get(kind, {}), **more))
    return trainer_class(model or model_for(kind), args=args, train_dataset=rows or data, eval_dataset=rows or data,
                         processing_class=small.tokenizer())  # fmt: skip


def losses(trainer: Any) -> list[float]:
    return [x["loss"] for x in trainer.state.log_history if "loss" in x]


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns(kind, tmp_path):
    trainer = trainer_of(kind, tmp_path, max_steps=8)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    if kind == "dft":  # whose loss of a token is largest at p = 1 / e
        assert after["eval_mean_token_accuracy"] > before["eval_mean_token_accuracy"]
    else:
        assert after["eval_loss"] < before["eval_loss"]
    logged = next(x for x in trainer.state.log_history if "loss" in x)
    expected = {"dpo": "rewards/margins", "orpo": "rewards/accuracies", "kto": "kl", "reward": "accuracy",
                "prm": "accuracy"}  # fmt: skip
    assert expected.get(kind, "loss") in logged
    assert all(x == x for x in after.values())


@pytest.mark.parametrize("kind", ["sft", "dpo", "kto", "reward", "prm"])
def test_parts_and_devices_change_nothing(kind, tmp_path):
    """Two microbatches, and two virtual devices, give the losses of one."""
    whole = trainer_of(kind, tmp_path / "a")
    whole.train()
    parts = trainer_of(kind, tmp_path / "b", per_device_train_batch_size=2, gradient_accumulation_steps=2,
                       cluster="cpu:2", plan="dp")  # fmt: skip
    parts.train()
    bound = 1e-4 if kind != "kto" else 2e-2  # whose estimate of KL is of a microbatch
    assert losses(parts) == pytest.approx(losses(whole), abs=bound)


def test_packed_rows_give_the_gradients_of_single_ones(tmp_path):
    """Sequences of a packed row do not see one another."""
    plain = trainer_of("sft", tmp_path / "a", per_device_train_batch_size=16, max_steps=2)
    plain.train()
    packed = trainer_of("sft", tmp_path / "b", packing=True, max_length=240, max_steps=2, per_device_train_batch_size=1)
    assert len(packed.train_dataset) == 1
    packed.train()
    assert losses(packed) == pytest.approx(losses(plain), abs=1e-5)


def test_the_reference_is_the_model_before_training(tmp_path):
    trainer = trainer_of("dpo", tmp_path)
    first = trainer.evaluate()
    assert first["eval_loss"] == pytest.approx(torch.log(torch.tensor(2.0)).item())
    assert first["eval_rewards/margins"] == 0
    trainer.train()
    assert trainer.evaluate()["eval_rewards/margins"] > 0


def test_a_reference_of_its_own_and_none(tmp_path):
    other = small.model(seed=3).eval()
    args = DPOConfig(**options(tmp_path))
    trainer = DPOTrainer(small.model(), other, args, train_dataset=PAIRS, eval_dataset=PAIRS[:4],
                         processing_class=small.tokenizer())  # fmt: skip
    assert trainer.evaluate()["eval_rewards/margins"] != 0
    free = trainer_of("dpo", tmp_path / "free", reference_free=True)
    metrics = free.evaluate()
    assert metrics["eval_rewards/chosen"] == pytest.approx(0.1 * metrics["eval_logps/chosen"], rel=1e-4)


def test_a_run_that_resumes_has_the_same_reference(tmp_path):
    whole = trainer_of("dpo", tmp_path / "whole", max_steps=4, lr_scheduler_type="constant")
    whole.train()
    trainer_of("dpo", tmp_path / "run", max_steps=2, save_strategy="steps", save_steps=2).train()
    resumed = trainer_of("dpo", tmp_path / "run", max_steps=4, save_strategy="steps", save_steps=2)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed)[-2:] == losses(whole)[-2:]


def test_a_run_that_resumes_with_another_row_is_refused(tmp_path):
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
    trainer_of("dpo", tmp_path, max_steps=1, **saving).train()
    rows = [{**x, "rejected": "?"} if i == 5 else x for i, x in enumerate(PAIRS)]
    with pytest.raises(ValueError, match="has no log-probabilities of these rows"):
        trainer_of("dpo", tmp_path, rows, max_steps=2, **saving).train(resume_from_checkpoint=True)
    trainer_of("dpo", tmp_path, max_steps=2, **saving).train(resume_from_checkpoint=True)


def test_adapters_alone_are_trained_and_the_reference_is_the_model_without_them(tmp_path):
    from peft import LoraConfig

    base = small.model()
    before = {name: x.clone() for name, x in base.state_dict().items()}
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = DPOTrainer(base, args=DPOConfig(**options(tmp_path)), train_dataset=PAIRS, peft_config=lora,
                         processing_class=small.tokenizer())  # fmt: skip
    trainer.train()
    after = {name.replace("base_layer.", ""): x for name, x in trainer.model.get_base_model().state_dict().items()}
    assert all(torch.equal(x, after[name]) for name, x in before.items())
    assert losses(trainer)[0] == pytest.approx(0.6931, abs=1e-3) and losses(trainer)[-1] < losses(trainer)[0]


def test_conversations(tmp_path):
    chats = [{"messages": [{"role": "user", "content": f"{i}+{i}?"}, {"role": "assistant", "content": str(2 * i)}]}
             for i in range(8)]  # fmt: skip
    trainer = trainer_of("sft", tmp_path, chats, assistant_only_loss=True)
    decoded = small.tokenizer().decode([x for x in trainer.train_dataset[3]["labels"] if x != -100])
    assert decoded == "6<|end|>"
    trainer.train()
    pairs = [{"prompt": x["messages"][:1], "chosen": x["messages"][1:],
              "rejected": [{"role": "assistant", "content": "?"}]} for x in chats]  # fmt: skip
    trainer = trainer_of("dpo", tmp_path / "dpo", pairs)
    row = trainer.train_dataset[3]
    assert small.tokenizer().decode([x for x in row["rejected"]["labels"] if x != -100]).startswith("?<|end|>")
    trainer.train()


def test_what_is_cut_is_said(tmp_path):
    rows = [{"prompt": "a" * 20, "completion": "b" * 100}] * 4
    with pytest.warns(UserWarning, match="is cut to 64"):
        trainer = trainer_of("sft", tmp_path, rows, max_length=64)
        assert len(trainer.train_dataset[0]["input_ids"]) == 64
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.train_dataset[1]  # said once


@pytest.mark.parametrize("kind", ["sft", "kto"])
def test_rows_and_dicts_of_them_are_evaluated(kind, tmp_path):
    trainer, rows = trainer_of(kind, tmp_path), KINDS[kind][2]
    expected = trainer.evaluate()["eval_loss"]
    assert trainer.evaluate(rows)["eval_loss"] == expected == trainer.evaluate(trainer.eval_dataset)["eval_loss"]
    parts = trainer.evaluate({"a": rows, "b": rows[:4]})
    assert parts["eval_a_loss"] == expected
    assert parts["eval_b_loss"] == trainer.evaluate(rows[:4])["eval_loss"]
    assert trainer.predict(rows[:4]).metrics["test_loss"] == parts["eval_b_loss"]
    config, (others, _, _) = KINDS[kind][1], KINDS[kind]
    named = others(model_for(kind), args=config(**options(tmp_path)), eval_dataset={"a": rows, "b": rows[:4]},
                   processing_class=small.tokenizer())  # fmt: skip
    assert {name: x for name, x in named.evaluate().items() if "loss" in name} == {
        name: x for name, x in parts.items() if "loss" in name
    }
    assert named.evaluate("b")["eval_loss"] == parts["eval_b_loss"]
    with pytest.raises(ValueError, match="eval_dataset has no dataset 'c'; it has a, b"):
        named.evaluate("c")


@pytest.mark.filterwarnings("ignore:a sequence of")
@pytest.mark.parametrize(
    ("mode", "whole"), [("keep_start", "<s>aaaa" + "b" * 15), ("keep_end", "aa" + "b" * 17 + "</s>")]
)
def test_completions_of_kto_keep_their_places_where_they_are_cut(mode, whole, tmp_path):
    rows = [{"prompt": "a" * 4, "completion": "b" * 17, "label": True}, *LABELLED]
    trainer = trainer_of("kto", tmp_path, rows, max_length=20, truncation_mode=mode)
    row = trainer.train_dataset[0]["chosen"]
    assert small.tokenizer().decode(row["input_ids"]) == whole
    assert small.tokenizer().decode([x for x in row["labels"] if x != -100]) == whole.lstrip("<s>a")


def test_how_many_sequences_the_reference_cuts_is_said_once(tmp_path):
    rows = [*LABELLED, *({"prompt": f"{i}", "completion": "b" * 100, "label": True} for i in range(3))]
    trainer = trainer_of("kto", tmp_path, rows, max_length=64, max_steps=1)
    with pytest.warns(UserWarning, match="3 sequences of 19 rows are cut to 64 tokens") as caught:
        trainer.train()
        trainer.evaluate()
    assert len([x for x in caught if "cut to" in str(x.message)]) == 1


def test_the_divergence_of_kto_takes_completions_of_other_prompts(tmp_path):
    rows = [{"prompt": f"p{i // 2}", "completion": f"c{i}", "label": i % 2 == 0} for i in range(6)]
    trainer = trainer_of("kto", tmp_path, rows)
    texts = [small.tokenizer().decode(trainer.train_dataset[i]["rejected"]["input_ids"][1:-1]) for i in range(6)]
    assert texts == ["p0c2", "p0c2", "p1c4", "p1c4", "p2c0", "p2c0"]


@pytest.mark.parametrize("multiple", [None, 16])
def test_batches_are_padded_to_no_more_positions_than_the_model_has(multiple, tmp_path):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(small.tokenizer()), n_embd=16, n_layer=1, n_head=2,
                                       n_positions=21))  # fmt: skip
    rows = [{"text": "a" * 19}] * 4
    trainer = trainer_of("sft", tmp_path, rows, model, pad_to_multiple_of=multiple)
    assert trainer.collate([trainer.train_dataset[0]])["input_ids"].shape == (1, 21)
    assert trainer.evaluate()["eval_loss"] > 0


@pytest.mark.parametrize(("mode", "labels"), [("keep_start", [1]), ("keep_end", [0])])
def test_steps_are_cut_as_sequences_are(mode, labels, tmp_path):
    rows = [{"prompt": "a", "completions": ["b", "c" * 50], "labels": [1, 0]}] * 4
    trainer = trainer_of("prm", tmp_path, rows, max_length=40, truncation_mode=mode)
    with pytest.warns(UserWarning, match=r"a sequence of 55 tokens is cut to 40"):
        row = trainer.train_dataset[0]
    assert len(row["input_ids"]) == 40 and [x for x in row["labels"] if x != -100] == labels


def message(kind: str, path: Any, rows: Any, **more: Any) -> str:
    with pytest.raises(ValueError) as caught:
        trainer = trainer_of(kind, path, rows, **more)
        trainer.train()
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:a sequence of")
def test_errors(tmp_path):
    long = {"prompt": "a" * 90, "completion": "b", "chosen": "b", "rejected": "c"}
    assert "nothing is left to learn" in message("sft", tmp_path, [long], max_length=32)
    assert "needs text, prompt and completion" in message("sft", tmp_path, [{"words": "a"}])
    assert "needs rows with `messages`" in message("sft", tmp_path, COMPLETIONS, assistant_only_loss=True)
    equal = {"prompt": "a", "chosen": "b", "rejected": "b"}
    assert "chosen and rejected are equal" in message("dpo", tmp_path, [equal])
    assert "it needs chosen and rejected" in message("dpo", tmp_path, COMPLETIONS)
    assert "the prompt fills all 32 tokens" in message("dpo", tmp_path, [long], max_length=32)
    assert "expected one of sigmoid" in message("dpo", tmp_path, PAIRS, loss_type="sigmiod")
    assert "label_smoothing is 0.5" in message("dpo", tmp_path, PAIRS, loss_type="robust", label_smoothing=0.5)
    assert "chosen and rejected are equal" in message("reward", tmp_path, [{"chosen": "a", "rejected": "a"}])
    assert "the dataset has one row" in message("kto", tmp_path, LABELLED[:1])
    same = [{"prompt": "a", "completion": x, "label": x == "b"} for x in "bcd"]
    assert "all rows of the dataset have one prompt" in message("kto", tmp_path, same)
    assert "the prompt fills all 32 tokens" in message(
        "kto", tmp_path, [{**long, "label": True}, *LABELLED], max_length=32
    )
    fewer = {"prompt": "a", "completions": ["a", "b"], "labels": [1]}
    assert "2 steps and 1 labels" in message("prm", tmp_path, [fewer])
    with pytest.raises(ValueError, match="takes DPOConfig"):
        DPOTrainer(small.model(), args=SFTConfig(**options(tmp_path)), train_dataset=PAIRS,
                   processing_class=small.tokenizer())  # fmt: skip
    with pytest.raises(ValueError, match="the model has 2: make it with num_labels=1"):
        config = small.model().config
        config.num_labels = 2
        RewardTrainer(LlamaForSequenceClassification(config), RewardConfig(**options(tmp_path)), train_dataset=PAIRS,
                      processing_class=small.tokenizer())  # fmt: skip
