"""A pipeline gives the losses, gradients and parameters of one device, wherever it is cut and however it is scheduled:
skip connections, an encoder that every layer of a decoder reads, tied embeddings and experts included."""

from __future__ import annotations

import copy
import gc
from functools import cache

import pytest
import torch

import tutti
import zoo
from cases import crossed
from models import MODELS
from pipelines import pipeline, random_stages
from tutti.lower.variants.unroll import unroll
from tutti.plan.pipeline.schedule import CHUNKED, IN_V, NAMES, PAIRED
from tutti.tracing.batch import FlatBatch

STEPS, COUNT = 3, 6  # microbatches
FAMILIES = ("llama", "t5", "unet2d", "mixtral")
CAUSAL = ("llama", "mixtral")
WHOLE = tuple(name for name in NAMES if name != CHUNKED)
TWICE = ("interleaved", *IN_V)  # with two stages on each device
CUTS = 6
QUICK = [("llama", 4), ("llama", 5), ("mixtral", 1), ("mixtral", 2)]
GLOO = [  # family, schedule, devices of the pipeline, plan of each
    ("llama", "1f1b", 2, "dp2"), ("llama", "zb-h1", 2, "tp2"), ("llama", "gpipe", 4, "dp1"),
    ("llama", "zb-v", 2, "zero2"), ("llama", "auto", 2, "dp2"), ("mixtral", "1f1b", 2, "ep2"),
    ("llama", CHUNKED, 2, "dp2"), ("llama", PAIRED, 2, "tp2"), ("mixtral", PAIRED, 2, "ep2"),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left():
    """Tests that measure the memory of this process come after these."""
    yield
    case.cache_clear()
    expected.cache_clear()
    gc.collect()


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@cache
def case(family: str, count: int = COUNT):
    """A model, its batch and loss, and the graph of a microbatch."""
    torch.manual_seed(0)  # every process makes the same
    model, batch, loss = MODELS[family]()
    graph = tutti.capture(
        model, FlatBatch(batch).parts(count)[0].batch, adam(model), loss, clip_norm=1.0, microbatches=count
    )
    return model, batch, loss, graph


def run(family: str, plan, devices: int, count: int = COUNT):
    model, batch, loss, _ = case(family, count)
    model = copy.deepcopy(model)
    step = tutti.parallelize(model, adam(model), batch, loss=loss, cluster=f"cpu:{devices}", plan=plan, level="O0",
                             accumulate=count, clip_norm=1.0)  # fmt: skip
    gradients = step.gradients(batch)
    losses = [step(batch).item() for _ in range(STEPS)]
    return losses, gradients, step.state_dict(), step.evaluate(batch).item()


@cache
def expected(family: str, count: int = COUNT):
    return run(family, "dp", 1, count)


def compare(results, family: str, count: int = COUNT) -> None:
    """Within 1e-5 of the size of each tensor: Adam makes steps as long out of gradients that are but rounding."""
    for ours, theirs in zip(results, expected(family, count), strict=True):
        if not isinstance(ours, dict):
            assert ours == pytest.approx(theirs, rel=1e-5)
            continue
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert (ours[name] - tensor).norm() <= 1e-5 * tensor.norm() + 1e-7, name


@pytest.mark.parametrize("family, seed", crossed(FAMILIES, range(CUTS), quick=QUICK))
def test_any_cut_gives_the_numbers_of_one_device(family, seed):
    """Six cuts of each model: one for each schedule, with 2, 3 and 4 stages."""
    name = WHOLE[(seed + FAMILIES.index(family)) % len(WHOLE)]
    devices = 2 if name in TWICE else 2 + seed % 3
    graph = case(family)[3]
    stages = random_stages(graph, 2 * devices if name in TWICE else devices, seed)
    compare(run(family, pipeline(graph, stages, devices, name, "dp1", COUNT), devices), family)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(CUTS))
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_cut_under_every_schedule(family, name, seed):
    chunks = 2 if name in TWICE else 1
    devices = 2 if chunks == 2 else 2 + seed % 3
    graph = case(family)[3]
    stages = random_stages(graph, chunks * devices, 10 + seed)
    compare(run(family, pipeline(graph, stages, devices, name, "dp1", COUNT), devices), family)


@pytest.mark.parametrize("family, seed", crossed(CAUSAL, range(CUTS), quick=[("llama", 1)]))
def test_chunks_of_the_sequence_in_any_cut(family, seed):
    """The sequence of 2, 3 and 4 stages in 2 and 4 chunks."""
    devices, graph = 2 + seed % 3, unroll(case(family)[3], 2 + 2 * (seed // 3))
    compare(run(family, pipeline(graph, random_stages(graph, devices, seed), devices, CHUNKED, "dp1", COUNT), devices),
            family)  # fmt: skip


def on_this_rank(family: str, name: str, devices: int, inner: str) -> tuple:
    count = 4 if name == PAIRED else 2
    graph = unroll(case(family, count)[3], 2 if name == CHUNKED else 1)
    stages = random_stages(graph, 2 * devices if name in IN_V else devices, devices)
    results = run(family, pipeline(graph, stages, devices, name, inner, count), 4, count)
    return results[0], *({key: x.numpy() for key, x in tensors.items()} for tensors in results[1:3]), results[3]


@pytest.mark.slow
@pytest.mark.parametrize("family, name, devices, inner", GLOO)
def test_processes_give_the_numbers_of_one_device(pool, family, name, devices, inner):
    for losses, gradients, parameters, evaluated in pool.run(on_this_rank, family, name, devices, inner):
        tensors = ({key: torch.from_numpy(x) for key, x in arrays.items()} for arrays in (gradients, parameters))
        compare((losses, *tensors, evaluated), family, 4 if name == PAIRED else 2)


def test_a_pipeline_by_its_name():
    model = zoo.llama(4)
    one = zoo.llama(4)
    data = zoo.tokens()
    piped = tutti.parallelize(model, adam(model), data, cluster="cpu:4", plan="pp2xtp2", level="O0", accumulate=4)
    whole = tutti.parallelize(one, adam(one), data, cluster="cpu:1", level="O0", accumulate=4)
    for _ in range(STEPS):
        assert piped(data).item() == pytest.approx(whole(data).item(), rel=1e-5)
    assert "a pipeline of 2 stages, 1f1b" in piped.plan.explain()
