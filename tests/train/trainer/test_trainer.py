"""`tutti.Trainer` against `transformers.Trainer`, and against itself under other plans and microbatches."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import EarlyStoppingCallback, TrainerCallback

import tutti
from tutti.checkpoint import folder as folders

SEQ, WORDS = 16, 40


def llama():
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
        )
    )  # fmt: skip


def bert():
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def t5():
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=WORDS, d_model=16, d_ff=32, d_kv=8, num_layers=1, num_heads=2,
                              dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0)
    )  # fmt: skip


def vit():
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=8, patch_size=4, num_channels=1, hidden_size=16, intermediate_size=32,
                               num_hidden_layers=1, num_attention_heads=2, num_labels=3)
    )  # fmt: skip


def sentences(rows=22, seed=0):
    """Rows of different lengths."""
    draw = np.random.default_rng(seed)
    return [draw.integers(1, WORDS, n).tolist() for n in draw.integers(SEQ // 2, SEQ + 1, rows)]


def pad(features):
    """A collator that pads to the longest row, as those of transformers do."""
    most = max(len(x["input_ids"]) for x in features)
    batch = {"input_ids": [], "attention_mask": [], "labels": []}
    for x in features:
        ids, labels = x["input_ids"], x["labels"]
        gap = most - len(ids)
        batch["input_ids"].append(ids + [0] * gap)
        batch["attention_mask"].append([1] * len(ids) + [0] * gap)
        batch["labels"].append(labels + [-100] * (most - len(labels)))
    return {key: torch.tensor(x) for key, x in batch.items()}


def causal(rows=22):
    return [{"input_ids": x, "labels": x} for x in sentences(rows)]


def masked(rows=22):
    draw = np.random.default_rng(1)
    examples = []
    for x in sentences(rows):
        chosen = draw.random(len(x)) < 0.4
        chosen[0] = True
        examples.append({"input_ids": [3 if c else y for c, y in zip(chosen, x, strict=True)],
                         "labels": [y if c else -100 for c, y in zip(chosen, x, strict=True)]})  # fmt: skip
    return examples


def translated(rows=22):
    return [{"input_ids": x, "labels": x[::-1][:6]} for x in sentences(rows)]


def images(rows=22):
    draw = torch.Generator().manual_seed(0)
    return [{"pixel_values": torch.randn(1, 8, 8, generator=draw), "labels": i % 3} for i in range(rows)]


CASES = {
    "llama": (llama, causal, pad),
    "bert": (bert, masked, pad),
    "t5": (t5, translated, pad),
    "vit": (vit, images, None),
}


BOTH = (transformers.Trainer, transformers.TrainingArguments), (tutti.Trainer, tutti.TrainingArguments)


def arguments(folder, kind=tutti.TrainingArguments, **options):
    usual = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1, "max_steps": 7,
             "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True,
             "warmup_steps": 2}  # fmt: skip
    if kind is tutti.TrainingArguments:
        usual |= {"level": "O0", "plan": "dp"}
    return kind(str(folder), **(usual | options))


def trained(folder, case="llama", whose=tutti.Trainer, kind=tutti.TrainingArguments, resume=None, more=None, **options):
    make, data, collate = CASES[case]
    torch.manual_seed(0)
    setup = {"train_dataset": data(), "eval_dataset": data()[:9], "data_collator": collate} | (more or {})
    trainer = whose(make(), arguments(folder, kind, **options), **setup)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logged(trainer, *keys):
    return [[line[key] for key in keys] for line in trainer.state.log_history if keys[0] in line]


@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_transformers_does(tmp_path, case):
    options = {"eval_strategy": "steps", "eval_steps": 3}
    theirs = trained(tmp_path, case, transformers.Trainer, transformers.TrainingArguments, **options)
    ours = trained(tmp_path, case, **options)
    for keys in [("loss", "grad_norm", "learning_rate", "epoch", "step"), ("eval_loss", "epoch", "step")]:
        a, b = np.array(logged(theirs, *keys), float), np.array(logged(ours, *keys), float)
        assert a.shape == b.shape and len(a) >= 2
        np.testing.assert_allclose(b, a, rtol=2e-4 if case == "t5" else 2e-5)
    assert set(theirs.state.log_history[-1]) == set(ours.state.log_history[-1])
    values = ours.model.state_dict()
    for name, x in theirs.model.state_dict().items():
        torch.testing.assert_close(values[name], x, rtol=2e-3, atol=2e-3)


def test_microbatches_are_those_of_transformers(tmp_path):
    """The model divides by the number of items. The loss of T5 does not, and transformers adds up its means."""
    options = {"gradient_accumulation_steps": 3, "num_train_epochs": 3, "max_steps": -1}
    theirs = trained(tmp_path, "llama", transformers.Trainer, transformers.TrainingArguments, **options)
    ours = trained(tmp_path, "llama", **options)
    np.testing.assert_allclose(logged(ours, "loss"), logged(theirs, "loss"), rtol=1e-5)
    assert logged(ours, "epoch", "step") == logged(theirs, "epoch", "step")


@pytest.mark.parametrize("case", ["llama", "bert", "t5"])
def test_uneven_microbatches_equal_one_batch(tmp_path, case):
    whole = trained(tmp_path, case, global_batch_size=8, per_device_train_batch_size=1)
    parts = trained(tmp_path, case, global_batch_size=8, gradient_accumulation_steps=4)
    np.testing.assert_allclose(logged(parts, "loss")[0], logged(whole, "loss")[0], rtol=1e-6)
    np.testing.assert_allclose(logged(parts, "loss"), logged(whole, "loss"), rtol=1e-4)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Trained on one device."""
    return trained(tmp_path_factory.mktemp("alone"), eval_strategy="epoch")


