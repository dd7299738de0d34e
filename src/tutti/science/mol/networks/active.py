"""Learning from few labels: label the structures on whose forces an ensemble disagrees most, train, and repeat.

    rounds = learn(ensemble, labelled, pool, label, rounds=5, count=20, training=Training(steps=1000))

`label` is what computes energies and forces, such as a classical or quantum-chemical program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tutti.launch.progress import progress
from tutti.science.mol.networks.batch import Structure, groups, pack
from tutti.science.mol.networks.ensemble import Ensemble
from tutti.science.mol.networks.network import Network
from tutti.science.mol.networks.training import Errors, Training, errors, fit

Train = Callable[[Network, list[Structure], Training], Any]
Pool = Sequence[Structure] | Callable[[Ensemble], Sequence[Structure]]


@dataclass(frozen=True)
class Round:
    """One round. chosen: indices into its pool. disagreement: disagreement on each of them before training. labels:
    number of labels after the round. errors: errors of the ensemble's mean on held-out structures, after training."""

    chosen: list[int]
    disagreement: list[float]
    labels: int
    errors: Errors | None


def disagreement(ensemble: Ensemble, structures: Sequence[Structure], atoms: int = 2000, edges: int = 100_000
                 ) -> list[float]:  # fmt: skip
    """The largest `force_spread` of an atom, for each structure, in batches of about so many atoms and edges."""
    atoms = max([atoms, *(len(x.species) for x in structures)])
    edges = max([edges, *(len(x.i) for x in structures)])
    spreads: list[float] = []
    for group in groups(structures, range(len(structures)), atoms, edges):
        batch = pack([structures[n] for n in group])
        spread = ensemble.predict(batch).force_spread
        largest = spread.new_zeros(batch.count).scatter_reduce(0, batch.molecule, spread, "amax")
        spreads += largest.tolist()
    return spreads


def select(ensemble: Ensemble, structures: Sequence[Structure], count: int, most: float = float("inf")) -> list[int]:
    """Indices of the `count` structures with the largest disagreement, in falling order.

    most: structures with a larger one are left out, as what a bad network led a simulation to may be no matter at all.
    """
    if count < 1:
        raise ValueError(f"count of structures to select: at least 1, not {count}")
    return _largest(disagreement(ensemble, structures), count, -1.0, most)


def learn(
    ensemble: Ensemble, labelled: Sequence[Structure], pool: Pool, label: Callable[[Structure], Structure],
    rounds: int, count: int, training: Training | None = None, *, held_out: Sequence[Structure] = (),
    most: float = float("inf"), enough: float = 0.0, train: Train | None = None,
    **options: Any,
) -> list[Round]:  # fmt: skip
    """Train the members in place, on `labelled` first, then after each selection; returns what each round did.

    pool: structures without labels, each labelled once at most; or a function of the ensemble that makes new ones, such
    as a simulation with it. label: returns the structure with energy and forces. most: see `select`. enough: stop when
    no structure has a larger disagreement. train: trains a member, from where it is, with the seed of its `Training`;
    by default `fit` does, with these options. Members differ in their initial weights, and see the structures in orders
    of their own.
    """
    how, labels = training or Training(), list(labelled)
    if train and options:
        raise ValueError(f"options of learn that `train` does not take: {', '.join(options)}")

    def train_all() -> None:
        for k, member in enumerate(ensemble.members):
            its = replace(how, seed=how.seed + 1000 * k)
            _ = train(member, labels, its) if train else fit(member, labels, training=its, **options)  # pyright: ignore

    rest = list(range(len(pool))) if not callable(pool) else []
    done: list[Round] = []
    with progress("active learning") as tell:
        train_all()
        for number in range(rounds):
            tell.count(number, rounds, f"{len(labels)} labels")
            structures = pool(ensemble) if callable(pool) else [pool[n] for n in rest]
            index = list(range(len(structures))) if callable(pool) else rest
            spread = disagreement(ensemble, structures)
            if not (chosen := _largest(spread, count, enough, most)):
                break
            for n in chosen:
                new = label(structures[n])
                if new.energy is None and new.forces is None:
                    raise ValueError(f"`label` gave structure {index[n]} of the pool neither energy nor forces")
                labels.append(new)
            names = [index[n] for n in chosen]
            rest = [n for n in rest if n not in set(names)]
            train_all()
            validation = errors(ensemble, held_out) if held_out else None  # pyright: ignore
            done.append(Round(names, [spread[n] for n in chosen], len(labels), validation))
    return done


def _largest(spread: list[float], count: int, least: float, most: float) -> list[int]:
    order = sorted(range(len(spread)), key=lambda n: -spread[n])
    return [n for n in order if least < spread[n] <= most][:count]
