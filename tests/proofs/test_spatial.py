"""An image split over its height: each device has a quarter of every activation, and border rows are all that travels.

EDSR of 16 blocks (as the paper's baseline has), trained on four devices: the numbers are those of one device, the
bytes exchanged those of the halo formula, and each device holds less than 0.30 of what one device would.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import models
import tutti
from tutti.exec.kernels.codegen import Request, Run
from tutti.exec.runtimes.virtual import exchange
from tutti.ir.step_graph import UPDATE, StepGraph
from tutti.lower.shard import shard
from tutti.plan.layouts.choice import Choice, candidates, layouts
from tutti.plan.layouts.layout import Layout, Mesh, Split
from tutti.plan.layouts.problem import Operator, problem_of
from tutti.plan.plan import Plan

RANKS, BLOCKS, BATCH, SIZE, SCALE, FLOAT = 4, 16, 2, 96, 2, 4
HEIGHT = 2  # the dim of an image (batch, channels, height, width)
MESH = {"height": RANKS}


def case() -> models.Case:
    torch.manual_seed(0)
    model, (_, _, loss) = models.EDSR(blocks=BLOCKS), models.edsr()
    images = {"image": models.random(BATCH, 3, SIZE, SIZE)}
    images["target"] = models.random(BATCH, 3, SCALE * SIZE, SCALE * SIZE, seed=2)
    return model, images, loss


def parallelize(plan: Plan | str, devices: int) -> tuple[tutti.Step, dict[str, torch.Tensor]]:
    model, batch, loss = case()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return tutti.parallelize(model, optimizer, batch, loss=loss, cluster=f"cpu:{devices}", plan=plan, level="O0"), batch


def by_height(graph: StepGraph) -> Plan:
    """Whatever reads or makes an image has its rows; parameters and their update are whole on every device."""
    problem, inputs, operators = problem_of(graph), {}, {}
    for label, o in problem.operators.items():
        if o.kind == "batch":
            inputs[label] = Layout.of({"height": Split(HEIGHT)})
        elif not o.is_input and o.phase != UPDATE and (choice := rows(o, problem.cuts[label])):
            operators[label] = {"height": choice}
    return Plan(MESH, inputs, operators, name="by height", graph=graph.fingerprint)


def rows(o: Operator, cuts: dict[str, set[tuple[int, int]]]) -> Choice | None:
    """The choice that splits the rows of an operator's images; None where it has none."""
    shapes = [o.rule.shape(dims) for dims in o.rule.inputs + o.rule.outputs]
    images = [i for i, shape in enumerate(shapes) if len(shape) == 4 and shape[0] == BATCH]
    for choice in candidates(o.rule, cuts, RANKS):
        ins, outs = layouts(o.rule, {"height": choice})
        if images and all((ins + outs)[i]["height"] == Split(HEIGHT) for i in images):
            return choice
    assert not images, f"{o.label} cannot be split over the height of its images (rule: {o.rule.notation})"
    return None


@pytest.fixture(scope="module")
def one():
    """The step on one device, the batch, its loss and what it keeps afterwards."""
    step, batch = parallelize("single", 1)
    return step, batch, step(batch), step.training_state()


def test_numbers_are_those_of_one_device(one):
    step, batch, loss, expected = one
    four, _ = parallelize(by_height(step.graph), RANKS)
    assert abs(four(batch) - loss) <= 1e-5 * loss
    ours = four.training_state()
    for key in expected.keys() - {"step"}:
        error = (ours[key] - expected[key]).norm() / expected[key].norm()
        assert error <= 1e-5, f"{key} differs by {error:.1e}"
    assert sum(key.startswith("momentum_buffer:") for key in expected) == 2 * (2 * BLOCKS + 3), "gradients"