@pytest.mark.parametrize("plan", ["dp", "zero3", "tp"])
def test_no_plan_changes_the_numbers(tmp_path, plan, alone):
    several = trained(tmp_path, eval_strategy="epoch", cluster="cpu:2", plan=plan)
    for key in ("loss", "eval_loss", "grad_norm"):
        np.testing.assert_allclose(logged(several, key), logged(alone, key), rtol=1e-4)


def test_a_run_resumes_as_if_it_had_not_stopped(tmp_path):
    whole = trained(tmp_path / "whole", save_strategy="steps", save_steps=2, save_total_limit=2)
    checkpoints = sorted(x.name for x in (tmp_path / "whole").glob("checkpoint-*"))
    assert checkpoints == ["checkpoint-6", "checkpoint-7"]

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 4

    cut = tmp_path / "cut"
    trained(cut, save_strategy="steps", save_steps=2, more={"callbacks": [Stop()]})
    again = trained(cut, save_strategy="steps", save_steps=2, resume=True)
    assert logged(again, "loss", "epoch", "learning_rate") == logged(whole, "loss", "epoch", "learning_rate")
    for name, x in whole.model.state_dict().items():
        assert torch.equal(x, again.model.state_dict()[name])
    other = trained(cut, save_strategy="no", resume=str(cut / "checkpoint-4"), cluster="cpu:2", plan="zero3")
    np.testing.assert_allclose(logged(other, "loss"), logged(whole, "loss"), rtol=1e-5)


def test_checkpoints_are_models_of_transformers(tmp_path):
    trainer = trained(tmp_path, save_strategy="steps", save_steps=7)
    folder = tmp_path / "checkpoint-7"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for name, x in loaded.state_dict().items():
        assert torch.equal(x, trainer.model.state_dict()[name])
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 7
    with pytest.raises(ValueError, match="no whole folder checkpoint-N"):
        trained(tmp_path / "other", resume=True)


