"""Functions are compiled before a Program first runs, their compilers beside each other."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import torch
from torch import fx

import tutti
import zoo
from tutti import compat
from tutti.compile import segment_calls
from tutti.compile.compiled import Compiled, compile_ahead

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
aten = torch.ops.aten


@pytest.fixture
def events(monkeypatch):
    """What compiles and what is called, in order."""
    seen: list[str] = []
    monkeypatch.setattr(segment_calls, "COMPILED", {})
    compile_, call = Compiled.compile, Compiled.__call__

    def compiling(self, args):
        seen.append("compiled")
        return compile_(self, args)

    def called(self, *args):
        seen.append("called")
        return call(self, *args)

    monkeypatch.setattr(Compiled, "compile", compiling)
    monkeypatch.setattr(Compiled, "__call__", called)
    return seen


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.starts
def test_nothing_is_compiled_while_a_program_runs(events, level):
    model, batch = zoo.gpt2(2), zoo.tokens(2)
    optimizer = torch.optim.AdamW(model.parameters())
    step = tutti.parallelize(model, optimizer, batch, cluster="cpu:1", plan="single", level=level, clip_norm=1.0)
    assert events == []
    step(batch)
    first = events.index("called")
    assert 0 < events.count("compiled") == first == sum(len(f.compiled) for f in segment_calls.COMPILED.values())


@pytest.mark.starts
def test_compilers_are_not_waited_for_one_by_one(monkeypatch):
    from torch._inductor.async_compile import AsyncCompile

    waits, wait = [], AsyncCompile.wait
    monkeypatch.setattr(AsyncCompile, "wait", lambda self, scope: waits.append(wait(self, scope)))
    x = torch.randn(5, 7)
    with compat.compilers_beside_each_other():
        functions = [compat.compile_graph(_powers(n), [x]) for n in (2, 3)]
        assert waits == []
    assert len(waits) == 2
    assert [f(x)[0].allclose(x**n) for f, n in zip(functions, (2, 3), strict=True)] == [True, True]
    torch.testing.assert_close(compat.compile_graph(_powers(4), [x])(x)[0], x**4)
    assert len(waits) == 3


@pytest.fixture
def libraries(tmp_path, monkeypatch):
    """Counts what the C++ compiler makes; nothing is on disk yet."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return lambda: len(list(tmp_path.rglob("*.main.so")))


@pytest.mark.starts
def test_kernels_are_compiled_by_the_few(libraries):
    x, several = torch.randn(5, 7), range(2, 2 + compat.KERNELS + 1)
    with compat.compilers_beside_each_other():
        functions = [compat.compile_graph(_powers(n), [x]) for n in several]
    for n, function in zip(several, functions, strict=True):
        torch.testing.assert_close(function(x)[0], x**n)
    assert libraries() == 2


@pytest.mark.starts
def test_kernels_that_cannot_stand_beside_each_other_are_compiled_alone(libraries, monkeypatch):
    from torch._inductor.async_compile import AsyncCompile

    file = compat.compiler._Kernels()
    kernel = """
        static float offset() {{ return {0}; }}
        extern "C" void kernel(const float* x, float* y) {{ *y = *x + offset(); }}
    """
    written = [file.write(["const float*", "float*"], kernel.format(n)) for n in (1, 2)]
    monkeypatch.setattr(AsyncCompile, "submit", lambda work: None)
    file.compile()
    for n, function in enumerate(written, 1):
        x, y = torch.tensor([0.5]), torch.empty(1)
        function.result()(x, y)
        assert y.item() == 0.5 + n
    assert libraries() == 2


@pytest.mark.starts
def test_on_one_core(libraries):
    from torch._inductor import config

    x, several = torch.rand(5, 7), (12, 13, 12)
    with config.patch(compile_threads=1), compat.compilers_beside_each_other():
        functions = [compat.compile_graph(_powers(n), [x]) for n in several]
    for n, function in zip(several, functions, strict=True):
        torch.testing.assert_close(function(x)[0], x**n)
    assert libraries() == 1


@pytest.mark.starts
def test_after_an_error_everything_is_compiled_anew(monkeypatch):
    graph = fx.Graph()
    x = graph.placeholder("x")
    first, second = Compiled(_powers(2)), Compiled(_powers(3))
    graph.output([graph.create_node("call_function", f, (x,), name=name) for f, name in ((first, "a"), (second, "b"))])

    def fails(args):
        raise RuntimeError("out of registers")

    monkeypatch.setattr(second, "compile", fails)
    with pytest.raises(RuntimeError, match="out of registers"):
        compile_ahead(graph, [torch.randn(5, 7)])
    y = torch.randn(5, 7)
    torch.testing.assert_close(first(y)[0], y**2)


@pytest.mark.starts
def test_arguments_that_lie_otherwise_than_expected_are_compiled_for_when_they_come(events):
    graph = fx.Graph()
    x = graph.placeholder("x")
    function = Compiled(_powers(2))
    graph.output(graph.create_node("call_function", function, (x,), name="segment"))
    compile_ahead(graph, [torch.randn(5, 7)])
    compile_ahead(graph, [torch.randn(7, 5).t()])  # there is something already
    assert events == ["compiled"]
    y = torch.randn(7, 5).t()
    torch.testing.assert_close(function(y)[0], y**2)
    assert events == ["compiled", "called", "compiled"]


def _powers(n: int) -> fx.Graph:
    graph = fx.Graph()
    x = power = graph.placeholder("x")
    for _ in range(n - 1):
        power = graph.call_function(aten.mul.Tensor, (power, x))
    graph.output((power,))
    return graph


@pytest.mark.starts
@pytest.mark.slow
def test_vector_instructions_are_those_that_torch_finds_by_itself():
    setup = "from torch._inductor import cpu_vec_isa as c; from tutti import compat; {}; i = c.pick_vec_isa(); "
    script = setup + "print(i, i.build_arch_flags(), [str(x) for x in c.valid_vec_isa_list()])"
    ways = ("compat.compiler._find_vector_instructions(c)", "pass")
    ours, torchs = (
        subprocess.run([sys.executable, "-c", script.format(way)], capture_output=True, text=True, check=True).stdout
        for way in ways
    )
    assert ours == torchs != ""
