"""Peptides with values, and readers of FASTA, CSV, TSV and of the data sets inside the package modlamp."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from tutti.models.peptides import RESIDUES

__all__ = ["Peptides", "read", "read_fasta", "read_modlamp", "read_table"]

LINE = 100_000  # characters of the longest line that is read
FASTA, TABLES = (".fasta", ".fa", ".faa"), {".csv": ",", ".tsv": "\t"}
MODLAMP = {
    "AMPvsUniProt": "AMPvsUniProt.csv", "AMPvsTM": "AMPvsTMset.csv", "ACPvsTM": "ACP_CancPPD_vs_TM.csv",
    "ACPvsRandom": "ACP_CancPPD_vs_Random.csv",
}  # fmt: skip
"""Data sets of the package modlamp (BSD-3-Clause; Mueller et al. 2017, Bioinformatics 33, 2753)."""


@dataclass(frozen=True)
class Peptides:
    """sequences: strings of the 20 amino acids. values: column -> (peptides,) float64. names: names of the sequences,
    or none.

    notes: what a reader or a filter left out, one line each.
    """

    sequences: tuple[str, ...]
    values: dict[str, np.ndarray] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.sequences)

    def take(self, rows: Sequence[int] | np.ndarray, *notes: str) -> Peptides:
        """The peptides of these rows, in this order, with further notes; empty ones do not count."""
        rows = np.asarray(rows, np.int64)
        return Peptides(
            tuple(self.sequences[i] for i in rows),
            {name: x[rows] for name, x in self.values.items()},
            tuple(self.names[i] for i in rows) if self.names else (),
            (*self.notes, *filter(None, notes)),
        )

    def of_length(self, shortest: int, longest: int) -> Peptides:
        """Those of `shortest` to `longest` residues."""
        rows = [i for i, x in enumerate(self.sequences) if shortest <= len(x) <= longest]
        out = len(self) - len(rows)
        return self.take(rows, f"{out} peptides not of {shortest} to {longest} residues left out" if out else "")

    def unique(self) -> Peptides:
        """Each sequence once. Sequences that occur with different values are left out, as either may be wrong."""
        first: dict[str, int] = {}
        differ: set[str] = set()
        for i, sequence in enumerate(self.sequences):
            j = first.setdefault(sequence, i)
            if any(x[i] != x[j] for x in self.values.values()):
                differ.add(sequence)
        copies = len(self) - len(first)
        return self.take(
            [i for sequence, i in first.items() if sequence not in differ],
            f"{copies} copies left out" if copies else "",
            f"{len(differ)} peptides with contradicting values left out" if differ else "",
        )


def read(path: Path, column: str = "sequence", values: Sequence[str] = ()) -> Peptides:
    """Read a file by its suffix: .fasta, .fa, .faa, .csv or .tsv.

    column, values: columns of a table with the sequences and with the numbers to read.
    Raises ValueError that names the file, the line and a remedy.
    """
    suffix = path.suffix.lower()
    if suffix in FASTA:
        if values:
            raise ValueError(f"{path}: FASTA has no column {values[0]!r}; give a .csv or .tsv with it")
        return read_fasta(path)
    if suffix in TABLES:
        return read_table(path, column, values)
    raise ValueError(f"{path}: peptides are read from {', '.join((*FASTA, *TABLES))}; rename or convert the file")


def read_fasta(path: Path) -> Peptides:
    """Read sequences of several lines each; the name is the first word of a header. Lower case is read as upper case.

    Raises ValueError for a name or sequence that is missing, a name that occurs twice, letters that are not amino
    acids, and lines of more than 100,000 characters.
    """
    starts: dict[str, int] = {}
    parts: list[list[str]] = []
    for number, line in _lines(path):
        line = line.strip()
        if line.startswith(">"):
            name = (line[1:].split() or [""])[0]
            if not name:
                raise ValueError(f"{path}, line {number}: the header has no name; write >NAME")
            if name in starts:
                raise ValueError(f"{path}, line {number}: {name!r} is the name of line {starts[name]}, too; "
                                 "rename or remove one")  # fmt: skip
            starts[name] = number
            parts.append([])
        elif line:
            if not parts:
                raise ValueError(f"{path}, line {number}: a sequence without a header; write >NAME above it")
            parts[-1].append(_sequence(line, path, number))
    for (name, number), part in zip(starts.items(), parts, strict=True):
        if not part:
            raise ValueError(f"{path}, line {number}: {name!r} has no sequence; add it below, or remove the header")
    if not parts:
        raise ValueError(f"{path} has no peptide; FASTA has a line >NAME and the sequence below it")
    return Peptides(tuple("".join(part) for part in parts), names=tuple(starts))


def read_table(path: Path, column: str = "sequence", values: Sequence[str] = ()) -> Peptides:
    """Read a CSV or TSV file with a header. Other columns are ignored.

    Raises ValueError for columns that are missing or occur twice, rows of another number of fields, letters that are
    not amino acids, and values that are not finite numbers.
    """
    rows = csv.reader((f"{line}\n" for _, line in _lines(path)), delimiter=TABLES.get(path.suffix.lower(), ","),
                      strict=True)  # fmt: skip
    try:
        header = [x.strip() for x in next(rows, [])]
        for name in (column, *values):
            if header.count(name) != 1:
                columns = ", ".join(header)[:200]
                raise ValueError(f"{path}, line 1: {header.count(name)} columns {name!r} in {columns!r};"
                                 " one is needed: correct the header, or name another")  # fmt: skip
        sequences: list[str] = []
        numbers: dict[str, list[float]] = {name: [] for name in values}
        for row in rows:
            where = rows.line_num
            if not row:
                continue
            if len(row) != len(header):
                raise ValueError(f"{path}, line {where}: {len(row)} fields where the header has {len(header)}; "
                                 "add or remove fields, or quote separators")  # fmt: skip
            cells = dict(zip(header, row, strict=True))
            sequences.append(_sequence(cells[column].strip(), path, where))
            for name in values:
                numbers[name].append(_number(cells[name], name, path, where))
    except csv.Error as error:
        raise ValueError(f"{path}, line {rows.line_num}: {error}; correct the quotes") from None
    if not sequences:
        raise ValueError(f"{path} has no peptide; below the header, a line for each")
    return Peptides(tuple(sequences), {name: np.array(x) for name, x in numbers.items()})


def read_modlamp(name: str, label: str = "active", path: Path | None = None) -> Peptides:
    """A data set of the installed package modlamp, or of its data file `path`, with the classes as `label`, 0 or 1.

    The package is not imported. Raises ValueError for an unknown name, or without the package.
    """
    if name not in MODLAMP:
        raise ValueError(f"modlamp has no data set {name!r}; there are {', '.join(MODLAMP)}")
    if path is None:
        spec = find_spec("modlamp")
        if spec is None or not spec.origin:
            raise ValueError(f"modlamp:{name} needs the package modlamp; pip install modlamp")
        path = Path(spec.origin).parent / "data" / MODLAMP[name]
    sequences, labels = [], []
    for number, line in _lines(path):
        cells = [x.strip() for x in line.split(",")]
        if number > 1 and line.strip():
            if len(cells) != 2 or cells[1] not in ("0", "1"):
                raise ValueError(f"{path}, line {number}: {line!r:.80} is not a sequence and 0 or 1; reinstall modlamp")
            sequences.append(_sequence(cells[0], path, number))
            labels.append(float(cells[1]))
    if not sequences:
        raise ValueError(f"{path} has no peptide; reinstall modlamp")
    return Peptides(tuple(sequences), {label: np.array(labels)})


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, line without its end)."""
    try:
        with open(path, encoding="utf-8-sig", newline=None) as file:
            number = 0
            while line := file.readline(LINE + 1):
                number += 1
                if len(line) > LINE:
                    raise ValueError(f"{path}, line {number}: more than {LINE:,} characters; is it a file of peptides?")
                yield number, line.rstrip("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text in UTF-8; is this a file of peptides, not compressed?") from None
    except (FileNotFoundError, IsADirectoryError):
        raise ValueError(f"there is no file {path}") from None


def _sequence(text: str, path: Path, number: int) -> str:
    sequence = text.upper()
    wrong = next((x for x in text if not x.isascii() or x.upper() not in RESIDUES), "")
    if wrong or not sequence:
        problem = f"{wrong!r} is not an amino acid" if wrong else "there is no sequence"
        raise ValueError(f"{path}, line {number}: {problem}; remove the peptide, or write one of {RESIDUES}")
    return sequence


def _number(text: str, name: str, path: Path, number: int) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or "_" in text:  # float() reads 1_000
        raise ValueError(f"{path}, line {number}: {name} = {text!r:.60} is not a number; write one, or remove the line")
    return value


def fasta(peptides: Sequence[str], name: str = "peptide") -> str:
    """FASTA with numbered names."""
    return "".join(f">{name}_{i}\n{x}\n" for i, x in enumerate(peptides, 1))


def table(columns: Mapping[str, Sequence[object]]) -> str:
    """CSV of columns of equal length."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return text.getvalue()
