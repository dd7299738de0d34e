"""Steps, graphs and programs can be printed, and tracebacks show the code that was generated."""

import gc
import linecache
import traceback

import pytest
import torch
from torch import fx, nn

import tutti
from tutti.exec.kernels.codegen import generate


@pytest.fixture(scope="module")
def step():
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), (torch.randn(4, 8),)
    return tutti.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), batch, cluster="cpu:2", plan="tp2",
                             loss=lambda m, b: m(b[0]).square().mean(), level="O0")  # fmt: skip


def test_a_step(step):
    assert repr(step) == "Step(Sequential with SGD, plan tp2 on cpu:2, level O0, 37 operators, 0 steps done)"


def test_a_graph(step):
    lines = str(step.graph).splitlines()
    assert lines[0] == repr(step.graph) == "StepGraph(37 operators, 8 inputs, 9 outputs, 4.24e+03 FLOP)"
    assert [line for line in lines if not line.startswith(" ")][1:] == [
        "inputs", "forward", "backward", "update", "outputs",
    ]  # fmt: skip
    assert any(line.split() == ["%arg0_1", "float32[16,", "8]", "param:0.weight"] for line in lines)
    assert any(line.startswith("  %gelu = aten.gelu(%addmm) ") and line.endswith("1/forward/gelu") for line in lines)
    assert len(lines) == 6 + 8 + 37 + 9


def test_a_program(step):
    lines = str(step.program).splitlines()
    assert lines[0] == repr(step.program) and lines[0].startswith("Program(rank 0 of tp2, ")
    assert any(line.split() == ["%arg0_1", "float32[8,", "8]", "tp:S0", "param:0.weight"] for line in lines)
    assert any(line.endswith("all_reduce over tp, 64 bytes sent, for 2/forward/addmm") for line in lines)


def failing() -> fx.Graph:
    graph = fx.Graph()
    node = graph.call_function(torch.ops.aten.mm.default, (graph.placeholder("a"), graph.placeholder("b")))
    node.meta["label"] = "layers.0/forward/mm"
    graph.output((node,))
    return graph


def test_a_traceback_shows_the_line_of_a_program_and_its_label():
    run = generate(failing())
    with pytest.raises(RuntimeError) as error:
        next(run(torch.ones(2, 3), torch.ones(2, 3)))
    shown = "".join(traceback.format_exception(error.value))
    assert "v2 = aten_mm_default_0(v0, v1); v0 = None; v1 = None  # layers.0/forward/mm" in shown


def test_the_source_goes_with_the_program():
    run = generate(failing())
    name = run.__code__.co_filename
    assert linecache.getline(name, 1) == "def run(v0, v1):\n"
    del run
    gc.collect()
    assert not linecache.getline(name, 1)
