"""The search of pipelines: where links are slow they win, where they are fast nobody tries."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

import tutti
from searches import wide
from tutti.lower.variants.vary import vary
from tutti.plan.pipeline.candidate import PipelineCandidate
from tutti.plan.pipeline.schedule import Pipe
from tutti.plan.plan import PIPELINE
from tutti.plan.planner import Planner
from tutti.plan.search.counterfactual import otherwise
from tutti.plan.search.search import Search
from tutti.plan.variant import PLAIN, Variant
from tutti.sim.dryrun import dry_run
from tutti.sim.planning import Simulator

BATCH = 32
FAST = tutti.Cluster.parse("h100:4")
SLOW = tutti.Cluster(FAST.device, ((4, replace(FAST.levels[0][1], bandwidth=2e9, latency=2e-5)),))


@cache
def graph(count: int, variant: Variant = PLAIN):
    return vary(wide(BATCH // count, layers=4), variant)


def search(cluster: tutti.Cluster, **options) -> Search:
    return Search(graph, BATCH, cluster, Simulator("O0"), **{"accumulate": None, "budget": 600, **options})


@pytest.fixture(scope="module")
def slow():
    searched = search(SLOW)
    searched.ranked()
    return searched


@pytest.mark.slow
def test_over_slow_links_a_pipeline_is_best(slow):
    best = slow.best_of_all
    assert PIPELINE in best.mesh and best.accumulate >= 4 and slow.fits(best)
    flat = [p.predicted.step_seconds for p in slow.plans if PIPELINE not in p.mesh]
    assert best.predicted.step_seconds < 0.8 * min(flat)
    assert all(p.durations for p in slow.plans if p.schedule == "auto")
    assert tutti.Plan.from_json(best.to_json()).replace(prediction=None) == best.replace(prediction=None)


def test_what_is_modelled_is_about_what_the_clock_says(slow):
    lengths = {
        c.pipe.devices: c.candidate
        for c in slow.candidates
        if isinstance(c, PipelineCandidate) and c.pipe.sequence_chunks == 1
    }
    assert lengths.keys() == {2, 4}
    for devices, schedule in [(2, ("interleaved", 2)), (2, ("auto", 2)), (4, ("1f1b", 1)), (4, ("auto", 1))]:
        candidate = PipelineCandidate(lengths[devices], Pipe(devices, *schedule), SLOW)
        run = dry_run(graph(candidate.planner.accumulate), candidate.plan(), SLOW)
        assert candidate.chosen.seconds == pytest.approx(run.seconds, rel=0.15), candidate.plan().name
        assert candidate.chosen.memory < run.memory.peak


@pytest.mark.slow
def test_where_links_are_fast_or_there_is_one_microbatch_none_is_best():
    assert PIPELINE not in search(FAST, accumulate=4).ranked()[0].mesh
    one = search(SLOW, accumulate=1)
    one.ranked()
    assert not any(PIPELINE in c.mesh for c in one.candidates)


@pytest.mark.slow
def test_stages_hold_what_fits(slow):
    """With less memory layers move, or are kept split; what is chosen fits."""
    best = slow.best_of_all
    memory = 0.95 * best.predicted.peak_bytes
    tight = tutti.Cluster(replace(SLOW.device, memory=memory), SLOW.levels)
    second = search(tight, mesh=best.mesh, accumulate=best.accumulate, budget=20)
    assert second.best().predicted.peak_bytes <= memory
    uncut = [p.predicted.step_seconds for p in second.plans if p.batch_splits == 1]  # only copies of the best are tried
    assert min(uncut) >= best.predicted.step_seconds / 1.02


@pytest.mark.slow
def test_a_mesh_with_a_pipeline_and_what_another_layout_costs_there():
    searched = search(FAST, mesh={"pp": 2, "dp": 2}, accumulate=8)
    plans = searched.ranked(2)
    assert all(p.mesh == {"pp": 2, "dp": 2} and p.accumulate == 8 for p in plans)
    label = "param:model.layers.*.mlp.up_proj.weight"
    others = otherwise(searched, plans[0], label.removeprefix("param:"))
    assert others and all(other.stages and other.schedule == plans[0].schedule for *_, other in others)
    assert plans[0].input_layout(label) not in [other.input_layout(label) for *_, other in others]
    with pytest.raises(ValueError, match="cannot be cut into 16 stages"):
        search(tutti.Cluster.parse("h100:16"), mesh={"pp": 16}, accumulate=16).ranked()


class Blocks(torch.nn.Module):
    """What passes between layers is made outside of them; `norm` follows each of them where it is shared."""

    def __init__(self, shared: bool):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2048, 2048) for _ in range(4))
        self.norm = torch.nn.LayerNorm(2048) if shared else torch.nn.Identity()

    def forward(self, x):
        for layer in self.layers:
            x = self.norm(x + layer(x).relu())
        return x.square().mean()


def blocks(shared: bool, count: int):
    with torch.device("meta"):
        model, x = Blocks(shared), torch.empty(4096 // count, 2048)
    return tutti.capture(model, (x,), torch.optim.SGD(model.parameters(), lr=0.1))


def test_what_the_parent_of_layers_makes_is_sent_too():
    step, cluster = blocks(False, 8), tutti.Cluster(SLOW.device, ((2, SLOW.levels[0][1]),))
    planner = Planner(step, cluster, (), 8)
    inner = planner.inside(Pipe(2)).on({"dp": 1})
    for schedule, chunks in (("1f1b", 1), ("interleaved", 2), ("auto", 1)):
        candidate = PipelineCandidate(inner, Pipe(2, schedule, chunks), cluster)
        run = dry_run(step, candidate.plan(), cluster)
        assert candidate.chosen.seconds == pytest.approx(run.seconds, rel=0.1), schedule


def test_what_cannot_be_cut_is_no_pipeline_and_no_end_of_the_search():
    cluster = tutti.Cluster(SLOW.device, ((2, SLOW.levels[0][1]),))
    searched = Search(
        lambda count, variant: vary(blocks(True, count), variant), 8, cluster, Simulator("O0"), accumulate=None
    )
    assert searched.best().predicted.step_seconds > 0 and "they call each other in turns" in str(searched.impossible)
    assert {c.pipe.stages for c in searched.candidates if isinstance(c, PipelineCandidate)} == {2}


@pytest.mark.slow
def test_a_pipeline_that_is_asked_for_with_one_microbatch():
    """The sequence in chunks then fills the bubble, while there are tokens enough in each."""
    searched = search(FAST, mesh={"pp": 4}, accumulate=1)
    best = searched.best()
    assert best.schedule == "seq1f1b" and best.sequence_chunks in (2, 4, 8)
    whole = min(p.predicted.step_seconds for p in searched.plans if p.sequence_chunks == 1)
    assert best.predicted.step_seconds < 0.7 * whole
    run = dry_run(graph(1, best.variant), best, FAST)
    candidate = next(
        c
        for c in searched.candidates
        if isinstance(c, PipelineCandidate) and c.pipe.sequence_chunks == best.sequence_chunks
    )
    assert candidate.chosen.seconds == pytest.approx(run.seconds, rel=0.2)
