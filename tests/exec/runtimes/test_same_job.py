"""Ranks that were given different jobs are told so before the first step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tutti
from tutti.exec.runtimes import runtime
from tutti.exec.runtimes.same_job import plain
from tutti.launch.launch import rank


def on_ranks(what):
    """The error of this rank where rank 2 has something else."""
    other = rank() == 2
    width = 12 if other and what == "width" else 8
    model = nn.Sequential(
        nn.Linear(4, width), nn.Tanh() if other and what == "code" else nn.ReLU(), nn.Linear(width, 1)
    )
    kind = torch.optim.Adam if other and what == "class" else torch.optim.AdamW
    rate = 0.01 if other and what == "lr" else 0.1
    if what == "digits":  # that the text of a tensor does not have
        rate = torch.tensor(0.1000001 if other else 0.1)
    optimizer = kind(model.parameters(), lr=rate)
    batch = (torch.ones(4 if other and what == "batch" else 8, 4),)
    options = {"clip_norm": 2.0 if other and what == "clip_norm" else 1.0, "plan": "dp", "level": "O0"}
    try:
        tutti.parallelize(model, optimizer, batch, loss=lambda model, batch: model(*batch).square().mean(), **options)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("width", "in the model, 0.bias is float32 (8,) on rank 0 and float32 (12,) on rank 2"),
        ("batch", "in the batch, 0 is float32 (8, 4) on rank 0 and float32 (4, 4) on rank 2"),
        ("lr", "in the optimizer, lr of group 0 is 0.1 on rank 0 and 0.01 on rank 2"),
        ("digits", "in the optimizer, lr of group 0 is 0.10000000149011612 on rank 0 and 0.1000000"),
        ("class", "in the optimizer, class is AdamW on rank 0 and Adam on rank 2"),
        ("clip_norm", "in the options, clip_norm is 1.0 on rank 0 and 2.0 on rank 2"),
        ("code", "in the program, the hash of its operators is "),
        ("nothing", ""),
    ],
)
def test_a_rank_with_another_job_is_named(pool, what, message):
    for error in pool.run(on_ranks, what):
        expected = f"ranks 0 and 2 were given different jobs: {message}" if message else ""
        assert error.startswith(expected) and bool(error) == bool(message), error


def test_the_device_of_a_tensor_of_options_does_not_count():
    assert "device" in str(torch.zeros(1, device="meta"))  # as of a learning rate on the GPU of another rank
    assert plain(torch.tensor([1.5, 2.0])) == [1.5, 2.0] and plain((0.9, torch.tensor(0.5))) == (0.9, 0.5)


def on_one_rank():
    """The loss of a step that rank 1 alone builds."""
    if rank() != 1:
        return None
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with runtime.alone():
        options = {"cluster": "cpu:1", "plan": "single", "level": "O0"}
        batch = (torch.ones(2, 4),)
        step = tutti.parallelize(model, optimizer, batch, loss=lambda m, b: m(*b).square().mean(), **options)
    return step.steps


def test_a_rank_may_build_a_step_alone(pool):
    assert pool.run(on_one_rank) == [None, 0, None, None]
