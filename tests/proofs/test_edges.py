"""What models do besides computing: state, hooks, recomputation, values that Python looks at, odd batches.

Three steps under data, tensor, optimizer and pipeline parallelism and under two random plans give the losses,
parameters and buffers of plain PyTorch.
"""

from __future__ import annotations

import pytest
import torch

import edges
import tutti

PLANS = {"dp2": 2, "tp2": 2, "zero3": 2, "pp2": 2, "random 0": 4, "random 1": 4}
STEPS = 3
REFUSED = {  # (case, plan): what is said
    ("hook_after_accumulation", "pp2"): "reads a sum over several microbatches",
    ("inner_gradient_step", "pp2"): "a model of 0 layers",  # it calls no module
    ("rows_selected_by_labels", "pp2"): "microbatches of a batch lead to different computations",
}


def ours(name: str, plan: str) -> dict[str, torch.Tensor]:
    devices, (kind, _, seed) = PLANS[plan], plan.partition(" ")
    model, batch, loss = edges.CASES[name]()
    optimizer = edges.optimizer_for(model)
    options = dict(loss=loss, cluster=f"cpu:{devices}", level="O0", accumulate=microbatches(kind))
    if kind == "random":
        plan = tutti.random_plan(tutti.capture(model, batch, optimizer, loss), devices, int(seed))
    step = tutti.parallelize(model, optimizer, batch, plan=plan, **options)
    tensors = {f"loss {i}": step(batch) for i in range(STEPS)}
    return tensors | {k: x for k, x in step.training_state().items() if k.partition(":")[0] in ("param", "buffer")}


def microbatches(kind: str) -> int:
    return 2 if kind == "pp2" else 1


def cases():
    """All cases under all plans; each under one of them in the normal suite, and where something is refused."""
    for i, name in enumerate(edges.CASES):
        for k, plan in enumerate(PLANS):
            quick = (k - i) % len(PLANS) == 0 or (name, plan) in REFUSED
            yield pytest.param(name, plan, marks=[] if quick else [pytest.mark.slow])


@pytest.mark.filterwarnings("ignore:no rule says how to split")
@pytest.mark.parametrize(("name", "plan"), list(cases()))
def test_three_steps_are_those_of_plain_pytorch(name, plan):
    if (name, plan) in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name, plan]):
            ours(name, plan)
        return
    expected = edges.after_steps(edges.CASES[name], STEPS, microbatches(plan))
    tensors = ours(name, plan)
    for key, value in expected.items():
        torch.testing.assert_close(tensors[key], value, rtol=1e-5, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")
