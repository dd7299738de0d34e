import numpy as np
import pytest
import torch

from tutti.train.scores import Features, frechet_distance


def test_one_dim_is_the_closed_form():
    """(m - n)^2 + (s - t)^2 for normal distributions with means m, n and deviations s, t."""
    assert frechet_distance(np.array([1.0]), np.array([[9.0]]), np.array([3.0]), np.array([[4.0]])) == pytest.approx(
        (1 - 3) ** 2 + (3 - 2) ** 2
    )


def test_common_axes_are_the_sum_over_axes():
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(4, 4)))[0]
    s, t = np.array([1.0, 2.0, 3.0, 0.0]), np.array([2.0, 2.0, 0.5, 0.3])
    a, b = (turn * s**2) @ turn.T, (turn * t**2) @ turn.T
    assert frechet_distance(np.zeros(4), a, np.ones(4), b) == pytest.approx(4 + ((s - t) ** 2).sum(), abs=1e-6)


def test_it_is_that_of_the_matrix_square_root():
    from scipy.linalg import sqrtm

    draw = np.random.default_rng(1)
    a, b = (np.cov(draw.normal(size=(6, 40)) * draw.normal(size=(6, 1))) for _ in range(2))
    wanted = np.trace(a + b - 2 * np.real(sqrtm(a @ b)))
    assert frechet_distance(np.zeros(6), a, np.zeros(6), b) == pytest.approx(wanted, rel=1e-6)
    assert frechet_distance(np.zeros(6), a, np.zeros(6), a) == pytest.approx(0, abs=1e-9)


def test_features_are_collected_batch_by_batch():
    rows = torch.randn(50, 2, 3, generator=torch.Generator().manual_seed(0)) + 1e3
    whole, parts = Features(), Features()
    whole.update(rows)
    for part in (rows[:7], rows[7:7], rows[7:31], rows[31:]):
        parts.update(part)
    flat = rows.flatten(1).double().numpy()
    np.testing.assert_allclose(parts.mean, flat.mean(0), rtol=1e-12)
    np.testing.assert_allclose(parts.covariance, np.cov(flat.T), rtol=1e-6)
    assert whole.distance(parts) == pytest.approx(0, abs=1e-6)


def test_samples_of_gaussians_give_the_distance_of_the_gaussians():
    draw = torch.Generator().manual_seed(0)
    scale = torch.tensor([1.0, 2.0, 0.5])
    extractor = torch.nn.Linear(3, 3, bias=False)
    torch.nn.init.eye_(extractor.weight)
    real = Features.of(extractor, (torch.randn(5000, 3, generator=draw) for _ in range(4)))
    generated = Features.of(extractor, (torch.randn(5000, 3, generator=draw) * scale + 1 for _ in range(4)))
    assert real.distance(generated) == pytest.approx(3 + ((scale - 1) ** 2).sum().item(), rel=0.05)


def test_features_that_do_not_fit():
    a, b = Features(), Features()
    a.update(torch.randn(4, 3))
    b.update(torch.randn(4, 2))
    with pytest.raises(ValueError, match="one extractor for both"):
        a.distance(b)
    with pytest.raises(ValueError, match="at least two rows"):
        Features().distance(a)
