import pytest
import torch

from tutti.train.text.config import Schedule
from tutti.train.text.schedule import WarmupCosine, learning_rate

SCHEDULE = Schedule(steps=101, warmup=10, floor=0.1)


def test_warm_up_is_a_line_that_ends_at_the_peak():
    rates = [learning_rate(s, 2.0, SCHEDULE) for s in range(11)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.0])


def test_the_cosine_ends_at_the_floor():
    assert learning_rate(100, 2.0, SCHEDULE) == pytest.approx(0.2)
    assert learning_rate(55, 2.0, SCHEDULE) == pytest.approx(1.1)  # half way between the peak and the floor


def test_it_equals_torchs_cosine_annealing():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=2.0)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=90, eta_min=0.2)
    for step in range(10, 101):
        assert learning_rate(step, 2.0, SCHEDULE) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        cosine.step()


def test_without_warm_up_the_first_step_is_at_the_peak():
    assert learning_rate(0, 1.0, Schedule(steps=1, warmup=0)) == 1.0
    assert learning_rate(0, 1.0, Schedule(steps=5, warmup=0)) == 1.0


def test_steps_that_are_all_warm_up():
    assert [learning_rate(s, 1.0, Schedule(steps=2, warmup=2)) for s in range(2)] == [0.5, 1.0]


def test_as_a_schedule_of_torch_it_goes_to_any_step():
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": peak} for peak in (2.0, 0.5)]
    optimizer = torch.optim.SGD(groups)
    schedule = WarmupCosine(optimizer, SCHEDULE)
    for step in range(30):
        assert [group["lr"] for group in optimizer.param_groups] == [
            learning_rate(step, x, SCHEDULE) for x in (2.0, 0.5)
        ]
        optimizer.step()
        schedule.step()
    schedule.go_to(70)
    assert schedule.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
    assert schedule.get_last_lr() == [learning_rate(70, x, SCHEDULE) for x in (2.0, 0.5)]
    schedule.step()
    assert schedule.get_last_lr()[0] == learning_rate(71, 2.0, SCHEDULE)
