"""What operators of a forward pass take, in the kernels of a level."""

from __future__ import annotations

import pytest

import tutti
import zoo
from tutti.analysis.passes import improve
from tutti.ir.costs import FREE
from tutti.ir.step_graph import FORWARD
from tutti.lower.shard import shard
from tutti.plan.plan import Plan
from tutti.sim.forward import forward_seconds
from tutti.sim.simulate import simulate

CLUSTER = tutti.Cluster.parse("h100:4")


def step():
    model = zoo.llama(3)
    return tutti.capture(model, zoo.tokens(4))


def forward(graph):
    return [node for node in graph.calls if node.meta["phase"] == FORWARD and node.target not in FREE]


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_calls_add_up_to_the_forward_pass(level):
    graph = step()
    seconds = forward_seconds(graph, CLUSTER, level)
    program = improve(shard(graph.keep(["loss"]), Plan({"dp": 1}), 0), level)
    simulation = simulate([program], CLUSTER.of(1), level)
    events = simulation.replays[0].events
    copies = sum(t.seconds for t in simulation.tasks[0] if all(n.target in FREE for n in events[t.event].nodes))
    assert sum(map(seconds, forward(graph))) == pytest.approx(simulation.seconds - copies), "all but reshapes that copy"


def test_what_fuses_costs_less_and_products_the_same():
    graph = tutti.capture(zoo.llama(3), zoo.tokens(4), patterns=())
    plain, fused = (forward_seconds(graph, CLUSTER, level) for level in ("O0", "O2"))
    norms = [n for n in forward(graph) if "norm" in n.meta["path"]]
    products = [n for n in forward(graph) if n.meta["flops"] and "proj" in n.meta["path"]]
    assert sum(map(fused, norms)) < 0.5 * sum(map(plain, norms))
    assert products and all(fused(n) == pytest.approx(plain(n)) for n in products)
