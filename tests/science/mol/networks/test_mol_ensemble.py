"""Ensembles, and learning by what they disagree on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mol_structures import labelled, molecule, teacher

from tutti.science.mol.networks import (
    Ensemble,
    NetworkPotential,
    PaiNN,
    SchNet,
    Structure,
    Training,
    compile_for_md,
    learn,
    pack,
    select,
)  # fmt: skip
from tutti.science.mol.networks.active import disagreement
from tutti.science.mol.system import System


def networks(count: int = 3) -> list[SchNet]:
    torch.manual_seed(1)
    return [SchNet(8, 1, 6, 4.0).double() for _ in range(count)]


def test_means_and_spreads():
    ensemble, batch = Ensemble(networks()), pack([molecule(6, 1, 4.0), molecule(4, 2, 4.0)])
    energies, forces = map(torch.stack, zip(*(x.energy_and_forces(batch) for x in networks()), strict=True))
    prediction = ensemble.predict(batch)
    assert torch.allclose(prediction.energy, energies.mean(0)) and torch.allclose(prediction.forces, forces.mean(0))
    assert torch.allclose(prediction.energy_spread, (energies - energies.mean(0)).square().mean(0).sqrt())
    assert torch.allclose(prediction.force_spread, (forces - forces.mean(0)).square().sum(-1).mean(0).sqrt())
    assert torch.allclose(ensemble.energy(batch), prediction.energy)
    members = networks(1) * 2
    assert float(Ensemble(members).predict(batch).force_spread.max()) == 0


@pytest.mark.starts
def test_a_compiled_ensemble_is_the_ensemble_as_a_potential():
    ensemble, x = Ensemble(networks()), molecule(6, 1, 4.0)
    fast = compile_for_md(ensemble, 1e-8, torch.float64)
    system = System(x.positions / 10, x.species)
    one, other = [NetworkPotential(y, x.species) for y in (ensemble, fast)]
    neighbors = one.neighbors(system, skin=0.05)
    plain, quick = [y.evaluate(system.positions, None, neighbors, virial=True) for y in (one, other)]
    assert torch.allclose(plain.energy, quick.energy) and torch.allclose(plain.forces, quick.forces, atol=1e-4)
    assert torch.allclose(plain.virial, quick.virial, atol=1e-4)  # pyright: ignore
    assert torch.allclose(fast.predict(pack([x])).force_spread, ensemble.predict(pack([x])).force_spread)  # pyright: ignore


def test_ensembles_that_make_no_sense_are_refused():
    one, two = networks(2)
    with pytest.raises(ValueError, match="at least two members, not 1"):
        Ensemble([one])
    two.units = "MD"
    with pytest.raises(ValueError, match="have the units MD, eV"):
        Ensemble([one, two])


def test_selection_is_by_the_largest_disagreement_of_an_atom():
    ensemble, structures = Ensemble(networks()), [molecule(3 + n % 4, n, 4.0) for n in range(9)]
    single = [float(ensemble.predict(pack([x])).force_spread.max()) for x in structures]
    assert disagreement(ensemble, structures, atoms=10) == pytest.approx(single)
    order = sorted(range(9), key=lambda n: -single[n])
    assert select(ensemble, structures, 4) == order[:4]
    assert select(ensemble, structures, 4, most=single[order[2]]) == order[2:6]
    assert select(ensemble, [], 4) == []
    with pytest.raises(ValueError, match="at least 1, not 0"):
        select(ensemble, structures, 0)


def test_the_loop_labels_what_it_disagrees_on_once():
    ensemble, pool, oracle = Ensemble(networks()), [molecule(5, n, 4.0) for n in range(8)], teacher()
    seen: list[tuple[int, int]] = []
    asked: list[Structure] = []

    def train(network, data, how) -> None:
        seen.append((len(data), how.seed))
        with torch.no_grad():
            for p in network.parameters():
                p.mul_(1.1)

    def label(x: Structure) -> Structure:
        asked.append(x)
        energy, forces = oracle.energy_and_forces(pack([x]))
        return replace(x, energy=float(energy), forces=forces)

    start = labelled(oracle, range(20, 24))
    rounds = learn(ensemble, start, pool, label, 5, 3, Training(seed=7), held_out=start, train=train)
    assert [len(x.chosen) for x in rounds] == [3, 3, 2] and [x.labels for x in rounds] == [7, 10, 12]
    assert sorted(n for x in rounds for n in x.chosen) == list(range(8)) and len(asked) == 8
    assert all(x.disagreement == sorted(x.disagreement, reverse=True) and x.errors for x in rounds)
    assert seen[:4] == [(4, 7), (4, 1007), (4, 2007), (7, 7)]
    none = learn(ensemble, start, lambda e: pool[:2], label, 5, 3, train=train, enough=1e9)
    assert none == []
    with pytest.raises(ValueError, match="neither energy nor forces"):
        learn(ensemble, start, pool, lambda x: x, 1, 1, train=train)
    with pytest.raises(ValueError, match="options of learn that `train` does not take: level"):
        learn(ensemble, start, pool, label, 1, 1, train=train, level="O0")


def test_active_learning_lowers_the_error():
    torch.manual_seed(1)
    oracle, ensemble = teacher(), Ensemble([PaiNN(12, 1, 8, 4.0) for _ in range(2)])
    pool, held_out = labelled(oracle, range(100, 140)), labelled(oracle, range(200, 210))
    bare = [replace(x, energy=None, forces=None) for x in pool]
    answers = {id(x): y for x, y in zip(bare, pool, strict=True)}
    rounds = learn(ensemble, labelled(oracle, range(6)), bare, lambda x: answers[id(x)], 2, 15,
                   Training(steps=40, batch=10, rate=1e-2), held_out=held_out, level="O0", cluster="cpu:1",
                   plan="single")  # fmt: skip
    first, last = rounds[0].errors, rounds[-1].errors
    assert first and last and last.force_mae < first.force_mae < float(ensemble.members[0].scale)  # pyright: ignore