def halo_bytes() -> int:
    """What all ranks together send for the convolutions of a step.

    An output row of a kernel of k rows reads k - 1 rows around its own, so that over each of the borders between ranks
    k - 1 input rows of (batch, channels, width) numbers travel: before the forward pass, again before the backward pass
    (for the weight's gradient), and the gradients of these rows back to where the rows came from. Nobody asks for the
    gradient of the image.
    """
    model, batch, _ = case()
    total = 0

    def add(convolution: nn.Conv2d, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        nonlocal total
        channels, width = convolution.in_channels, inputs[0].shape[3]
        row = inputs[0].shape[0] * channels * width * FLOAT
        times = 2 if inputs[0] is batch["image"] else 3
        total += (RANKS - 1) * (convolution.kernel_size[0] - 1) * row * times

    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(add)
    model(batch["image"])
    return total


def test_bytes_are_those_of_the_halo_formula(one):
    graph = one[0].graph
    step = graph.keep([name for name in graph.outputs if name not in graph.gradient_names])
    sent: Counter[str] = Counter()
    for rank in range(RANKS):
        for collective in shard(step, by_height(graph), rank).collectives:
            sent[collective.kind] += collective.bytes
    row = BATCH * SIZE * FLOAT  # of one channel; at the end rows are twice as long
    by_hand = 3 * 2 * row * (2 * 3 + 3 * (2 * BLOCKS + 1) * 24 + 3 * 24 * 2)
    assert halo_bytes() == by_hand
    assert sent["ppermute"] == by_hand
    assert set(sent) == {"ppermute", "all_reduce"}, "gradients and the loss are summed, images never gathered"


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors that are alive. Each storage counts once, views nothing.

    What a kernel allocates for itself and frees before it returns is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()
        self.now = self.peak = 0

    def hold(self, x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self.storages:
            self.storages.add(key)
            weakref.finalize(storage, self.drop, key, size)
            self.now += size
            self.peak = max(self.peak, self.now)
        return x

    def drop(self, key: int, size: int) -> None:
        self.storages.remove(key)
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for x in output if isinstance(output, tuple | list) else [output]:
            if isinstance(x, torch.Tensor):
                self.hold(x)
        return output


class Measuring:
    """A runtime that runs the Programs in lockstep, then each by itself with what it received: `peaks` in bytes.

    Counted for each rank: parameters, momenta, its part of the batch, activations, gradients, and what it receives.
    """

    def __init__(self, runtime):
        self.mesh, self.ranks, self.agree, self.peaks = runtime.mesh, runtime.ranks, runtime.agree, []

    def run(self, runs: Sequence[Run], inputs: Sequence[Sequence[torch.Tensor]]) -> list[tuple]:
        copies = [[x.clone() for x in row] for row in inputs]
        results, received = lockstep(runs, inputs, self.mesh)
        self.peaks = [peak(*rank) for rank in zip(runs, copies, received, strict=True)]
        return results


def lockstep(runs: Sequence[Run], inputs: Sequence[Sequence[torch.Tensor]], mesh: Mesh):
    """As `run_virtual`, but also what each rank received."""
    programs = [run(*values) for run, values in zip(runs, inputs, strict=True)]
    received: list[list[torch.Tensor]] = [[] for _ in runs]
    answers: list = [None] * len(runs)
    results: list = []
    while not results:
        requests: list[Request] = []
        for program, answer in zip(programs, answers, strict=True):
            try:
                requests.append(program.send(answer))
            except StopIteration as stop:
                results.append(stop.value)
        if requests:
            answers = exchange(requests, mesh)
            for inbox, answer in zip(received, answers, strict=True):
                inbox.append(answer.clone())
    return results, received


def peak(run: Run, inputs: list[torch.Tensor], received: list[torch.Tensor]) -> int:
    """The most bytes that are alive while a Program runs. Its inputs live throughout, as the step keeps them."""
    with Live() as live:
        program = run(*map(live.hold, inputs))
        answers = iter(received)
        try:
            next(program)
            while True:
                program.send(next(answers).clone())
        except StopIteration:
            return live.peak


def measured(plan: Plan | str, devices: int) -> list[int]:
    step, batch = parallelize(plan, devices)
    measuring = Measuring(step.runtime)
    step.runtime.run = measuring.run
    step(batch)
    return measuring.peaks


@pytest.mark.slow
def test_peak_memory_of_a_rank(one):
    (whole,) = measured("single", 1)
    parts = measured(by_height(one[0].graph), RANKS)
    activation = BATCH * 24 * SIZE * SIZE * FLOAT
    assert whole > 2 * BLOCKS * activation, "each block keeps what it reads and what its ReLU makes"
    assert max(parts) < 0.30 * whole, f"{[round(p / whole, 3) for p in parts]} of {whole} bytes"
    assert min(parts) > 0.25 * whole
