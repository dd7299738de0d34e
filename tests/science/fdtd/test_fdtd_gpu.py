"""On a GPU: Triton's updates and gradients against the kernels of the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fdtd_cases import case

pytestmark = [
    pytest.mark.starts,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:.* cells per wavelength"),
    pytest.mark.filterwarnings("ignore:a source at node"),
    pytest.mark.filterwarnings("ignore:monitor .*(nothing arrives|absorbing layers|not decayed)"),
]


@pytest.mark.parametrize("mode", ["TM", "TE", "3D"])
def test_a_gpu_gives_the_results_of_the_cpu(mode):
    simulation, medium, wanted = case(mode)
    pole = medium["poles"][0]
    medium["poles"] = [replace(pole, where=pole.strength.detach() > 0)]  # a mask on the CPU
    there = {"eps_r": medium["eps_r"].cuda(), "sigma": medium["sigma"].cuda(),
             "poles": [replace(medium["poles"][0], strength=pole.strength.cuda())]}  # fmt: skip
    own, gpu = simulation.run(**medium, steps=40), replace(simulation, device="cuda")
    losses = [sum(abs(own[x.name]).square().sum() for x in simulation.monitors)]
    for context in (torch.no_grad(), torch.enable_grad()):
        with context:
            result = gpu.run(**there, steps=40)
            for x in simulation.monitors:
                y = own[x.name].detach()
                torch.testing.assert_close(
                    result[x.name].detach().cpu(), y, rtol=1e-9, atol=1e-12 * float(abs(y).max())
                )
    losses.append(sum(abs(result[x.name]).square().sum() for x in simulation.monitors).cpu())
    gradients = [torch.autograd.grad(loss, wanted) for loss in losses]
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-11 * float(abs(x).max()))
