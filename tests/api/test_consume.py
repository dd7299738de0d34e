"""`consume=True` frees the model's parameters and the optimizer's state; the step goes on as without it."""

from __future__ import annotations

import pytest
import torch

import tutti
import zoo


def step_of(consume: bool, plan: str = "zero3", steps: int = 0):
    """A step, its model and its optimizer. steps: the optimizer has made before, by itself."""
    model, batch = zoo.gpt2(), zoo.tokens()  # its embedding is tied to its head
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    step = tutti.parallelize(model, optimizer, batch, cluster="cpu:2", plan=plan, level="O0", consume=consume)
    return step, model, optimizer


@pytest.mark.parametrize("steps", [0, 1])
def test_a_consumed_model_trains_as_another(steps, tmp_path):
    batch = zoo.tokens()
    kept, freed = step_of(False, steps=steps)[0], step_of(True, steps=steps)[0]
    assert [kept(batch).item() for _ in range(2)] == [freed(batch).item() for _ in range(2)]
    freed.save(checkpoints := tutti.Checkpoints(tmp_path))
    checkpoints.wait()
    again = step_of(True)[0]
    again.load(checkpoints.latest())
    assert again(batch).item() == kept(batch).item()
    state, wanted = again.state_dict(), kept.state_dict()
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)


def test_memory_is_freed_and_values_are_gone():
    step, model, optimizer = step_of(True, steps=1)
    tensors = [*model.parameters(), *(x for s in optimizer.state.values() for x in s.values() if x.ndim)]
    assert all(x.untyped_storage().nbytes() == x.itemsize and x.isnan().all() for x in tensors)
    assert step.state_dict()["transformer.wte.weight"].shape == model.transformer.wte.weight.shape


def test_it_captures_again():
    batch = zoo.tokens()
    step, model, _ = step_of(True, "dp")
    step(batch)
    model.eval()
    step(batch)
    assert len(step.recaptures) == 1
