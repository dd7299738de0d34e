"""The random numbers and the position of `tutti.Trainer` in its data."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from transformers import TrainerCallback, set_seed

import tutti
from gloo import Pool
from tutti.launch.launch import rank
from tutti.train.trainer.draws import Draws


def arguments(folder, **options):
    usual = {"global_batch_size": 4, "learning_rate": 0.1, "logging_steps": 1, "max_steps": 6, "save_strategy": "no",
             "report_to": "none", "disable_tqdm": True, "use_cpu": True, "level": "O0", "plan": "dp"}  # fmt: skip
    return tutti.TrainingArguments(str(folder), **(usual | options))


def losses(trainer, key="loss"):
    return [line[key] for line in trainer.state.log_history if key in line]


class Net(torch.nn.Module):
    """A line with dropout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, x, labels):
        return {"loss": (self.layer(torch.nn.functional.dropout(x, 0.5, self.training))[:, 0] - labels).square().mean()}


def noisy(features):
    """A collator that draws from all generators."""
    x = torch.tensor([[f["x"], random.random(), np.random.rand()] for f in features])
    return {"x": x + torch.rand(len(features), 3), "labels": torch.tensor([f["x"] for f in features])}


ROWS = [{"x": i / 10} for i in range(10)]


def draw():
    random.random()
    np.random.rand()
    torch.rand(3)


class DrawsOnRank0(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if rank() == 0:
            draw()

    on_train_begin = on_prediction_step = on_step_begin = on_step_end


def noisy_job(folder, callbacks=(), **options):
    if callbacks and rank() == 0:
        torch.rand(7)
    args = arguments(folder, eval_strategy="steps", eval_steps=2, **options)
    trainer = tutti.Trainer(Net(), args, noisy, ROWS, ROWS, callbacks=[*callbacks])
    if callbacks and rank() == 0:
        draw()
    trainer.train()
    return losses(trainer), losses(trainer, "eval_loss"), trainer.evaluate()["eval_loss"]


def test_ranks_agree_whatever_one_of_them_draws(tmp_path):
    pool = Pool(2)
    try:
        wanted = pool.run(noisy_job, tmp_path)
        perturbed = pool.run(noisy_job, tmp_path, (DrawsOnRank0(),))
    finally:
        pool.close()
    assert perturbed[0] == perturbed[1] and wanted[0] == wanted[1]
    assert all(np.isfinite(x) for x in perturbed[0][0])


def test_callbacks_change_no_batch(tmp_path):
    """In one process, a callback that draws leaves the numbers of collators as they are."""
    plain = noisy_job(tmp_path)
    assert plain == noisy_job(tmp_path, (DrawsOnRank0(),))
    assert len(set(plain[0])) == 6, "each batch has numbers of its own"
    assert plain[1][-1] == plain[2], "each evaluation has the same"


def test_draws_are_apart():
    set_seed(3)
    wanted = torch.rand(4).tolist(), np.random.rand(2).tolist(), random.random()
    draws = Draws(3)
    set_seed(4)
    outside = torch.rand(2)
    set_seed(4)
    begin = torch.rand(1)
    with draws:
        first = torch.rand(1), np.random.rand(2)
    end = torch.rand(1)
    with draws:
        drawn = torch.cat([first[0], torch.rand(3)]).tolist(), first[1].tolist(), random.random()
    assert drawn == wanted and torch.equal(torch.cat([begin, end]), outside)


def test_a_run_with_random_batches_resumes_bit_for_bit(tmp_path):
    whole = tutti.Trainer(Net(), arguments(tmp_path, save_strategy="steps", save_steps=2), noisy, ROWS)
    whole.train()
    for step in (2, 4):
        again = tutti.Trainer(Net(), arguments(tmp_path), noisy, ROWS, callbacks=[DrawsOnRank0()])
        again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert losses(again) == losses(whole)


class Stream(torch.utils.data.IterableDataset):
    """22 rows in an order of the pass. It notes the rows that it gives."""

    def __init__(self):
        self.epoch, self.seen = 0, []

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for i in range(22):
            self.seen.append((self.epoch, (i * 7 + self.epoch) % 22))
            yield {"x": self.seen[-1][1] / 22}


def plain(features):
    x = torch.tensor([[f["x"], 1.0, f["x"] ** 2] for f in features])
    return {"x": x, "labels": x[:, 0]}


@pytest.mark.parametrize("parts", [1, 4])
def test_a_stream_resumes_wherever_it_stopped(tmp_path, parts):
    """With 4 parts, a pass of 22 rows has a step of 16 rows and one of 6."""
    options = {"gradient_accumulation_steps": parts, "global_batch_size": 4 * parts, "max_steps": 14 // parts + 3}
    whole = tutti.Trainer(Net(), arguments(tmp_path, save_strategy="steps", save_steps=1, **options), plain, Stream())
    whole.train()
    steps = options["max_steps"]
    for step in range(1, steps):
        stream = Stream()
        again = tutti.Trainer(Net(), arguments(tmp_path, **options), plain, stream)
        again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert losses(again) == pytest.approx(losses(whole), rel=1e-6), step
        assert len(losses(again)) == steps