class Tied(torch.nn.Module):
    """A module that is not of transformers, with tied weights."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(WORDS, 8), torch.nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids, labels):
        logits = self.head(self.embedding(input_ids))
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def test_a_module_with_tied_weights_is_saved_and_its_best_loaded(tmp_path):
    rows = [{"input_ids": [i % WORDS] * 4, "labels": [(i + 1) % WORDS] * 4} for i in range(20)]
    options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
    for more in ({}, {"save_only_model": True}):
        args = arguments(tmp_path, load_best_model_at_end=True, **options, **more)
        trainer = tutti.Trainer(Tied(), args, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        assert trainer.state.best_global_step == 4
        assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-6)


def test_the_best_model_is_loaded_and_training_stops_early(tmp_path):
    seen = iter([3.0, 2.0, 2.5, 2.6, 1.0])
    trainer = trained(
        tmp_path, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, save_total_limit=1,
        load_best_model_at_end=True, metric_for_best_model="score", greater_is_better=False,
        more={"compute_metrics": lambda p: {"score": next(seen)}, "callbacks": [EarlyStoppingCallback(2)]},
    )  # fmt: skip
    assert trainer.state.global_step == 4 and trainer.state.best_global_step == 2
    best = tmp_path / "checkpoint-2"
    assert trainer.state.best_model_checkpoint == str(best)
    assert [x.name for x in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(best)
    for name, x in loaded.state_dict().items():
        assert torch.equal(x, trainer.model.state_dict()[name])


def test_predictions_and_metrics_are_those_of_transformers(tmp_path):
    def metrics(prediction):
        best = prediction.predictions.argmax(-1)
        counts = prediction.label_ids != -100
        return {"accuracy": float((best == prediction.label_ids)[counts].mean())}

    by_trainer = {}
    for whose, kind in BOTH:
        trainer = trained(tmp_path, "bert", whose, kind, more={"compute_metrics": metrics}, eval_strategy="steps",
                          eval_steps=3)  # fmt: skip
        by_trainer[whose] = trainer.predict(CASES["bert"][1]()[3:12]), logged(trainer, "eval_accuracy", "eval_loss")
    (theirs, a), (ours, b) = by_trainer.values()
    assert np.array_equal(theirs.label_ids, ours.label_ids)
    np.testing.assert_allclose(ours.predictions, theirs.predictions, atol=1e-2)
    np.testing.assert_allclose(b, a, rtol=1e-3)
    for key in ("test_loss", "test_accuracy"):
        assert ours.metrics[key] == pytest.approx(theirs.metrics[key], rel=1e-3)


def test_a_model_that_is_changed_after_training_is_evaluated_as_it_is(tmp_path):
    trainer = trained(tmp_path, "vit")
    before = trainer.evaluate()["eval_loss"]
    with torch.no_grad():
        trainer.model.classifier.bias += 3 * torch.arange(3)
    after = trainer.evaluate()["eval_loss"]
    with torch.no_grad():
        rows = images()[:9]
        wanted = trainer.model.eval()(torch.stack([x["pixel_values"] for x in rows]),
                                      torch.tensor([x["labels"] for x in rows])).loss  # fmt: skip
    assert after == pytest.approx(float(wanted), rel=1e-5) and after != before


def test_it_predicts_without_labels_and_before_training(tmp_path):
    trainer = tutti.Trainer(vit(), arguments(tmp_path))
    rows = [{"pixel_values": x["pixel_values"]} for x in images(6)]
    prediction = trainer.predict(rows)
    with torch.no_grad():
        wanted = trainer.model.eval()(torch.stack([x["pixel_values"] for x in rows])).logits
    np.testing.assert_allclose(prediction.predictions, wanted, atol=1e-6)
    assert prediction.label_ids is None and "test_loss" not in prediction.metrics


class Twice(tutti.Trainer):
    factor = 2.0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = self.scale * torch.nn.functional.cross_entropy(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scale = 2.0


def test_a_loss_of_the_users_own(tmp_path):
    plain = trained(tmp_path, "vit")
    twice = trained(tmp_path, "vit", Twice)
    assert logged(twice, "loss")[0][0] == pytest.approx(2 * logged(plain, "loss")[0][0], rel=1e-6)

    class Later(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            holder[0].scale = 0.0

    holder = []
    torch.manual_seed(0)
    trainer = Twice(vit(), arguments(tmp_path), train_dataset=images(), callbacks=[Later()])
    holder.append(trainer)
    trainer.train()
    assert [x for (x,) in logged(trainer, "loss")][1:] == [0.0] * 6, "the step was captured again"

    def summed(outputs, labels, num_items_in_batch):
        return torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch

    func = trained(tmp_path, "vit", more={"compute_loss_func": summed}, gradient_accumulation_steps=2)
    parts = trained(tmp_path, "vit", gradient_accumulation_steps=2)
    np.testing.assert_allclose(logged(func, "loss"), logged(parts, "loss"), rtol=1e-5)


@pytest.mark.parametrize("options", [{"label_smoothing_factor": 0.1}, {"optim": "sgd", "lr_scheduler_type": "cosine"},
                                     {"optim": "adafactor"}, {"max_grad_norm": 0.0}])  # fmt: skip
def test_options_mean_the_same(tmp_path, options):
    theirs = trained(tmp_path, "llama", transformers.Trainer, transformers.TrainingArguments, **options)
    ours = trained(tmp_path, "llama", **options)
    np.testing.assert_allclose(
        logged(ours, "loss", "learning_rate"), logged(theirs, "loss", "learning_rate"), rtol=1e-4
    )


def test_options_without_a_meaning_are_refused_with_what_to_use(tmp_path):
    for options, instead in [({"fp16": True}, "bf16=True"), ({"torch_compile": True}, "level="),
                             ({"auto_find_batch_size": True}, "memory="), 
                             ({"push_to_hub": True}, "upload_folder")]:  # fmt: skip
        with pytest.raises(ValueError, match=instead):
            tutti.Trainer(vit(), arguments(tmp_path, **options))


def test_bad_input_has_clear_errors(tmp_path):
    for data, said in [([], "empty"), (None, "needs a train_dataset")]:
        with pytest.raises(ValueError, match=said):
            tutti.Trainer(vit(), arguments(tmp_path), train_dataset=data).train()
    with pytest.raises(ValueError, match="fewer rows than a batch"):
        tutti.Trainer(vit(), arguments(tmp_path, dataloader_drop_last=True), train_dataset=images(3)).train()
    with pytest.raises(ValueError, match="either a model or model_init"):
        tutti.Trainer(None, arguments(tmp_path))
    with pytest.raises(ValueError, match="has no head"):
        tutti.Trainer(vit().vit, arguments(tmp_path))
    with pytest.raises(ValueError, match="no length"):
        tutti.Trainer(vit(), arguments(tmp_path, max_steps=-1), train_dataset=Stream())


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(images(22))


def test_streams_train_too(tmp_path):
    trainer = trained(tmp_path, "vit", more={"train_dataset": Stream()}, max_steps=8)
    assert trainer.state.global_step == 8
    theirs = trained(tmp_path, "vit", transformers.Trainer, transformers.TrainingArguments, max_steps=8,
                     more={"train_dataset": Stream()})  # fmt: skip
    np.testing.assert_allclose(logged(trainer, "loss"), logged(theirs, "loss"), rtol=1e-4)


def test_a_finished_run_resumes_to_its_model(tmp_path):
    done = trained(tmp_path, save_strategy="steps", save_steps=7)
    again = trained(tmp_path, resume=True, eval_on_start=True)
    for name, x in done.model.state_dict().items():
        assert torch.equal(x, again.model.state_dict()[name])
    assert logged(again, "eval_loss")[0][0] == pytest.approx(done.evaluate()["eval_loss"], rel=1e-6)
    assert again.state.global_step == 7


def test_it_resumes_where_the_next_batch_is_partial(tmp_path):
    options = {"gradient_accumulation_steps": 3, "max_steps": 6, "save_strategy": "steps", "save_steps": 1}
    whole = trained(tmp_path, **options)  # 22 rows: batches of 12 and of 10
    again = trained(tmp_path, resume=str(tmp_path / "checkpoint-1"), **(options | {"save_strategy": "no"}))
    np.testing.assert_allclose(logged(again, "loss"), logged(whole, "loss"), rtol=1e-6)


def test_a_stream_resumes_at_the_end_of_a_pass(tmp_path):
    more = {"train_dataset": Stream()}
    whole = trained(tmp_path, "vit", more=more, max_steps=9, save_strategy="steps", save_steps=6)
    again = trained(tmp_path, "vit", more=more, max_steps=9, resume=str(tmp_path / "checkpoint-6"))
    assert again.state.global_step == 9
    np.testing.assert_allclose(logged(again, "loss"), logged(whole, "loss"), rtol=1e-6)


def test_outputs_are_not_cut_by_chance(tmp_path):
    """The number of classes is a length that sequences are padded to."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=WORDS, num_labels=16, **sizes)
    model = transformers.BertForSequenceClassification(config)
    rows = [{"input_ids": [1] * n, "attention_mask": [1] * n, "labels": 3} for n in (9, 13)]
    prediction = tutti.Trainer(model, arguments(tmp_path, per_device_eval_batch_size=1)).predict(rows)
    assert prediction.predictions.shape == (2, 16)
    with torch.no_grad():
        wanted = model.eval()(torch.ones(1, 13, dtype=torch.long)).logits
    np.testing.assert_allclose(prediction.predictions[1:], wanted, atol=1e-5)


