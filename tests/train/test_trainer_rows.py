"""`tutti.Trainer` with tasks, streams and Boost."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback

import tutti
from gloo import Pool
from tutti.data import Mixture, Stream
from tutti.data.tokenizer import train_wordpiece
from tutti.launch import launch

WORDS = ["one", "two", "three", "four", "five", "six", "seven"]


def arguments(folder, **options):
    usual = {"global_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1, "max_steps": 5, "save_strategy": "no",
             "report_to": "none", "disable_tqdm": True, "use_cpu": True, "level": "O0", "plan": "dp"}  # fmt: skip
    return tutti.TrainingArguments(str(folder), **(usual | options))


def losses(trainer):
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def bert(tokenizer, kind="BertForSequenceClassification", **options):
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1,
                                     num_attention_heads=2, intermediate_size=32, max_position_embeddings=32,
                                     hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **options)  # fmt: skip
    return getattr(transformers, kind)(config)


def test_a_task_by_name(tmp_path):
    rows = [{"text": f"{WORDS[i % 7]} {WORDS[i % 3]}", "label": i % 2} for i in range(24)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    tokenizer = train_wordpiece((row["text"] for row in rows), 60)
    options = {"processing_class": tokenizer, "task": "sequence-classification", "eval_dataset": rows[:8]}
    trainer = tutti.Trainer(bert(tokenizer), arguments(tmp_path), train_dataset=str(file), **options)
    trainer.train()
    assert {"eval_loss", "eval_accuracy"} <= trainer.evaluate().keys()
    masked = options | {"task": "masked-lm"}
    trainers = [
        tutti.Trainer(bert(tokenizer, "BertForMaskedLM"), arguments(tmp_path, **more), train_dataset=rows, **masked)
        for more in ({}, {"cluster": "cpu:2", "plan": "tp"})
    ]
    for one in trainers:
        one.train()
    np.testing.assert_allclose(losses(trainers[0]), losses(trainers[1]), rtol=1e-4)
    for wrong, said in [(rows[:0], "empty"), ([{"txt": "a", "label": 0}], "'text'"),
                        ([{"text": "a", "label": 5}], "label")]:  # fmt: skip
        with pytest.raises(ValueError, match=said):
            tutti.Trainer(bert(tokenizer), arguments(tmp_path), train_dataset=wrong, **options)
    with pytest.raises(ValueError, match="does not fit"):
        tutti.Trainer(bert(tokenizer), arguments(tmp_path), train_dataset=rows, **masked)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x, labels):
        logits = self.layer(x)[:, 0]
        return {"loss": (logits - labels).square().mean(), "logits": logits}


class Seen:
    """A collator that notes which rows it got."""

    def __init__(self, file):
        self.file = file

    def __call__(self, features):
        with open(self.file, "a") as file:
            file.write("".join(f"{f['sample_index']} {f['name']}\n" for f in features))
        x = torch.tensor([[f["x"], 1.0] for f in features])
        return {"x": x, "labels": 2 * x[:, 0]}


class Stop(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


def mixture(folder):
    """A streamed and a stored source."""
    for name, count in (("a", 37), ("b", 23)):
        rows = [{"x": i / count, "name": f"{name}{i}"} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    datasets = pytest.importorskip("datasets")
    streamed = datasets.load_dataset("json", data_files=str(folder / "a.jsonl"), split="train", streaming=True,
                                     cache_dir=str(folder))  # fmt: skip
    return Mixture([(streamed, 2.0), (str(folder / "b.jsonl"), 1.0)])


def stream_job(folder, name, steps, stop, resume):
    """Train on the mixture in this process of a job; the losses."""
    rank = launch.rank()
    args = arguments(
        folder / name, global_batch_size=6, max_steps=steps, save_strategy="steps", save_steps=3, plan="auto"
    )
    trainer = tutti.Trainer(Net(), args, Seen(folder / f"{name}-{rank}.txt"), mixture(folder),
                            callbacks=[Stop(stop)] if stop else [])  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return losses(trainer)


def test_a_stream_continues_on_other_ranks(tmp_path):
    alone = stream_job(tmp_path, "alone", 9, 0, None)
    two, three = Pool(2), Pool(3)
    try:
        first = two.run(stream_job, tmp_path, "moved", 9, 3, None)[0]
        second = three.run(stream_job, tmp_path, "moved", 9, 0, True)[0]
    finally:
        two.close()
        three.close()
    np.testing.assert_allclose(second, alone, rtol=1e-5)
    np.testing.assert_allclose(first, alone[:3], rtol=1e-5)
    read = [line for rank in range(3) for line in (tmp_path / f"moved-{rank}.txt").read_text().splitlines()]
    wanted = (tmp_path / "alone-0.txt").read_text().splitlines()
    trained = [line for line in wanted if int(line.split()[0]) < 54]
    assert set(trained) <= set(read)
    numbers = sorted(int(line.split()[0]) for line in set(read))
    assert numbers == sorted(set(numbers)), "no sample has two rows"


def test_a_stream_of_the_users_own(tmp_path):
    rows = [{"x": i / 10, "name": str(i)} for i in range(10)]
    stream = Stream(rows, batch=4, seed=3, collate=Seen(tmp_path / "seen.txt"))
    trainer = tutti.Trainer(Net(), arguments(tmp_path), train_dataset=stream)
    trainer.train()
    assert len(losses(trainer)) == 5 and stream.samples == 20


def test_boost_by_name(tmp_path):
    rows = [{"x": torch.tensor([i / 10, 1.0]), "labels": torch.tensor(i / 5)} for i in range(16)]
    for boost in ("O0", ["adasum"], {"grad_freeze": {"groups": 2}}):
        args = arguments(tmp_path, boost=boost, global_batch_size=16, learning_rate=0.1)
        trainer = tutti.Trainer(Net(), args, train_dataset=rows)
        trainer.train()
        assert losses(trainer)[-1] < losses(trainer)[0], "each step sees all rows"
    sentences = [{"input_ids": [1 + i % 5] * 6, "labels": [1 + i % 5] * 6} for i in range(16)]
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    first = []
    for boost in ("O0", ["adasum"]):  # a loss that is divided by the number of items
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=8, **sizes))
        trainer = tutti.Trainer(model, arguments(tmp_path, boost=boost), train_dataset=sentences)
        trainer.train()
        first.append(losses(trainer)[0])
    assert first[0] == pytest.approx(first[1], rel=1e-5)
    with pytest.raises(ValueError, match="O0"):
        tutti.Trainer(Net(), arguments(tmp_path, boost="O7"), train_dataset=rows).train()


def test_a_trainer_goes_on_in_the_subspace_of_dim_reduce(tmp_path):
    torch.manual_seed(0)
    rows = [{"x": torch.randn(2), "labels": torch.randn(())} for _ in range(16)]
    args = arguments(tmp_path, boost={"dim_reduce": {"components": 2, "every": 1}}, max_steps=6, logging_steps=1,
                     eval_strategy="steps", eval_steps=1)  # fmt: skip
    trainer = tutti.Trainer(Net(), args, train_dataset=rows, eval_dataset=rows[:8],
                            compute_metrics=lambda prediction: {"rows": len(prediction.predictions)})  # fmt: skip
    trainer.train()
    assert trainer.step.step is None and trainer.step.accumulate == 1, "it has switched"
    assert [x["eval_rows"] for x in trainer.state.log_history if "eval_rows" in x] == [8] * 6
    assert all(math.isfinite(x["grad_norm"]) for x in trainer.state.log_history if "loss" in x)


def test_a_boost_level_knows_the_number_of_steps(tmp_path):
    """The first 3 of 10 steps leave out layers, in two stages."""
    rows = [{"input_ids": [1 + i % 5] * 6, "labels": [1 + i % 5] * 6} for i in range(16)]
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=8, **sizes))
    trainer = tutti.Trainer(model, arguments(tmp_path, boost="O1", max_steps=10), train_dataset=rows)
    trainer.train()
    assert trainer.step.steps == 10 and len(trainer.step.recaptures) == 3


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            lambda i: {"text": "hello"},
            r"no column of the training dataset \(text\) is an argument",
        ),
        (
            lambda i: {"input_ids": [1] * (3 + i % 3), "labels": 0},
            r"different lengths \(input_ids: 3 and 5\).*DataCollator",
        ),
    ],
)
def test_rows_that_cannot_be_read_are_named(tmp_path, row, message):
    config = BertConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    options = tutti.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", max_steps=1, disable_tqdm=True)
    trainer = tutti.Trainer(BertForSequenceClassification(config), options, train_dataset=[row(i) for i in range(16)])
    with pytest.raises(ValueError, match=message):
        trainer.train()
