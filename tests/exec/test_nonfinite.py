"""Steps whose loss or gradients are not finite: left out as if they had never been, or stopped with the operator."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import tutti
from tutti.api.step import Step
from tutti.exec.nonfinite import NonFinite

BAD = 2  # the batch that breaks


class Net(nn.Module):
    """The root of each number of the batch plus two is taken: NaN where it is less than -2."""

    def __init__(self, norm: bool = False):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        mask = torch.full((8, 8), -math.inf).triu(1)
        mixed = (self.first((x + 2).sqrt()) @ torch.eye(8) + mask[-1]).softmax(-1)
        return self.second(self.drop(self.norm(mixed))).square().mean()


def batches(count: int = 5, entry: float = -3.0) -> list[tuple[torch.Tensor]]:
    torch.manual_seed(1)
    tensors = [torch.rand(8, 8) for _ in range(count)]
    tensors[BAD][5, 3] = entry
    return [(x,) for x in tensors]


def step_of(norm: bool = False, optimizer=torch.optim.AdamW, model=Net, **options) -> Step:
    torch.manual_seed(0)
    net = model(norm)
    return tutti.parallelize(net, optimizer(net.parameters(), lr=0.01), batches()[0], **{"level": "O0", **options})


def sgd(parameters, lr):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def check_left_out(**options) -> None:
    """After a batch that breaks all is as if it had never been, bit for bit."""
    step, other = step_of(**options, max_nonfinite_steps=1), step_of(**options, max_nonfinite_steps=1)
    losses = [step(batch).item() for batch in batches()]
    good = [other(batch).item() for i, batch in enumerate(batches()) if i != BAD]
    assert math.isnan(losses.pop(BAD)) and losses == good and len(set(good)) == 4
    assert (step.steps, step.skipped, other.steps, other.skipped) == (5, 1, 4, 0)
    ours, theirs = step.training_state(), other.training_state()
    for name in theirs.keys() - {"step"}:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("options", [
    {"clip_norm": 1.0}, {"optimizer": sgd}, {"norm": True}, {"accumulate": 2},
    pytest.param({"level": "O2"}, marks=pytest.mark.slow),
    {"cluster": "cpu:4", "plan": "dp2xtp2", "clip_norm": 0.1}, {"cluster": "cpu:4", "plan": "zero3"},
    {"cluster": "cpu:2", "plan": "pp2", "accumulate": 2}, {"cluster": "cpu:2", "plan": "zero1", "optimizer": sgd},
    pytest.param({"cluster": "cpu:2", "plan": "dp", "accumulate": 2, "level": "O2"}, marks=pytest.mark.slow),
    {"plan": "offload"}, {"cluster": "cpu:2", "plan": "dpxsplits2"},
], ids=lambda options: " ".join(getattr(x, "__name__", str(x)) for x in options.values()))  # fmt: skip
@pytest.mark.filterwarnings("ignore:no rule says how to split")
def test_a_step_that_breaks_is_as_if_it_had_never_been(options):
    check_left_out(**options)


@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_a_plan_is_for_steps_that_look_and_for_others(clip_norm):
    options = {"cluster": "cpu:4", "clip_norm": clip_norm}
    guarded = step_of(plan="dp2xtp2", max_nonfinite_steps=0, **options)
    plain = step_of(plan="dp2xtp2", **options)
    for plan, skips in ((guarded.plan, None), (plain.plan, 0)):
        other = step_of(plan=plan, max_nonfinite_steps=skips, **options)
        for batch in batches(entry=0.5)[:2]:
            torch.testing.assert_close(other(batch), plain(batch) if skips is None else guarded(batch))


def test_without_such_values_no_number_changes():
    """Nor does the order of additions, with the norm that clipping takes anyway."""
    guarded, plain = step_of(clip_norm=0.1, max_nonfinite_steps=0), step_of(clip_norm=0.1)
    for batch in batches(entry=0.5):
        assert torch.equal(guarded(batch), plain(batch))
    assert all(
        torch.equal(a, b) for a, b in zip(guarded.state_dict().values(), plain.state_dict().values(), strict=True)
    )


ROOT = "/forward/sqrt made NaN of finite operands, on rank"


def check_stops(rank: int, **options) -> None:
    step = step_of(max_nonfinite_steps=0, **options)
    for batch in batches()[:BAD]:
        step(batch)
    before = step.training_state()
    for _ in range(2):  # the second time as the first
        with pytest.raises(NonFinite, match=rf"of step 3 is not finite: {ROOT} {rank}; parameters and optimizer state"):
            step(batches()[BAD])
    after = step.training_state()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert math.isfinite(step(batches()[BAD + 1]).item())


@pytest.mark.parametrize(("rank", "options"), [
    (0, {}), (1, {"cluster": "cpu:2", "plan": "dp"}), (0, {"cluster": "cpu:2", "plan": "zero3", "accumulate": 2}),
    (0, {"cluster": "cpu:2", "plan": "pp2", "accumulate": 2}), (0, {"plan": "offload2"}),
], ids=str)  # fmt: skip
def test_the_error_names_the_operator_and_the_rank_and_nothing_has_changed(rank, options):
    check_stops(rank, **options)


def test_so_it_is_in_several_processes(pool):
    """Rank 3 holds the row that breaks."""
    pool.run(on_ranks)


def on_ranks() -> None:
    check_stops(2, plan="dp")
    check_stops(0, plan="pp2xdp2", accumulate=2)
    check_left_out(plan="zero1")


def test_more_in_a_row_than_were_allowed_are_an_error():
    step = step_of(max_nonfinite_steps=2)
    for batch in (batches()[BAD], batches()[BAD], batches()[0], batches()[BAD], batches()[BAD]):
        step(batch)
    with pytest.raises(NonFinite, match=r"of step 6 is not finite, after 2 in a row that were skipped: /forward/sqrt"):
        step(batches()[BAD])
    assert (step.steps, step.skipped) == (5, 4)


class Shifted(Net):
    """A loss that is infinite where its gradients are finite: it is left out of them."""

    def forward(self, x):
        return super().forward(torch.zeros_like(x)) + (1 / (x + 3)).sum().exp()


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate": 2}, {"cluster": "cpu:2", "plan": "pp2", "accumulate": 2},
     pytest.param({"level": "O2"}, marks=pytest.mark.slow)],
    ids=str,
)  # fmt: skip
def test_an_infinite_loss_counts_and_masks_do_not(options):
    step = step_of(model=Shifted, max_nonfinite_steps=0, **options)
    step(batches()[0])
    before = step.state_dict()
    what = "/forward/reciprocal made"
    with pytest.raises(NonFinite, match=what):
        step(batches()[BAD])
    assert all(torch.equal(x, before[name]) for name, x in step.state_dict().items())


def test_a_batch_that_holds_it_is_named():
    with pytest.raises(NonFinite, match="batch:0 holds NaN, on rank 0"):
        step_of(max_nonfinite_steps=0)(batches(entry=math.nan)[BAD])


def test_how_many_were_left_out_is_part_of_a_checkpoint(tmp_path):
    step = step_of(max_nonfinite_steps=1)
    for batch in batches():
        step(batch)
    checkpoints = tutti.Checkpoints(tmp_path)
    step.save(checkpoints)
    other = step_of(max_nonfinite_steps=1)
    other.load(checkpoints.wait())
    assert (other.steps, other.skipped) == (5, 1)
    assert torch.equal(step(batches()[0]), other(batches()[0]))
    third = step_of(max_nonfinite_steps=1)
    third.load_training_state(step.training_state())
    assert third.skipped == 1 and torch.equal(step(batches()[1]), third(batches()[1]))


def test_it_is_a_number_of_steps():
    with pytest.raises(ValueError, match="max_nonfinite_steps is -1; it must be a whole number"):
        step_of(max_nonfinite_steps=-1)
