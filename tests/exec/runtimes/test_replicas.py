"""One bit, flipped in the memory of one rank, is found."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tutti
from tutti.api.step import Step
from tutti.exec.runtimes.replicas import Corrupted, checksum
from tutti.launch.launch import rank


def step_of(plan: str, cluster: str = "auto", accumulate: int = 1) -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batch = (torch.randn(12, 8),)
    how = {"cluster": cluster, "plan": plan, "level": "O0", "accumulate": accumulate}
    step = tutti.parallelize(model, optimizer, batch, loss=lambda m, b: m(*b).square().mean(), **how)
    for _ in range(3):
        step(batch)
    step.compare_replicas()
    return step


def flip(x: torch.Tensor) -> None:
    """The lowest bit of a tensor's second number."""
    x.view(-1).view(torch.int32)[1] ^= 1


@pytest.mark.parametrize(("plan", "devices", "name", "on", "said"), [
    ("dp", 4, "param:0.weight", 2, "param:0.weight holds on rank 2 other bits than on the 3 others"),
    ("dp", 2, "exp_avg:2.bias", 0, "exp_avg:2.bias holds on ranks 0, 1 different bits, and no majority tells whose"),
    ("zero1", 3, "param:1.bias", 1, "param:1.bias holds on rank 1 other bits than on the 2 others"),
    ("dp2xtp2", 4, "param:0.weight", 3, r"param:0.weight holds on ranks \d, 3 different bits"),
    ("pp2xdp3", 6, "param:2.weight", 4, "param:2.weight holds on rank 4 other bits than on the 2 others"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:no rule says how to split")
def test_a_flipped_bit_is_found_with_the_rank_in_the_minority(plan, devices, name, on, said):
    step = step_of(plan, f"cpu:{devices}", 2 if "pp" in plan else 1)
    flip(step.store.parts[on][name])
    with pytest.raises(Corrupted, match=f"^{said}"):
        step.compare_replicas()
    flip(step.store.parts[on][name])
    step.compare_replicas()


def on_ranks() -> str:
    step = step_of("dp")
    if rank() == 3:
        flip(step.store.parts[0]["exp_avg_sq:0.weight"])
    with pytest.raises(Corrupted) as caught:
        step.compare_replicas()
    return str(caught.value)


def test_so_it_is_in_several_processes_and_all_know(pool):
    assert pool.run(on_ranks) == ["exp_avg_sq:0.weight holds on rank 3 other bits than on the 3 others"] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool, torch.int64])
def test_every_bit_counts(dtype):
    x = torch.zeros(5, dtype=dtype)
    for byte in x.view(torch.uint8).unbind():
        for bit in range(8):
            byte ^= 1 << bit
            assert checksum(x) != 0
            byte ^= 1 << bit
    assert checksum(x) == 0
