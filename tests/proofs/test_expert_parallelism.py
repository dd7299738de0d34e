"""Experts that are spread over devices give the numbers of one device, and drop the same tokens.

Dropless, and with a capacity. Expert parallelism is a choice of the factor that counts the experts: by a plan's name,
or found by the planner where it is cheaper; with a capacity what it sends are the all-to-alls of GShard, and without
one the tokens that travel (`test_tokens_travel.py`).
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict

import pytest
import torch
from torch import Tensor, nn

import tutti
from cases import crossed, slow, some
from tutti.lower.shard import shard
from tutti.nn import MoE
from tutti.plan.layouts.layout import R, Split
from tutti.plan.planner import Planner
from tutti.plan.textbook import parse_name

BATCH, LENGTH, WIDTH, EXPERTS, LAYERS = 8, 12, 16, 8, 2
FACTORS = {"dropless": None, "capacity": 0.5}
PLANS = [("ep1", 1), ("ep2", 2), ("ep4", 4), ("ep2xtp2", 4), ("dp2xep2", 4), ("ep2xzero3", 4), ("dp2", 2), ("tp2", 2)]
FOLDED = [  # experts over devices of dp x tp
    ("dp2xtp2xexperts4", 4), ("dp2xtp2xexperts2", 4), ("tp4xexperts4", 4), ("dp4xtp2xexperts8", 8),
    ("dp2xtp4xexperts8", 8), ("dp4xtp2xexperts4xzero1", 8), ("dp8xexperts4xzero3", 8),
]  # fmt: skip
MESH = {"node": 2, "gpu": 2}
ops = torch.ops.tutti


class Layers(nn.Module):
    """Layers of experts that note what the last of them has made."""

    seen: Tensor

    def __init__(
        self,
        factor: float | None,
        width: int = WIDTH,
        inner: int = 24,
        shape: tuple[int, int] = (BATCH, LENGTH),
        experts: int = EXPERTS,
    ):
        super().__init__()
        options = {"capacity_factor": factor, "bias_update": 0.01}
        self.layers = nn.ModuleList(MoE(width, inner, experts, 2, **options) for _ in range(LAYERS))
        self.scale = nn.Parameter(torch.ones(width))  # so that the first layer's input has a gradient
        self.register_buffer("seen", torch.zeros(*shape, width))
        self.register_buffer("dropped", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x, loss = x * self.scale, torch.zeros((), device=x.device)
        for layer in self.layers:
            y, aux = layer(x)
            x, loss = x + y, loss + 0.01 * aux.balance + 0.001 * aux.z
        with torch.no_grad():
            self.seen.copy_(y)
            self.dropped.copy_(aux.dropped)
        return x.square().mean() + loss


def parallelized(factor: float | None, plan: str, cluster: str, **options):
    """The step and its batch."""
    torch.manual_seed(0)
    model, x = Layers(factor), torch.randn(BATCH, LENGTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return tutti.parallelize(
        model, optimizer, (x,), cluster=cluster, plan=plan, level="O0", clip_norm=0.1, **options
    ), (x,)


def trained(factor: float | None, plan: str, cluster: str, **options):
    """Loss, gradients, and the state after a step."""
    step, batch = parallelized(factor, plan, cluster, **options)
    gradients = step.gradients(batch)
    return step(batch), gradients, step.state_dict()


@pytest.fixture(scope="module")
def single():
    """What one device gives."""
    return {kind: trained(factor, "single", "cpu:1") for kind, factor in FACTORS.items()}


@pytest.mark.parametrize("kind", FACTORS)
def test_one_device_gives_the_numbers_of_plain_torch(kind, single):
    torch.manual_seed(0)
    model, x = Layers(FACTORS[kind]), torch.randn(BATCH, LENGTH, WIDTH)
    loss = model(x)
    loss.backward()
    torch.testing.assert_close(single[kind][0], loss.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(single[kind][1], {n: p.grad for n, p in model.named_parameters()}, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(single[kind][2]["seen"], model.seen)


@pytest.mark.parametrize("plan, devices, kind", crossed(PLANS, FACTORS))
def test_the_numbers_of_one_device(kind, plan, devices, single):
    check(trained(FACTORS[kind], plan, f"cpu:{devices}"), single, kind)


@pytest.mark.parametrize(
    "plan, devices, kind",
    crossed(FOLDED, FACTORS, quick=[(*FOLDED[0], "dropless"), (*FOLDED[1], "capacity"), (*FOLDED[3], "dropless")]),
)
def test_experts_over_another_factorisation_of_the_devices(kind, plan, devices, single):
    check(trained(FACTORS[kind], plan, f"cpu:{devices}"), single, kind)


@pytest.mark.parametrize("plan, devices", [("ep4", 4), slow("dp2xep4", 8), slow("ep4xtp2", 8)])
def test_tokens_that_travel_by_nodes(plan, devices, single):
    """First to a device of each node, then inside the node."""
    planned = parallelized(None, plan, f"cpu:{devices}")[0].plan
    inside = 2 * (2 if "tp2" in plan else 1)
    by_nodes = planned.replace(node_size=inside)
    check(trained(None, by_nodes, f"cpu:{devices}"), single, "dropless")
    step, _ = parallelized(None, by_nodes, f"cpu:{devices}")
    assert {c.axis for c in step.collectives() if c.kind == "exchange"} == {"ep/2", "ep%2"}
    assert step.plan.from_json(step.plan.to_json()) == step.plan


def test_plans_for_clusters_of_nodes_send_tokens_to_a_node_once():
    assert not parallelized(None, "ep4", "cpu:4")[0].plan.node_size, "one node"
    torch.manual_seed(0)
    model, x = Layers(None, experts=16, shape=(16, LENGTH)), torch.randn(16, LENGTH, WIDTH)
    graph = tutti.capture(model, (x,), torch.optim.SGD(model.parameters(), lr=0.1))
    cluster = tutti.Cluster.parse("h100:2x8")
    assert Planner(graph, cluster).named("ep16").node_size == 8
    assert Planner(graph, cluster).named("dp2xep8").node_size == 0, "a node has all experts"


@pytest.mark.parametrize("devices, word", [(4, "fp8"), slow(2, "mxfp8")])
def test_experts_and_their_tokens_in_low_precision(devices, word):
    """Tokens travel in FP8. Only the gradients of weights differ, whose sums are in other blocks."""
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(BATCH, 16, 32)

    def trained_once(plan, devices=1):
        copied = copy.deepcopy(model)
        optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
        step = tutti.parallelize(copied, optimizer, (x,), cluster=f"cpu:{devices}", plan=plan, level="O0")
        gradients = step.gradients((x,))
        return step((x,)).item(), gradients

    loss, gradients = trained_once(f"ep{devices}x{word}", devices)
    expected, theirs = trained_once(f"singlex{word}")
    exact, _ = trained_once("single")
    assert loss == pytest.approx(expected, rel=1e-5) and loss != exact and loss == pytest.approx(exact, rel=0.05)
    for name, gradient in theirs.items():
        assert (gradients[name] - gradient).norm() <= 0.05 * gradient.norm(), name


@pytest.mark.parametrize("word, inner", [("fp8", 96), ("fp8", 256), slow("nvfp4", 48)])
def test_the_inner_width_is_split_between_blocks(word, inner):
    """In low precision the second product contracts it in blocks."""
    torch.manual_seed(0)
    model, x = nn.ModuleList([MoE(32, inner, 4, 2)]), torch.randn(4, 16, 32)
    losses = []
    for plan, devices in ((f"tp2x{word}", 2), (f"singlex{word}", 1)):
        copied = copy.deepcopy(model)
        optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
        step = tutti.parallelize(copied, optimizer, (x,), loss=lambda m, b: m[0](b[0])[0].square().mean(),
                                 cluster=f"cpu:{devices}", plan=plan, level="O0")  # fmt: skip
        losses.append([step((x,)).item() for _ in range(2)])
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-5) and losses[0] == pytest.approx(losses[1], rel=1e-3)


class Stack(nn.Module):
    """Numbered layers of experts, whose products may be in low precision."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(MoE(32, 48, EXPERTS, 2) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)[0]
        return x.square().mean()


