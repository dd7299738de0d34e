"""The inverse-scattering example against the numbers that MindElec logs (loss of epoch 0, PSNR, SSIM)."""

from __future__ import annotations

import pytest
import torch

from tutti.science.em.fdtd import inverse

pytestmark = pytest.mark.starts


def test_first_loss():
    simulation = inverse.scene()
    labels = simulation.run(inverse.truth(), inverse.STEPS)["received"]
    found = simulation.run(inverse.permittivity(torch.zeros(40, 40)), inverse.STEPS)["received"]
    assert f"{float((found - labels).square().sum()):.6e}" == "2.114364e-01"


@pytest.mark.slow
def test_reconstruction():
    eps, losses = inverse.reconstruct()
    assert len(losses) == 100 and losses[-1] < 1.2e-4
    assert inverse.psnr(eps, inverse.truth()) >= 27.8
    assert inverse.ssim(eps, inverse.truth()) >= 0.963
