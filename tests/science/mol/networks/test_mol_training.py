"""Training by `tutti.Trainer`: on several devices as on one, resumed as if it had not stopped."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mol_structures import labelled, molecule, teacher

from gloo import Pool
from tutti.science.mol.networks import MolCT, Network, PaiNN, SchNet
from tutti.science.mol.networks.training import Fit, Training, fit

KINDS = {"schnet": lambda: SchNet(12, 2, 8, 4.0), "painn": lambda: PaiNN(12, 2, 8, 4.0),
         "molct": lambda: MolCT(12, 2, 4, 1, 4.0)}  # fmt: skip


def trained(kind: str, steps: int = 6, **options) -> tuple[Network, Fit]:
    torch.manual_seed(1)
    network, oracle = KINDS[kind](), teacher()
    how = Training(steps=steps, batch=8, rows=2, rate=5e-3, every=3)
    options = {"level": "O0", "logging_steps": 1, "cluster": "cpu:1", "plan": "single"} | options
    return network, fit(network, labelled(oracle, range(24)), labelled(oracle, range(100, 108)), how, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_two_devices_train_as_one(kind):
    one, first = trained(kind)
    two, second = trained(kind, cluster="cpu:2", plan="dp")
    assert list(second.losses.values()) == pytest.approx(list(first.losses.values()), rel=1e-4)
    assert first.losses[6] < first.losses[1]
    assert sorted(first.validation) == [3, 6] and second.errors and first.errors
    assert second.errors.force_mae == pytest.approx(first.errors.force_mae, rel=1e-3)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.allclose(a, b, atol=2e-4)


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path):
    whole, first = trained("schnet")
    trained("schnet", folder=tmp_path, save_steps=3)
    (tmp_path / "checkpoint-6").rename(tmp_path / "last")
    again, second = trained("schnet", folder=tmp_path, save_steps=3, resume=True)
    assert [second.losses[n] for n in (4, 5, 6)] == [first.losses[n] for n in (4, 5, 6)]
    for a, b in zip(whole.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_a_network_learns():
    torch.manual_seed(1)
    network, oracle = PaiNN(16, 1, 10, 4.0), teacher()
    fitted = fit(network, labelled(oracle, range(45)), labelled(oracle, range(100, 110)),
                 Training(steps=80, batch=15, rate=1e-2), level="O0", cluster="cpu:1", plan="single")  # fmt: skip
    assert fitted.errors and fitted.errors.force_mae < 0.25 * float(network.scale)
    assert network.seen_species.nonzero().flatten().tolist() == [1, 6, 7, 8]


def test_training_without_edges_names_the_units_of_the_cutoff():
    """A cutoff in nm where angstrom are meant: no atom sees another."""
    structures = [molecule(5, seed, 0.4) for seed in range(3)]
    structures = [replace(x, energy=0.0, forces=torch.zeros(5, 3)) for x in structures]
    with pytest.raises(ValueError, match=r"no structure has an edge.* 0.4 in units 'eV' .*angstrom"):
        fit(SchNet(8, 1, cutoff=0.4), structures)


def losses_of_a_rank(kind: str) -> list[float]:
    return list(trained(kind, cluster="auto", plan="dp")[1].losses.values())


@pytest.mark.starts
def test_two_processes_train_as_one():
    _, alone = trained("schnet")
    pool = Pool(2)
    try:
        ranks = pool.run(losses_of_a_rank, "schnet")
    finally:
        pool.close()
    assert ranks[0] == ranks[1] == pytest.approx(list(alone.losses.values()), rel=1e-4)
