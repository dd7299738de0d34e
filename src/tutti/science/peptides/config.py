"""Configs of `tutti peptides`: which data, which conditions, how the model is trained, and what it is asked for."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tutti.config.build import checked
from tutti.science.peptides.data import Peptides, read, read_modlamp
from tutti.science.peptides.generator import Training
from tutti.science.peptides.grammar import ACTIVITY, grammar
from tutti.science.peptides.properties import PROPERTIES

RESERVED = {"held out", "unconditioned", "fine-tuned"}
Rule = tuple[str, Callable[[float], bool], dict[str, tuple[str, ...]]]
RANGES: tuple[Rule, ...] = (  # what numbers should be, by section
    ("be above 0", lambda x: x > 0, {
        "data": ("count", "shortest", "longest"), "model": ("width", "layers", "heads"),
        "training": ("steps", "learning_rate", "batch"), "fine_tuning": ("learning_rate",),
        "sampling": ("count", "temperature"),
    }),
    ("be between 0 and 1", lambda x: 0 < x < 1, {
        "data": ("oracle", "validation", "held_out", "identity"), "fine_tuning": ("best",),
    }),
    ("not be negative", lambda x: x >= 0, {
        "training": ("weight_decay",), "fine_tuning": ("steps",), "sampling": ("top_k", "guidance"),
    }),
    ("be from 0 to below 1", lambda x: 0 <= x < 1, {"model": ("dropout",)}),
)  # fmt: skip


@dataclass(frozen=True)
class DataTable:
    """source: "grammar", "modlamp:NAME" (a data set of that package), or a file .fasta, .csv or .tsv, relative to the
    config. label: column of an activity, 0 and 1 or a score; "" for none. column: column of the sequences. count:
    number of peptides of the grammar. shortest, longest: residues. identity: identity from which peptides are in one
    cluster. oracle, validation, held_out: fractions that the oracle learns from, that choose the best checkpoint, and
    that all is measured on; the generator learns from the rest."""

    source: str
    label: str = ""
    column: str = "sequence"
    count: int = 4000
    shortest: int = 5
    longest: int = 50
    identity: float = 0.6
    oracle: float = 0.25
    validation: float = 0.05
    held_out: float = 0.15
    seed: int = 0


@dataclass(frozen=True)
class ModelTable:
    """Sizes of the language model."""

    width: int = 96
    layers: int = 3
    heads: int = 4
    dropout: float = 0.0


@dataclass(frozen=True)
class ConditionTable:
    """bins: property -> a number of bins of equally many training peptides, or their inner edges. Properties are
    charge, isoelectric, moment, gravy, mass, length, and the label."""

    bins: dict[str, int | tuple[float, ...]]


@dataclass(frozen=True)
class FineTuningTable:
    """The baseline: steps on the fraction `best` of training peptides that come nearest to the first target. 0 steps
    for none."""

    steps: int = 0
    learning_rate: float = 5e-4
    best: float = 0.1


@dataclass(frozen=True)
class SamplingTable:
    """count: samples of each target and without one. top_k: 0 for all tokens. guidance: 1 for none."""

    count: int = 1000
    temperature: float = 1.0
    top_k: int = 0
    guidance: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Target:
    """bins: property -> number of the bin that is asked for, 0 for the lowest; others are open. name: in reports and
    files."""

    name: str
    bins: dict[str, int]


@dataclass(frozen=True)
class PeptidesConfig:
    data: DataTable
    training: Training
    condition: ConditionTable
    targets: tuple[Target, ...]
    model: ModelTable = field(default_factory=ModelTable)
    fine_tuning: FineTuningTable = field(default_factory=FineTuningTable)
    sampling: SamplingTable = field(default_factory=SamplingTable)

    @classmethod
    def load(cls, path: Path) -> PeptidesConfig:
        """Read a TOML file. Raises ValueError that names the file, the key and the remedy."""
        return checked(cls, path)

    def check(self) -> None:
        """Raises ValueError that names the key and the remedy."""
        self._check_numbers()
        data, names = self.data, [*PROPERTIES, *([self.data.label] if self.data.label else [])]
        if data.label in PROPERTIES:
            raise ValueError(f"data.label = {data.label!r} is the name of a property; rename the column")
        for name in self.condition.bins:
            if name not in names:
                raise ValueError(f"condition.bins has no property {name!r}; there are {', '.join(names)}")
        if not self.condition.bins:
            raise ValueError("condition.bins is empty; give a property, as in bins = { charge = 5 }")
        self._check_targets()

    def _check_numbers(self) -> None:
        data, model = self.data, self.model
        for rule, allowed, sections in RANGES:
            for section, keys in sections.items():
                for key in keys:
                    if not allowed(value := getattr(getattr(self, section), key)):
                        raise ValueError(f"{section}.{key} = {value} should {rule}")
        if model.width % model.heads:
            raise ValueError(f"model.width = {model.width} is no multiple of model.heads = {model.heads}")
        if data.oracle + data.validation + data.held_out > 0.8:
            raise ValueError("data.oracle, validation and held_out leave less than a fifth to train on; lower them")
        if data.shortest > data.longest:
            raise ValueError(f"data.shortest = {data.shortest} is above data.longest = {data.longest}")

    def _check_targets(self) -> None:
        names = [target.name for target in self.targets]
        if not names:
            raise ValueError("there is no target; add [[targets]] with a name and bins")
        if wrong := next((x for x in names if not re.fullmatch(r"[\w .,+-]+", x)), None):
            raise ValueError(f"target {wrong!r}: a name has letters, digits, spaces, and . , + - _")
        if len({x.replace(" ", "_") for x in names}) < len(names) or set(names) & RESERVED:
            raise ValueError(f"names of targets should differ, and not be one of {', '.join(sorted(RESERVED))}")
        for target in self.targets:
            if not target.bins:
                raise ValueError(f"target {target.name!r} asks for nothing; give a bin, as in bins = {{ charge = 4 }}")
            for name, i in target.bins.items():
                choice = self.condition.bins.get(name)
                if choice is None:
                    raise ValueError(f"target {target.name!r}: condition.bins has no {name!r}; add it there")
                last = choice - 1 if isinstance(choice, int) else len(choice)
                if not 0 <= i <= last:
                    raise ValueError(f"target {target.name!r}: {name} = {i} is no bin; there are 0 to {last}")

    def peptides(self, folder: Path) -> Peptides:
        """The data, of the lengths asked for and each sequence once. folder: folder of the config, for relative
        paths."""
        data = self.data
        values = (data.label,) if data.label else ()
        if data.source == "grammar":
            if data.label not in ("", ACTIVITY):
                raise ValueError(f"data.label = {data.label!r}: the label of the grammar is {ACTIVITY!r}")
            peptides = grammar(data.count, data.seed)
        elif data.source.startswith("modlamp:"):
            peptides = read_modlamp(data.source.partition(":")[2], data.label or "label")
        else:
            peptides = read(folder / data.source, data.column, values)
        return peptides.of_length(data.shortest, data.longest).unique()
