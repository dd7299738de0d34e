"""A slow rank and a slow link are named, and nothing else is; on real processes, over links that are really slow."""

from __future__ import annotations

import random
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))

import shaped
import tutti
from gloo import RANKS
from tutti.observe.diagnosis import diagnose
from zoo import VOCABULARY, llama, tokens

SEEDS = 10
STEPS = 14
PLANS = ("dp", "tp", "dp2xtp2", "zero1", "zero3")


class Slow(TorchDispatchMode):
    """A device on which each operator takes `times` as long; its links are as fast as ever."""

    def __init__(self, times: float):
        super().__init__()
        self.times = times

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            return func(*args, **(kwargs or {}))
        begin = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        end = time.perf_counter() + (self.times - 1) * (time.perf_counter() - begin)
        while time.perf_counter() < end:
            pass
        return result


def record(folder: str, plan: str, slow: int | None, times: float) -> None:
    """Some steps, on one rank as if its device were slower."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(hidden_size=256, num_hidden_layers=2, num_attention_heads=8,
                                      num_key_value_heads=4, intermediate_size=512, vocab_size=VOCABULARY)  # fmt: skip
    model, batch = transformers.LlamaForCausalLM(config).train(), tokens(16, 64)
    step = tutti.parallelize(model, torch.optim.AdamW(model.parameters()), batch, plan=plan, level="O0")
    step.record(folder)
    with Slow(times if dist.get_rank() == slow else 1.0):
        for _ in range(STEPS):
            step(batch)


def drawn(seed: int) -> tuple[str, int, float]:
    """A plan, a rank, and how many times slower it is."""
    chance = random.Random(seed)
    return chance.choice(PLANS), chance.randrange(RANKS), chance.uniform(1.6, 2.5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_slow_rank_is_named_and_no_other(pool, tmp_path, seed):
    plan, rank, times = drawn(seed)
    pool.run(record, str(tmp_path), plan, rank, times)
    diagnosis = diagnose(tmp_path)
    assert {slow.rank for slow in diagnosis.ranks} == {rank}, diagnosis.words()
    assert not diagnosis.links, diagnosis.words()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_nothing_is_named_where_nothing_is_slow(pool, tmp_path, seed):
    pool.run(record, str(tmp_path), drawn(seed)[0], None, 1.0)
    diagnosis = diagnose(tmp_path)
    assert not diagnosis.ranks and not diagnosis.links, diagnosis.words()


def links(folder: Path) -> None:
    """A recording for each seed: with one link that carries less, and with none."""
    model, batch = llama(), tokens(16, 32)
    step = tutti.parallelize(model, torch.optim.AdamW(model.parameters()), batch, plan="dp", level="O0")
    for seed in range(SEEDS):
        source, target, rate = link(seed)
        for name, speed in (("slow", f"{rate}mbit"), ("clean", shaped.FAST)):
            if dist.get_rank() == source:
                shaped.set_link(target, speed)
            dist.barrier()
            step.record(folder / f"{name}-{seed}")
            for _ in range(STEPS):
                step(batch)


def link(seed: int) -> tuple[int, int, int]:
    """Two ranks, and how many millions of bits a second the one can send to the other."""
    chance = random.Random(100 + seed)
    source, target = chance.sample(range(RANKS), 2)
    return source, target, chance.randint(200, 1000)


@contextmanager
def allowed():
    try:
        yield
    except OSError as error:
        pytest.skip(f"links cannot be made slow here: {error}")


@pytest.mark.slow
def test_a_slow_link_is_named_and_no_other(tmp_path):
    with allowed():
        shaped.run(Path(__file__), RANKS, str(tmp_path))
    said = []
    for seed in range(SEEDS):
        slow, clean = (diagnose(tmp_path / f"{name}-{seed}") for name in ("slow", "clean"))
        right = {(edge.source, edge.target) for edge in slow.links} == {link(seed)[:2]} and not slow.ranks
        said.append((right, not clean.ranks and not clean.links, link(seed), slow.words(), clean.words()))
    assert all(right and quiet for right, quiet, *_ in said), said


if __name__ == "__main__":
    torch.set_num_threads(1)
    links(Path(sys.argv[1]))
