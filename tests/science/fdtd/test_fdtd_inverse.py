"""The inverse-scattering example against the numbers that MindElec logs (loss of epoch 0, PSNR, SSIM)."""

from __future__ import annotations

import pytest
import torch

from tutti.science.em.fdtd import inverse

pytestmark = pytest.mark.starts


def test_first_loss():
    simulation = inverse.scene()
    labels = simulation.run(inverse.truth(), inverse.STEPS)["received"]
    received = simulation.run(inverse.permittivity(torch.zeros(40, 40)), inverse.STEPS)["received"]
    loss = float((received - labels).double().square().sum())
    assert loss == pytest.approx(0.2114370, rel=1e-6)  # with labels of our own
    assert loss == pytest.approx(0.2114364, rel=4e-6)  # MindElec, whose published labels differ by 7e-6 of their peak


@pytest.mark.slow
def test_reconstruction():
    eps, losses = inverse.reconstruct()
    assert len(losses) == 100 and losses[-1] < 1.2e-4
    assert inverse.psnr(eps, inverse.truth()) >= 27.8
    assert inverse.ssim(eps, inverse.truth()) >= 0.963
