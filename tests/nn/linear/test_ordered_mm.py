import pytest
import torch
from torch.library import opcheck

import tutti
from tutti.nn.linear.ordered_mm import ordered_mm

ops = torch.ops.tutti
SHAPES = {"a": (6, 5), "b": (5, 4), "added": (6, 4)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_aten(dtype):
    torch.manual_seed(0)
    a, b, added = (torch.randn(shape).to(dtype) for shape in SHAPES.values())
    assert torch.equal(ordered_mm(a, b), a @ b)
    assert torch.equal(ordered_mm(a, b, alpha=0.5), 0.5 * (a @ b))
    assert torch.equal(ordered_mm(a, b, added, beta=2, alpha=0.5), torch.addmm(added, a, b, beta=2, alpha=0.5))
    checks = ("test_schema", "test_faketensor")
    opcheck(ops.ordered_mm.default, (added, a, b, 2.0, 0.5), test_utils=checks)
    opcheck(ops.ordered_mm.default, (None, a, b), test_utils=checks)


def test_muon_keeps_sums_whole_under_tensor_parallelism():
    """Its products are split by rows; nothing is reduced in bfloat16."""
    model = torch.nn.Linear(8, 8, bias=False)
    step = tutti.parallelize(
        model,
        torch.optim.Muon(model.parameters()),
        (torch.ones(4, 8),),
        loss=lambda m, b: m(b[0]).square().mean(),
        cluster="cpu:2",
        plan="tp2",
        level="O0",
    )
    products = [n for n in step.graph.calls if n.target is ops.ordered_mm.default]
    assert len(products) == 3 * 5
    sent = [c for c in step.collectives() if "ordered_mm" in c.label]
    assert {c.kind for c in sent} == {"all_gather"}
