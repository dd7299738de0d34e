"""Matrix products in FP8: their error bound, plans that use them, and what is predicted of them."""

from __future__ import annotations

import pytest
import torch

import tutti
import zoo
from cases import slow
from tutti.cli.plan.workload import Captured, Workload
from tutti.hardware import Cluster
from tutti.nn.linear.scaled_mm import FORMATS, LARGEST, block_of, product, round_operand, rounded, scaled_back
from tutti.ops.products.scaled_mm import SCALED_MM
from tutti.plan.planner import Planner
from tutti.sim.dryrun import dry_run


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def bound(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The error of each result at most, from the errors of the operands, with the scales of their blocks."""
    size, total = block_of(a.shape[1], "float8"), torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    for start in range(0, a.shape[1], size):
        x, y = a[:, start : start + size].double(), b[start : start + size].double()
        dx = torch.maximum(x.abs() * 2**-4, x.abs().amax(1, keepdim=True) / LARGEST * 2**-10)
        dy = torch.maximum(y.abs() * 2**-4, y.abs().amax(0, keepdim=True) / LARGEST * 2**-10)
        total += dx @ y.abs() + x.abs() @ dy + dx @ dy
    return total


@pytest.mark.parametrize("k", [16, 96, 128, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_within_the_bound(k, dtype):
    generator = torch.Generator().manual_seed(k)
    a, b = (torch.randn(48, k, generator=generator) * 10).to(dtype), torch.randn(k, 32, generator=generator).to(dtype)
    a[3] = 0
    a[4, 1] = 1e4  # an outlier makes the rest of its block coarse
    result, exact = product(a, b, "float8"), a.double() @ b.double()
    allowed = bound(a, b) + exact.abs() * (2**-8 if dtype == torch.bfloat16 else 1e-6)
    assert ((result.double() - exact).abs() <= allowed).all()
    assert (result.double() - exact).norm() > 1e-3 * exact.norm(), "it rounds"
    assert not result[3].any()


def test_no_number_overflows():
    x = torch.tensor([[3e38, -1e-30, 0.0]])
    numbers, scale = rounded(x, 1)
    assert numbers.float().isfinite().all() and (numbers.float() * scale)[0, 0] == pytest.approx(3e38, rel=1e-6)


def rounded_to(x: torch.Tensor, name: str) -> torch.Tensor:
    """x (rows, k) rounded to a format along dim 1 and scaled back."""
    return scaled_back(*round_operand(x, 1, name), name)[:, : x.shape[1]]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("k", [16, 48, 128, 200])
def test_products_are_those_of_rounded_operands(name, k):
    """The last block may be smaller. A block of equal magnitude is exact."""
    generator = torch.Generator().manual_seed(k)
    a, b = torch.randn(32, k, generator=generator), torch.randn(k, 16, generator=generator)
    expected = rounded_to(a, name).double() @ rounded_to(b.t(), name).t().double()
    torch.testing.assert_close(product(a, b, name).double(), expected, rtol=1e-4, atol=1e-4)
    signs = torch.where(a > 0, 3.0, -3.0)
    torch.testing.assert_close(rounded_to(signs, name), signs, rtol=1e-6, atol=0)


def test_mxfp8_has_scales_of_powers_of_two():
    """Numbers of a block times a power of two are rounded alike, and nothing is above the largest number."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rounded_to(x * 2**-20, "mxfp8"), rounded_to(x, "mxfp8") * 2**-20)
    largest = x.abs().unflatten(1, (2, 32)).amax(2).repeat_interleave(32, 1)
    error = (rounded_to(x, "mxfp8") - x).abs()
    assert (error <= torch.maximum(x.abs() * 2**-4, largest * 2**-16)).all()


def test_nvfp4_has_the_numbers_of_e2m1():
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    row = torch.cat([numbers, -numbers]).unsqueeze(0)
    assert torch.equal(rounded_to(row, "nvfp4"), row)
    assert torch.equal(rounded_to(row * 2**-30, "nvfp4"), row * 2**-30)
    between = torch.tensor([[6.0, 2.4, 2.6, 5.1, 0.7, 0.8, *[0.0] * 10]])
    assert rounded_to(between, "nvfp4")[0, :6].tolist() == [6.0, 2.0, 3.0, 6.0, 0.5, 1.0]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_what_is_not_finite_stays_so(name, value):
    x = torch.ones(2, 32)
    x[1, 3] = value
    result = product(x, torch.ones(32, 4), name)
    assert result[0].isfinite().all() and not result[1].isfinite().any()


def test_an_unknown_format():
    with pytest.raises(ValueError, match="no format 'int3' of matrix products; there are float8, mxfp8, nvfp4"):
        rounded_to(torch.ones(2, 16), "int3")


def trained(plan: str, devices: int):
    model, data = zoo.llama(2), zoo.tokens(16, 16)
    step = tutti.parallelize(model, adam(model), data, cluster=f"cpu:{devices}", plan=plan, level="O0")
    gradients = step.gradients(data)
    return step, [step(data).item() for _ in range(2)], gradients


@pytest.mark.parametrize("word", ["mxfp8", "nvfp4"])
def test_plans_compute_in_other_formats(word):
    step, losses, _ = trained(f"dp2x{word}", 2)
    assert step.plan.name == f"dp2x{word}" and word.upper() in step.plan.explain()
    assert {node.args[4] for node in step.graph.calls if node.target is SCALED_MM} == {word}
    assert losses == pytest.approx(trained("single", 1)[1], rel=0.05)


@pytest.mark.parametrize(
    ("plan", "devices"), [("dp2xfp8", 2), ("zero3xrecompute-attentionxfp8", 2), slow("tp2xfp8", 2), slow("pp2xfp8", 2)]
)
def test_plans_compute_in_fp8(plan, devices):
    step, losses, _ = trained(plan, devices)
    products = [node for node in step.graph.calls if node.target is SCALED_MM]
    assert len({node.meta["label"] for node in products}) == 3 * 7  # q, k, v, o, gate, up and down: three products each
    assert step.plan.from_json(step.plan.to_json()) == step.plan and "in FLOAT8" in step.plan.explain()
    _, exact, _ = trained("single", 1)
    assert losses == pytest.approx(exact, rel=0.02) and losses != exact


def test_a_split_of_the_batch_changes_only_the_order_of_sums():
    _, losses, gradients = trained("dp2xfp8", 2)
    _, single, expected = trained("singlexfp8", 1)
    assert losses[0] == pytest.approx(single[0], rel=1e-5)
    name = "model.embed_tokens.weight"
    assert (gradients[name] - expected[name]).norm() <= 0.02 * expected[name].norm()


def test_time_is_that_of_the_device_in_fp8(tmp_path):
    import json

    config = {**zoo.CONFIG, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    captured = Captured(Workload(str(tmp_path), 8, 2048), lambda text: None)
    cluster, seconds = Cluster.parse("h100:1"), {}
    for name in ("single", "singlexfp8"):
        variant = tutti.plan.textbook.parse_name(name, 1).variant
        graph = captured.graph(1, variant)
        prediction = dry_run(graph, Planner(graph, cluster, (), 1, variant).named(name), cluster, "O2")
        rows = [
            row for row in prediction.slowest() if "mlp" in row[0] and row[0].endswith("mm") and row[1] == "forward"
        ]
        seconds[name] = sum(took for *_, took in rows)
    assert 0.5 < seconds["singlexfp8"] / seconds["single"] < 0.75  # twice the peak, and operands are rounded


def test_a_model_without_such_products():
    model = torch.nn.Linear(16, 16)
    with pytest.raises(ValueError, match="no matrix product of a numbered layer can be in float8"):
        tutti.parallelize(model, adam(model), (torch.ones(4, 16),), loss=lambda m, b: m(*b).sum(), cluster="cpu:2",
                          plan="dp2xfp8", level="O0")  # fmt: skip
