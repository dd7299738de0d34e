"""What lies outside of the device changes no bit, fits where the rest does not, and what is held is what is counted.

On a CPU the device is memory under a budget, and what is outside of it lies in mapped files.
"""

from __future__ import annotations

import pytest
import torch

import models
import tutti
from cases import crossed, slow
from liveness import Live
from tutti.exec.stores.memory_budget import OverBudget
from tutti.ir.op_info import WORKSPACE

SOME = ("llama", "mixtral", "t5", "unet2d")
ALL = ("offload", "offload2", "offload3")


def momentum(parameters, lr):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True)


def make(name, plan, cluster="cpu:1", optimizer=torch.optim.AdamW, dtype=torch.float32, level="O0", **options):
    torch.manual_seed(0)
    model, batch, loss = models.MODELS[name]()
    model = model.to(dtype)
    step = tutti.parallelize(model, optimizer(model.parameters(), lr=1e-3), batch, loss=loss, cluster=cluster,
                             plan=plan, level=level, **options)  # fmt: skip
    return step, batch


def trained(*args, **options):
    step, batch = make(*args, **options)
    return [step(batch).item() for _ in range(3)], step.training_state()


def check(name, plan, offload, **options):
    both = "x".join(part for part in (plan, offload) if part)
    (losses, state), (expected, whole) = (trained(name, p, **options) for p in (both, plan or "single"))
    assert losses == expected
    for key, value in whole.items():
        assert torch.equal(state[key], value), key


@pytest.mark.parametrize("offload", ALL)
@pytest.mark.parametrize("name", ["llama"])
def test_every_bit_is_the_same(name, offload):
    check(name, "", offload)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SOME if name != "llama"])
def test_every_bit_of_other_models_is_the_same(name):
    check(name, "", "offload3")


@pytest.mark.parametrize("options", [
    dict(optimizer=momentum), slow(dict(clip_norm=0.5)), slow(dict(accumulate=3)),
    dict(dtype=torch.bfloat16, fp32_master_weights=True),
], ids=["momentum", "clipped", "accumulated", "masters"])  # fmt: skip
def test_whatever_the_update_does(options):
    check("llama", "", "offload3", **options)


@pytest.mark.parametrize("plan", [slow("zero1"), "zero3", "tp2", slow("dp2xrecompute")])
def test_on_several_devices(plan):
    check("llama", plan, "offload3", cluster="cpu:2", clip_norm=0.5)


@pytest.mark.parametrize("plan", ["zero1", slow("zero3")])
def test_on_devices_with_a_host(plan):
    check("llama", plan, "offload3", cluster="v100-32:2", clip_norm=0.5)


def test_masters_on_a_host():
    check("llama", "", "offload2", cluster="v100-32:1", dtype=torch.bfloat16, fp32_master_weights=True)


def test_in_a_pipeline():
    check("llama", "pp2", "offload3", cluster="cpu:2", accumulate=4)


@pytest.mark.slow
def test_compiled_within_rounding():
    both = (trained("llama", p, level="O2", optimizer=momentum) for p in ("offload3", "single"))
    (losses, state), (expected, whole) = both
    assert losses == pytest.approx(expected, rel=1e-5)
    for key, value in whole.items():
        torch.testing.assert_close(state[key], value, rtol=1e-5, atol=1e-6)


def on_a_process(plan):
    losses, state = trained("llama", plan, cluster="cpu:4", clip_norm=0.5)
    return losses, {key: value.double().sum().item() for key, value in state.items()}


@pytest.mark.slow
def test_on_processes(pool):
    assert pool.run(on_a_process, "zero3xoffload3") == pool.run(on_a_process, "zero3")


def test_a_state_goes_from_any_tier_to_any_other():
    (first, batch), (second, _) = make("llama", "offload3"), make("llama", "single")
    first(batch)
    second.load_training_state(first.training_state())
    first.load_training_state(second.training_state())
    assert first(batch).item() == second(batch).item()