def test_microbatches_that_cannot_be_joined_are_refused(tmp_path):
    rows = [{"input_ids": torch.arange(1, 4 + i % 3), "labels": torch.arange(1, 4 + i % 3)} for i in range(8)]
    args = arguments(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="no attention_mask"):
        tutti.Trainer(llama(), args, train_dataset=rows).train()


def test_training_goes_on_with_the_optimizer_that_it_had(tmp_path):
    losses = []
    for whose, kind in BOTH:
        trainer = trained(tmp_path, "vit", whose, kind, max_steps=3, lr_scheduler_type="constant")
        trainer.train()
        losses.append([x for (x,) in logged(trainer, "loss")])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


def test_a_method_that_is_never_called_is_refused(tmp_path):
    class Own(tutti.Trainer):
        def training_step(self, *args):
            raise AssertionError

    with pytest.raises(ValueError, match="overrides training_step"):
        Own(vit(), arguments(tmp_path))


def test_what_a_loss_reads_in_another_method_is_seen(tmp_path):
    class Scaled(tutti.Trainer):
        def factor(self):
            return self.scale

        def compute_loss(self, model, inputs, **kwargs):
            return self.factor() * model(**inputs).loss

    class Zero(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            trainer.scale = 0.0

    trainer = Scaled(vit(), arguments(tmp_path, max_steps=2), train_dataset=images(), callbacks=[Zero()])
    trainer.scale = 1.0
    trainer.train()
    assert logged(trainer, "loss")[1] == [0.0]


def test_the_folder_is_there(tmp_path):
    trainer = trained(tmp_path / "new")
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("train", {"train_loss": 1.0})
    assert {"model.safetensors", "config.json", "trainer_state.json", "train_results.json"} <= {
        x.name for x in Path(tmp_path / "new").iterdir()
    }


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("name", ["scheduler.pt", "rng_state.pth", "training_args.bin", "optimizer.pt"])
def test_resuming_runs_no_code_of_a_checkpoint(tmp_path, name):
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "cluster": "cpu:1", "plan": "single"}
    trained(tmp_path, "vit", **options)
    folder, marker = tmp_path / "checkpoint-1", tmp_path / "marker"
    torch.save(Call(os.system, f"touch {marker}"), folder / name)
    about = folders.manifest(folder)
    about["files"][name] = folders.describe(folder / name)
    (folder / folders.MANIFEST).write_text(json.dumps(folders.sealed(about)))
    if name in ("scheduler.pt", "rng_state.pth"):
        with pytest.raises(ValueError, match=f"{name} holds posix.system, and reading that could run code: refused"):
            trained(tmp_path, "vit", resume=str(folder), **options)
    else:  # written for transformers, and never read
        trained(tmp_path, "vit", resume=str(folder), **options)
    assert not marker.exists()


def test_a_schedule_of_objects_is_a_warning_when_it_is_saved(tmp_path):
    class Schedule(torch.optim.lr_scheduler.LambdaLR):
        def __init__(self, optimizer):
            self.owner = Call(int)
            super().__init__(optimizer, lambda step: 1.0)

    torch.manual_seed(0)
    model = vit()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    more = {"optimizers": (optimizer, Schedule(optimizer))}
    options = arguments(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    trainer = tutti.Trainer(model, options, train_dataset=images(), **more)
    with pytest.warns(UserWarning, match=r"scheduler\.pt is not written.*keep to numbers, strings and tensors"):
        trainer.train()
    with pytest.raises(ValueError, match=r"checkpoint-1 has no scheduler\.pt"):
        trainer.train(resume_from_checkpoint=True)