def test_experts_are_whole_on_the_devices_of_dp_and_tp():
    step, _ = parallelized(None, "dp4xtp2xexperts8", "cpu:8")
    assert dict(step.plan.mesh) == {"ep": 4, "tp": 2}
    for name in ("gate_up", "down"):
        layout = step.plan.input_layout(step.graph.inputs[f"param:layers.0.{name}"].meta["label"])
        assert {axis: layout[axis].dim for axis in ("ep", "tp")} == {"ep": 0, "tp": 0}
    assert {c.axis for c in step.collectives() if c.kind == "exchange"} == {"tp ep"}


@pytest.mark.parametrize("kind", some(FACTORS, ["dropless"]))
def test_experts_over_two_axes(kind, single):
    lies = {"node": 1, "gpu": 2}  # each node has one half, each of its devices a half of that
    pins = [
        tutti.pin(f"layers.*.{name}", dim=0, axis=axis, outer=lies[axis])
        for name in ("gate_up", "down")
        for axis in lies
    ]
    check(trained(FACTORS[kind], "auto", "cpu:4", mesh=MESH, pins=pins), single, kind)


def check(outcome, single, kind):
    loss, gradients, state = outcome
    expected, theirs, after = single[kind]
    assert abs(loss - expected) <= 1e-5 * abs(expected)
    for ours, wanted in ((gradients, theirs), (state, after)):
        assert ours.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert (ours[name] - tensor).norm() <= 1e-5 * tensor.norm(), name
    nobody = state["seen"].abs().sum(-1) == 0  # tokens all of whose choices were dropped
    assert torch.equal(nobody, after["seen"].abs().sum(-1) == 0)
    torch.testing.assert_close(state["dropped"], after["dropped"], rtol=1e-6, atol=0)  # a mean over tokens
    assert bool(nobody.any()) == (kind == "capacity")