@pytest.mark.slow
def test_less_is_held():
    most = {}
    for plan in ("single", *ALL):
        step, batch = make("mixtral", plan, memory="1GiB")
        step(batch)
        most[plan] = step.budgets[0].most
    assert most["offload"] < 0.75 * most["single"] and most["offload2"] < most["offload"]
    assert most["offload3"] <= most["offload2"]


@pytest.mark.parametrize("name, plan", crossed(["t5", "llama"], ["single", *ALL]))
def test_what_is_counted_is_what_is_alive(name, plan, monkeypatch):
    """Against every memory that an operator returns, counted by torch's dispatcher; without the batch, and what
    operators allocate for themselves."""
    for operator in list(WORKSPACE):
        monkeypatch.delitem(WORKSPACE, operator)
    step, batch = make(name, plan, memory="1GiB")
    step(batch)
    run, budget, peaks = step.runtime.run, step.budgets[0], []

    class Device(Live):
        def see(self, x):
            if not step.offload_store.holds(x):
                super().see(x)

    def measured(runs, inputs):
        names = list(step.program.inputs)
        own = [x for n, x in zip(names, inputs[0], strict=True) if n.partition(":")[0] not in ("batch", "constant")]
        budget.most = budget.now
        with Device(own) as live:
            result = run(runs, inputs)
        peaks.append((budget.most, live.most))
        return result

    step.runtime.run = measured
    step(batch)
    assert peaks[0][0] == pytest.approx(peaks[0][1], rel=0.01)


def test_a_budget_is_kept():
    step, batch = make("llama", "single", memory="1GiB")
    step(batch)
    needed = step.budgets[0].most
    within, batch = make("llama", "single", memory=needed)
    expected = within(batch)
    assert within.budgets[0].most == needed
    tight, batch = make("llama", "single", memory=needed - 1)
    before, held_bytes = tight.state_dict(), tight.budgets[0].now
    with pytest.raises(OverBudget, match=r"(?s)needs .* more on a device that holds .*'offload'"):
        tight(batch)
    for name, value in tight.state_dict().items():
        assert torch.equal(value, before[name]), f"{name} was changed though the step was refused"
    assert tight.budgets[0].now == held_bytes, "nothing was left behind"
    fits, batch = make("llama", "offload3", memory=int(0.75 * needed))
    assert torch.equal(fits(batch), expected) and fits.budgets[0].most <= 0.75 * needed


@pytest.mark.parametrize(
    "options", [dict(plan="pp2", cluster="cpu:2"), slow(dict(plan="single"))], ids=["pp2", "single"]
)
def test_a_budget_is_kept_over_microbatches(options):
    step, batch = make("llama", memory="1GiB", accumulate=4, **options)
    expected = step(batch)
    needed = max(budget.most for budget in step.budgets)
    assert make("llama", memory=needed, accumulate=4, **options)[0](batch) == expected
    with pytest.raises(OverBudget):
        make("llama", memory=int(0.9 * needed), accumulate=4, **options)[0](batch)
    plan = "x".join(part for part in (options["plan"].replace("single", ""), "offload3") if part)
    less, batch = make("llama", **{**options, "plan": plan}, memory=int(0.9 * needed), accumulate=4)
    assert less(batch) == expected


def test_what_does_not_even_fit_between_steps_is_refused_at_once():
    with pytest.raises(MemoryError, match="param:"):
        make("llama", "single", memory="10KiB")


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    def full(handle, begin, count):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match=r"no room for .* more \(No space left.*another folder"):
        make("llama", "offload", folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_no_file_is_left(tmp_path):
    step, batch = make("llama", "offload3", folder=tmp_path)
    step(batch)
    assert not list(tmp_path.iterdir()) and step.offload_store.bytes > 0


def test_a_tier_that_the_devices_do_not_have():
    step, _ = make("llama", "offload")
    plan = step.plan.replace(tiers=dict.fromkeys(step.plan.tiers, "host"))
    with pytest.raises(ValueError, match="a cpu has device and disk: write 'disk'"):
        make("llama", plan)
