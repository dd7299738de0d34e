"""What the search takes operators for is what the simulator takes their calls for, but for copies of lowering."""

from __future__ import annotations

import pytest
import torch

import models
import tutti
from cases import slow
from tutti.hardware import Device
from tutti.hardware.curve import Curve
from tutti.hardware.device import FAMILIES, Link
from tutti.plan.layouts.price import Pricer
from tutti.plan.layouts.problem import problem_of
from tutti.plan.plan import Plan
from tutti.sim.dryrun import dry_run

RATES = {family: (3 + i) * 1e-10 for i, family in enumerate(FAMILIES)}  # seconds a byte, all different
CURVES = {f"{family} float32": Curve(((0.0, 0.0), (1.0, rate))) for family, rate in RATES.items()}
CPU = Device("cpu", {"float32": 1e11}, 1e11, 1e10, streams=CURVES)
ONE = tutti.Cluster(CPU, ((1, Link(1e9, 1e-6)),))


@pytest.mark.parametrize("name", ["gpt2", "llama", slow("unet2d"), "resnet", "dlrm", "mixtral", "mixture"])
def test_the_search_and_the_simulator_agree_on_one_device(name):
    model, batch, loss = models.case(name)
    graph = tutti.capture(model, batch, torch.optim.AdamW(model.parameters()), loss)
    pricer = Pricer(ONE, {"dp": 1})
    ours = sum(o.count * pricer.compute(o, {}) for o in problem_of(graph).operators.values())
    assert ours == pytest.approx(dry_run(graph, Plan({"dp": 1}), ONE).compute, rel=0.07)
