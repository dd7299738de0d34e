"""Options of `tutti.Trainer`: those that it has, and those that it refuses."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import Seq2SeqTrainingArguments, TrainerCallback, trainer_callback
from transformers.integrations import integration_utils

import tutti
from tutti.launch.progress import told_by
from tutti.train.trainer import arguments as table
from tutti.train.trainer.optimizers import class_and_options

SIZES = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
         "num_attention_heads": 2, "max_position_embeddings": 64}  # fmt: skip
ROWS = [{"input_ids": [1 + (i + j) % 15 for j in range(8)], "labels": [1 + (i + j) % 15 for j in range(8)]}
        for i in range(12)]  # fmt: skip


def llama(**options):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SIZES | options)))


def arguments(folder, **options):
    usual = {"global_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1, "max_steps": 4, "save_strategy": "no",
             "report_to": "none", "disable_tqdm": True, "use_cpu": True, "level": "O0", "plan": "dp",
             "lr_scheduler_type": "constant"}  # fmt: skip
    return tutti.TrainingArguments(str(folder), **(usual | options))


def trained(folder, model=None, callbacks=(), **options):
    trainer = tutti.Trainer(llama() if model is None else model, arguments(folder, **options), train_dataset=ROWS,
                            eval_dataset=ROWS[:6], callbacks=[*callbacks])  # fmt: skip
    trainer.train()
    return trainer


def losses(trainer, key="loss"):
    return [line[key] for line in trainer.state.log_history if key in line]


# -- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"accelerator_config": {"split_batches": True}}, "split_batches=True .*; use global_batch_size"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches"),
        ({"average_tokens_across_devices": False}, "means over the items"),
        ({"ddp_timeout": 60}, "tutti run --hang"),
        ({"skip_memory_metrics": False}, "tutti diagnose"),
    ],
)
def test_an_option_without_effect_is_refused(tmp_path, options, said):
    with pytest.raises(ValueError, match=said):
        tutti.Trainer(llama(), arguments(tmp_path, **options))


@pytest.mark.parametrize(
    "option", [{"predict_with_generate": True}, {"generation_max_length": 9}, {"sortish_sampler": True}]
)
def test_options_of_seq2seq_are_refused(tmp_path, option):
    args = Seq2SeqTrainingArguments(str(tmp_path), report_to="none", use_cpu=True, **option)
    with pytest.raises(ValueError, match=f"{next(iter(option))}=.* is not an option of tutti.Trainer; use "):
        tutti.Trainer(llama(), args)


# Options that mean something elsewhere: to scripts, to the hub, to what is refused beside them, to the class itself.
ELSEWHERE = {
    "do_train", "do_eval", "do_predict", "resume_from_checkpoint", "local_rank", "log_level", "log_level_replica",
    "log_on_each_node", "hub_model_id", "hub_token", "hub_private_repo", "hub_always_push", "hub_revision",
    "hub_strategy", "fsdp_config", "torch_compile_backend", "torch_compile_mode", "gradient_checkpointing",
    "gradient_checkpointing_kwargs", "tf32", "warmup_steps", "logging_steps", "eval_steps", "save_steps", "use_cpu",
}  # fmt: skip


def test_no_option_is_silently_ignored():
    """Each is read by this package or by the parts of transformers that it uses, or refused."""
    code = "".join(path.read_text() for path in Path(table.__file__).parent.glob("*.py"))
    code += inspect.getsource(trainer_callback) + inspect.getsource(integration_utils)
    code += inspect.getsource(transformers.Trainer.get_optimizer_cls_and_kwargs)
    read = set(re.findall(r"args\.(\w+)", code)) | set(re.findall(r'option\(\w*\.?args, "(\w+)"', code))
    refused = table.INSTEAD.keys() | table.ONLY.keys() | {"accelerator_config"}
    for kind in (Seq2SeqTrainingArguments, tutti.TrainingArguments):
        assert {f.name for f in fields(kind)} - read - refused - ELSEWHERE == set()


# -- optimizers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optim", ["muon", "lion", "lamb", "adamw8bit"])
def test_optimizers_by_name(tmp_path, optim):
    named = trained(tmp_path, optim=optim, learning_rate=3e-3, max_steps=3)
    kinds = {"muon": tutti.optim.Muon, "lion": tutti.optim.Lion, "lamb": tutti.optim.Lamb,
             "adamw8bit": tutti.optim.AdamW8bit}  # fmt: skip
    model = llama()
    args = {"lr": 3e-3, "weight_decay": 0.0}
    if optim != "lion":
        args |= {"betas": (0.9, 0.999), "eps": 1e-8}
    optimizer = kinds[optim](model if optim == "muon" else model.parameters(), **args)
    own = tutti.Trainer(model, arguments(tmp_path, max_steps=3), train_dataset=ROWS,
                        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)))  # fmt: skip
    own.train()
    assert losses(named) == pytest.approx(losses(own), rel=1e-5)
    assert type(named.optimizer) is kinds[optim] and losses(named)[-1] < losses(named)[0]


def test_options_of_an_optimizer(tmp_path):
    trainer = tutti.Trainer(
        llama(), arguments(tmp_path, optim="muon", optim_args="ns_dtype=torch.float32, betas=(0.8, 0.9)")
    )
    group = trainer.create_optimizer().param_groups[0]
    assert group["ns_dtype"] is torch.float32 and group["betas"] == (0.8, 0.9) and group["use_muon"]
    for wrong, said in [
        ("steps=3", "no option 'steps'"),
        ("ns_steps", "name=value"),
        ("ns_dtype=torch.float23", "name=value"),
    ]:
        with pytest.raises(ValueError, match=said):
            tutti.Trainer(llama(), arguments(tmp_path, optim="muon", optim_args=wrong)).create_optimizer()
    with pytest.raises(ValueError, match="moun"):
        arguments(tmp_path, optim="moun")


def test_learning_rates_decay_by_layer(tmp_path):
    trainer = trained(tmp_path, llama(num_hidden_layers=3), layerwise_lr_decay=0.5, max_steps=2)
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    rates = {names[id(p)]: group["lr"] for group in trainer.optimizer.param_groups for p in group["params"]}
    assert rates["lm_head.weight"] == rates["model.norm.weight"] == 1e-2
    assert [rates[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(3)] == [0.125e-2, 0.25e-2, 0.5e-2]
    assert rates["model.embed_tokens.weight"] == 0.0625e-2
    assert losses(trainer, "learning_rate") == [1e-2] * 2
    with pytest.raises(ValueError, match=r"tutti\.optim\.groups"):
        optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
        tutti.Trainer(llama(), arguments(tmp_path, layerwise_lr_decay=0.5), optimizers=(optimizer, None))
    with pytest.raises(ValueError, match="at most 1"):
        trained(tmp_path, layerwise_lr_decay=2.0)


class Weights(TrainerCallback):
    """The weights after each step."""

    def __init__(self):
        self.weights: list[torch.Tensor] = []
        self.trainer: Any = None

    def on_step_end(self, args, state, control, **kwargs):
        self.weights.append(self.trainer.step.state_dict()["lm_head.weight"])


def test_averaged_weights(tmp_path):
    seen, first = Weights(), llama().lm_head.weight.detach()
    args = arguments(tmp_path, ema_decay=0.5, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2)
    trainer = tutti.Trainer(llama(), args, train_dataset=ROWS, eval_dataset=ROWS[:6], callbacks=[seen])
    seen.trainer = trainer
    trainer.train()
    average = first
    for weight in seen.weights:
        average = 0.5 * average + 0.5 * weight
    torch.testing.assert_close(trainer.model.lm_head.weight.detach(), average)
    stored = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    torch.testing.assert_close(stored.lm_head.weight.detach(), average)
    ids = torch.tensor([row["input_ids"] for row in ROWS[:6]])
    with torch.no_grad():
        wanted = stored.eval()(ids, labels=ids).loss.item()
    assert losses(trainer, "eval_loss")[-1] == pytest.approx(wanted, rel=1e-5)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(wanted, rel=1e-5)
    plain = trained(tmp_path / "plain")
    assert losses(trainer) == pytest.approx(losses(plain), rel=1e-6), "training itself does not change"
    again = tutti.Trainer(llama(), args, train_dataset=ROWS, eval_dataset=ROWS[:6])
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    torch.testing.assert_close(again.model.lm_head.weight, trainer.model.lm_head.weight, rtol=0, atol=0)


def test_the_best_averages_are_loaded(tmp_path):
    for more in ({}, {"save_only_model": True}):
        trainer = trained(tmp_path, ema_decay=0.5, eval_strategy="steps", eval_steps=1, save_strategy="steps",
                          save_steps=1, load_best_model_at_end=True, **more)  # fmt: skip
        assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-5)


# -- mistakes and messages -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
def test_the_best_adapters_are_loaded(tmp_path):
    from peft import LoraConfig, get_peft_model

    class Worse(TrainerCallback):
        """Later steps make the model worse."""

        def on_step_end(self, args, state, control, optimizer=None, **kwargs):
            for group in optimizer.param_groups:
                group["lr"] = 3.0

    for more in ({}, {"save_only_model": True}):
        model = get_peft_model(
            llama(num_hidden_layers=3), LoraConfig(target_modules=["q_proj", "v_proj"], r=2, lora_dropout=0.0)
        )
        trainer = trained(tmp_path, model, [Worse()], eval_strategy="steps", eval_steps=1, save_strategy="steps",
                          save_steps=1, load_best_model_at_end=True, learning_rate=1e-2, **more)  # fmt: skip
        every = losses(trainer, "eval_loss")
        assert trainer.state.best_metric == min(every) < every[-1]
        assert trainer.evaluate()["eval_loss"] == pytest.approx(min(every), rel=1e-5)


def test_a_new_shape_is_told(tmp_path):
    said = []
    rows = [*ROWS[:8], *({"input_ids": [1] * 12, "labels": [1] * 12} for _ in range(4))]
    args = arguments(tmp_path, train_sampling_strategy="sequential", max_steps=3)
    trainer = tutti.Trainer(llama(), args, train_dataset=rows)
    with told_by(said.append):
        trainer.train()
    assert said.count("capturing the step") == 1
    assert said.count("capturing the step again: a batch of another shape: input_ids has (4, 12)") == 1
    later = said[said.index("capturing the step again: a batch of another shape: input_ids has (4, 12)") :]
    assert "lowering the plan" in later and said[-1] == ""


def test_no_mask_is_made_for_sequences_that_are_not_packed(tmp_path):
    plain = trained(tmp_path, max_steps=1)
    assert plain.step is not None and not {"le", "bitwise_and", "cumsum"} & {x.name for x in plain.step.graph.calls}
    positions = list(range(4)) * 2  # two sequences in each row
    rows = [{**row, "position_ids": positions} for row in ROWS]
    packed = tutti.Trainer(llama(), arguments(tmp_path, max_steps=1), train_dataset=rows)
    packed.train()
    order = torch.randperm(12, generator=torch.Generator().manual_seed(42))[:4]
    ids = torch.tensor([ROWS[i]["input_ids"] for i in order])
    with torch.no_grad():
        wanted = llama()(ids, labels=ids, position_ids=torch.tensor([positions] * 4), use_cache=False).loss.item()
    assert losses(packed)[0] == pytest.approx(wanted, rel=1e-5) and losses(packed)[0] != losses(plain)[0]


class Clamps(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            kwargs["model"].model.layers[0].mlp.up_proj.weight.data.clamp_(-1e-3, 1e-3)


@pytest.mark.parametrize(("plan", "cluster"), [("single", "cpu:1"), ("zero3", "cpu:2")])
def test_a_callback_writes_into_the_model(tmp_path, plan, cluster):
    options = {"learning_rate": 1e-2, "logging_steps": 1, "max_steps": 4, "save_strategy": "no", "report_to": "none",
               "disable_tqdm": True, "use_cpu": True, "lr_scheduler_type": "constant"}  # fmt: skip
    args = transformers.TrainingArguments(str(tmp_path), per_device_train_batch_size=4, **options)
    theirs = transformers.Trainer(llama(), args, train_dataset=ROWS, callbacks=[Clamps(2)])
    theirs.train()
    ours = trained(tmp_path, callbacks=[Clamps(2)], plan=plan, cluster=cluster)
    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-4)
    assert losses(ours) != losses(trained(tmp_path, plan=plan, cluster=cluster))


def test_options_of_the_step(tmp_path):
    model = llama().to(torch.bfloat16)
    with pytest.raises(ValueError, match="is not finite"):
        trained(tmp_path, model, learning_rate=1e30, max_nonfinite_steps=0, max_grad_norm=0.0, fp32_master_weights=True)
    rounded = trained(tmp_path, llama().to(torch.bfloat16), stochastic_rounding=True)
    assert losses(rounded)[-1] < losses(rounded)[0]


def test_optimizers_and_engines_of_others_name_ours(tmp_path):
    with pytest.raises(ValueError, match="optim is 'muonn'; did you mean 'muon'"):
        tutti.TrainingArguments(str(tmp_path), optim="muonn", use_cpu=True)
    with pytest.raises(ValueError, match=r"deepspeed='a.json' is not an option of tutti.Trainer; use plan=\"zero1\""):
        tutti.TrainingArguments(str(tmp_path), deepspeed="a.json", use_cpu=True)
    args = tutti.TrainingArguments(str(tmp_path), optim="adamw_bnb_8bit", use_cpu=True)
    with pytest.raises(ValueError, match="optim='adamw_bnb_8bit' is one of bitsandbytes; use 'adamw8bit'"):
        class_and_options(args)