@pytest.mark.parametrize("plan", ["ep4", slow("ep2xtp2"), "dp2xep2"])
def test_each_rank_has_its_own_experts_and_all_of_the_rest(plan):
    step, _ = parallelized(0.5, plan, "cpu:4")
    for name in step.graph.names("param"):
        layout = step.plan.input_layout(step.graph.inputs[f"param:{name}"].meta["label"])
        assert layout["ep"] == (Split(0) if name.endswith(("gate_up", "down")) else R), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", some(FACTORS, ["capacity"]))
def test_gloo_processes_too(kind, single, pool):
    for loss, _, state in pool.run(trained, FACTORS[kind], "dp2xep2", "auto"):
        assert abs(loss - single[kind][0]) <= 1e-5 * abs(loss)
        for name, tensor in single[kind][2].items():
            assert (state[name] - tensor).norm() <= 1e-5 * tensor.norm(), name


def sent(step: tutti.Step, phase: str) -> Counter[str]:
    """How many collectives of each kind the layers' tokens take in a phase."""
    tokens = BATCH * LENGTH * WIDTH * 4 // 4  # of a rank, and less than half of that for its part of a scatter
    return Counter(c.kind for c in step.collectives() if f"/{phase}/" in c.label and c.bytes > tokens // 2)


def test_a_capacity_takes_two_all_to_alls_a_layer_each_way():
    step, _ = parallelized(0.5, "ep4", "cpu:4")
    for phase in ("forward", "backward"):
        kinds = sent(step, phase)
        assert kinds["all_to_all"] == 2 * LAYERS and kinds["reduce_scatter"] == 0
    assert not [c for c in step.collectives() if "bmm" in c.label], "gradients of experts stay where they are"


def test_dropless_exchanges_tokens_and_results_each_way():
    step, _ = parallelized(None, "ep4", "cpu:4")
    for phase, times in (("forward", 2), ("backward", 3)):  # tokens and results; tokens, gradients and theirs
        kinds = sent(step, phase)
        assert kinds["exchange"] == times * LAYERS
        assert not kinds["reduce_scatter"] and not kinds["all_to_all"]
    targets = Counter(node.target for node in step.program.graph.nodes)
    assert targets[ops.experts_training.default] == targets[ops.experts_backward_kept.default] == LAYERS


def planned(factor: float | None, inner: int, shape: tuple[int, int], cluster: str, width: int = 1024):
    with torch.device("meta"):
        model, x = Layers(factor, width, inner, shape), torch.empty(*shape, width)
    graph = tutti.capture(model, (x,), torch.optim.AdamW(model.parameters()))
    plan = Planner(graph, tutti.Cluster.parse(cluster)).on({"x": 8}).plan()
    chosen = defaultdict(set)
    for label, choices in plan.operators.items():
        name = label.rpartition("/")[2]
        if "/forward/" in label and name.startswith(("tutti.experts", "tutti.dispatch", "bmm")):
            chosen[name].add(str(choices["x"]))
    return plan.name, chosen, {c.kind for c in shard(graph, plan, 0).collectives}


def test_the_planner_splits_experts_where_they_are_large():
    name, chosen, _ = planned(None, 2048, (16, 512), "h100:8x1")
    assert name == "auto-ep8" and chosen == {"tutti.experts": {"t&e"}}
    name, chosen, kinds = planned(1.0, 4096, (8, 256), "h100:8x1")
    assert name == "auto-ep8" and chosen["bmm"] == chosen["bmm.1"] == {"b"}
    assert "g" in chosen["tutti.dispatch"] and "all_to_all" in kinds


def test_the_planner_splits_tokens_where_experts_are_small():
    _, chosen, kinds = planned(None, 16, (64, 4096), "h100:8x1", width=64)
    assert chosen == {"tutti.experts": {"t"}} and "all_to_all" not in kinds
    _, chosen, kinds = planned(1.0, 16, (64, 4096), "h100:8x1", width=64)
    assert chosen == {"tutti.dispatch": {"g"}, "bmm": {"m"}, "bmm.1": {"m"}} and "all_to_all" not in kinds


def test_over_nodes_an_all_to_all_is_one_inside_and_one_between():
    """A mesh with an axis for each kind of link is a hierarchical all-to-all, and cheaper over many nodes."""
    cluster = tutti.Cluster.parse("h100:8x8")
    with torch.device("meta"):
        model, x = Layers(1.0, 1024, 4096, (64, 512), experts=64), torch.empty(64, 512, 1024)
    planner = Planner(tutti.capture(model, (x,), torch.optim.AdamW(model.parameters())), cluster)
    apart, flat = planner.on({"node": 8, "gpu": 8}), planner.textbook(parse_name("ep64", 64))
    assert apart.chosen.seconds < flat.chosen.seconds
    sends = Counter((c.kind, c.axis) for c in shard(planner.step, apart.plan(), 0).collectives if c.bytes > 1 << 20)
    assert min(sends["all_to_all", axis] for axis in ("node", "gpu")) >= 2 * LAYERS
