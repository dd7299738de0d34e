"""The distributed runtime answers as the virtual one does."""

import pytest
import torch
import torch.distributed as dist

from tutti.exec.kernels.codegen import Request
from tutti.exec.runtimes.runtime import Distributed, Virtual, join_job, own_slice, runtime_for
from tutti.exec.runtimes.virtual import exchange
from tutti.ir.spec import Spec
from tutti.plan.layouts.layout import Layout, Partial, Split, coordinates_of

MESH = {"a": 2, "b": 2}
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.uint8, torch.bool)
REQUESTS = [
    (kind, axis, op, torch.float32)
    for axis in MESH
    for kind, op in [("all_reduce", "sum"), ("all_reduce", "avg"), ("all_reduce", "max"), ("all_gather", ""),
                     ("reduce_scatter", "sum"), ("reduce_scatter", "avg"), ("all_to_all", ""),
                     ("ppermute", "1 0.0"), ("ppermute", "-1 -inf"), ("ppermute", "1 wrap")]
]  # fmt: skip
REQUESTS += [("ppermute", "a b", "3 wrap", torch.float32), ("ppermute", "a b", "-2 1.5", torch.float32)]
REQUESTS += [(kind, "a", op, dtype) for kind in ("all_reduce", "reduce_scatter") for op in ("sum", "max", "min")
             for dtype in DTYPES]  # fmt: skip
MOVES = [("all_gather", "a", ""), ("all_to_all", "b", ""), ("ppermute", "b", "1 0.0")]
REQUESTS += [(*move, dtype) for move in MOVES for dtype in (torch.bool, torch.int16, torch.complex64)]
LAYOUTS = [
    Layout(),
    Layout.of({"a": Split(0), "b": Split(1)}),
    Layout.of({"b": Split(0, 2)}),
    Layout.of({"a": Partial()}),
]


def asked(rank, kind, axis, op, dtype):
    """The numbers of one rank hold a NaN where the operation must not lose it."""
    x = torch.arange(24.0).view(3, 4, 2).transpose(0, 2) * (rank + 1)  # (2, 4, 3), not contiguous
    if op in ("max", "min") and dtype.is_floating_point and rank == 1:
        x[1, 2, 0] = torch.nan
    return Request(kind, axis, op, x.to(dtype))


def answer_all() -> list[torch.Tensor]:
    """Runs in each Gloo process."""
    join_job(torch.device("cpu"))
    runtime = Distributed(MESH)
    answers = [runtime.carry_out(asked(runtime.rank, *request)) for request in REQUESTS]
    whole = torch.arange(32.0).view(4, 8)
    parts = [layout.local_slice(whole, MESH, coordinates_of(runtime.rank, MESH)) for layout in LAYOUTS]
    spec = Spec((4, 8), torch.float32)
    wholes = [runtime.whole([part], layout, spec) for part, layout in zip(parts, LAYOUTS, strict=True)]
    replica = torch.ones(4, 8)
    runtime.whole([replica], Layout(), spec).zero_()
    return [*answers, *wholes, replica]


def test_gloo_answers_as_the_virtual_runtime_does(pool):
    whole = torch.arange(32.0).view(4, 8)
    for rank, answers in enumerate(pool.run(answer_all)):
        for request, ours in zip(REQUESTS, answers, strict=False):
            expected = exchange([asked(r, *request) for r in range(4)], MESH)[rank]
            torch.testing.assert_close(
                ours, expected, rtol=1e-6, atol=0, equal_nan=True, msg=lambda m, r=request: f"{r}: {m}"
            )
        wholes = answers[len(REQUESTS) :]
        assert all(torch.equal(t, whole) for t in wholes[:-1])
        assert torch.equal(wholes[-1], torch.ones(4, 8)), "a whole tensor is a copy"


def test_an_axis_of_one_rank_needs_no_group(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    runtime, x = Distributed({"a": 1}), torch.ones(1, 3)
    assert runtime.carry_out(Request("all_gather", "a", "", x)).shape == (1, 1, 3)
    assert runtime.carry_out(Request("reduce_scatter", "a", "sum", x)).shape == (3,)
    assert torch.equal(runtime.carry_out(Request("all_reduce", "a", "sum", x)), x)


def test_one_process_runs_any_mesh_virtually():
    runtime = runtime_for({"a": 2, "b": 3})
    assert isinstance(runtime, Virtual) and runtime.ranks == list(range(6))


@pytest.mark.parametrize("layout", LAYOUTS[:3])
def test_a_part_has_memory_of_its_own(layout):
    whole = torch.arange(32.0).view(4, 8)
    part = own_slice(whole, layout, MESH, 1)
    assert part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes
    part.zero_()
    assert torch.equal(whole, torch.arange(32.0).view(4, 8))
