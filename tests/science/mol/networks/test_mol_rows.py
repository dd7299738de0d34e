"""Rows of equal size, and the loss that is taken of them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from mol_structures import labelled, teacher

from tutti.science.mol.networks import MolCT, PaiNN, SchNet, pack
from tutti.science.mol.networks.rows import Limits, Rows, row
from tutti.science.mol.networks.training import Objective, Training, errors, fit, fit_references

KINDS = {"schnet": lambda: SchNet(12, 2, 8, 4.0), "painn": lambda: PaiNN(12, 2, 8, 4.0),
         "molct": lambda: MolCT(12, 2, 4, 1, 4.0)}  # fmt: skip


def together(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    stacked = {name: torch.stack([x[name] for x in rows]) for name in rows[0]}
    return {name: x.double() if x.is_floating_point() else x for name, x in stacked.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_padded_rows_is_that_of_the_structures(kind):
    torch.manual_seed(1)
    network, data = KINDS[kind]().double(), labelled(teacher(), range(7))
    fit_references(network, data)
    limits = Limits(30, 300, 5)
    rows = together([row(x, limits, 4.0, network.references) for x in (data[:4], data[4:6], data[6:])])
    batch = pack(data)
    energy, forces = network.energy_and_forces(batch)
    of_energy = ((energy - batch.energy) / batch.sizes).square().mean()
    of_force = (forces - batch.forces).square().mean()
    for weights in ((1.0, 0.0), (0.0, 1.0), (2.0, 30.0)):
        loss = Objective(network, *weights)(**rows)["loss"]
        assert float(loss.detach()) == pytest.approx(float(weights[0] * of_energy + weights[1] * of_force), rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_the_loss_equal_finite_differences(kind):
    torch.manual_seed(1)
    network, data = KINDS[kind]().double(), labelled(teacher(), range(3))
    fit_references(network, data)
    rows = together([row(data, Limits(30, 300, 5), 4.0, network.references)])
    objective = Objective(network, 1.0, 10.0)
    objective(**rows)["loss"].backward()
    draw = torch.Generator().manual_seed(2)
    ways = [(p, torch.randn(p.shape, generator=draw, dtype=p.dtype)) for p in network.parameters()]
    slope = sum(float((p.grad * way).sum()) for p, way in ways if p.grad is not None)
    losses = []
    for sign in (-1, 1):
        with torch.no_grad():
            for p, way in ways:
                p += sign * 1e-6 * way
        losses.append(float(objective(**rows)["loss"].detach()))
        with torch.no_grad():
            for p, way in ways:
                p -= sign * 1e-6 * way
    assert (losses[1] - losses[0]) / 2e-6 == pytest.approx(slope, rel=1e-5)


def test_each_pass_has_every_structure_once_and_rows_depend_on_seed_and_number_alone():
    data = labelled(teacher(), range(20))
    limits = Limits.of(data, 4)
    network = SchNet(8, 1, 8, 4.0)
    rows = Rows(data, network, limits, 100, 3)
    first = [rows.indices(k) for k in range(30)]
    seen = [n for group in first for n in group]
    assert Counter(seen[:20]) == Counter(range(20)) == Counter(seen[20:40]) and seen[:20] != seen[20:40]
    assert Rows(data, network, limits, 100, 3).indices(29) == first[29]
    assert Rows(data, network, limits, 100, 4).indices(0) != first[0]
    assert {name: tuple(x.shape) for name, x in rows[0].items()}["vectors"] == (limits.edges, 3)
    with pytest.raises(IndexError):
        rows[100]


def test_references_are_those_of_the_data():
    oracle, network = teacher(), SchNet(8, 1, 8, 4.0)
    oracle.scale.fill_(1e-4)
    data = labelled(oracle, range(40))
    fit_references(network, data)
    assert network.references[[1, 6, 7, 8]].tolist() == pytest.approx([-13, -1029, -1485, -2042], abs=1e-3)
    assert float(network.scale) == pytest.approx(float(torch.cat([x.forces for x in data]).square().mean().sqrt()))
    assert float(network.references[9]) == 0


def test_errors_vanish_for_the_network_that_made_the_data():
    oracle = teacher()
    metrics = errors(oracle, labelled(oracle, range(6)), atoms=10)
    assert max(metrics.energy_rmse, metrics.force_rmse, metrics.energy_mae, metrics.force_mae) < 1e-12


def test_what_cannot_be_trained_is_refused():
    data, network = labelled(teacher(), range(3)), SchNet(8, 1, 8, 4.0)
    bare = type(data[0])(data[0].species, data[0].positions, data[0].i, data[0].j)
    with pytest.raises(ValueError, match="structure 1 has no energy: give it one, or energy_weight=0"):
        fit(network, [data[0], bare])
    with pytest.raises(ValueError, match="structure 0 has no forces"):
        fit(network, [bare], training=Training(energy_weight=0))
    with pytest.raises(ValueError, match="not both 0"):
        Training(energy_weight=0, force_weight=0)
    with pytest.raises(ValueError, match="steps of the training"):
        Training(steps=0)
