"""Equal stages of a pipeline are lowered and simulated once, which gives the time and memory of simulating each."""

import random
from itertools import count

import pytest
import torch

import models
import tutti
from tutti.plan.planner import Planner
from tutti.sim import dryrun
from tutti.sim.pipeline import PipelineDryRun

NAMES = ("llama", "qwen3", "gemma2", "gpt2", "bert", "vit", "mixtral", "qwen3_moe", "deepseek", "mamba")
CLUSTER = tutti.Cluster.parse("h100:8")
DERIVED = ("layer_types", "mlp_layer_types")  # entries of a config that follow from its depth


def deepened(name: str, depth: int) -> tuple[torch.nn.Module, dict]:
    """A model of this depth, and its batch."""
    model, batch, _ = models.case(name)
    entries = {key: value for key, value in model.config.to_dict().items() if key not in DERIVED}
    return type(model)(type(model.config)(**{**entries, "num_hidden_layers": depth})), batch


def drawn(name: str, seed: int) -> tuple[int, str, int]:
    """A random depth, plan and number of microbatches."""
    choose = random.Random(f"{name} {seed}")
    schedule, chunks = choose.choice((("", 1), ("-gpipe", 1), ("-interleaved2", 2), ("-zb-v", 2), ("-zb-h1", 1)))
    devices = choose.choice((2, 4)) if chunks > 1 else 4
    inside = choose.choice(("dp{}xzero1", "dp{}xzero3", "tp{}")).format(8 // devices)
    return devices * chunks * choose.choice((2, 3)), f"pp{devices}{schedule}x{inside}", devices * choose.choice((1, 2))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_folded_and_full_simulation_agree(name, seed, monkeypatch):
    depth, plan_name, microbatches = drawn(name, seed)
    model, batch = deepened(name, depth)
    graph = tutti.capture(model, batch, torch.optim.AdamW(model.parameters()))
    plan = Planner(graph, CLUSTER, (), microbatches).named(plan_name)
    runs, simulated = [], []
    simulate, numbers = dryrun.simulate, count()
    monkeypatch.setattr(dryrun, "simulate", lambda *args: simulated.append(args) or simulate(*args))
    for folded in (True, False):
        if not folded:
            monkeypatch.setattr(dryrun, "_signature", lambda *_: (next(numbers),))
        run = dryrun.dry_run(graph, plan, CLUSTER, "O2")
        assert isinstance(run, PipelineDryRun)
        runs.append((run.prediction(), len(simulated)))
    (short, few), (whole, all_of_them) = runs
    assert few < all_of_them - few  # without those that fold, which were counted first
    assert short.step_seconds == pytest.approx(whole.step_seconds, rel=1e-3)
    assert short.peak_bytes == pytest.approx(whole.peak_bytes, rel=1e-3)
