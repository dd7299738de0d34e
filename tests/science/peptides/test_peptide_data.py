"""Readers of peptides, with files that are wrong, and the synthetic grammar."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest

from tutti.science.peptides import data, grammar
from tutti.science.peptides.properties import properties


def written(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_fasta(tmp_path):
    peptides = data.read(written(tmp_path, "a.fasta", "\ufeff>one first\r\nKWK\r\nlf\r\n\r\n>two\n  AC \n"))
    assert peptides.sequences == ("KWKLF", "AC") and peptides.names == ("one", "two")
    assert data.read(written(tmp_path, "b.fa", data.fasta(["AC", "KW"], "x"))).names == ("x_1", "x_2")


def test_tables(tmp_path):
    text = 'id,sequence,mic,active\n1,"KWK",0.5,1\n\n2,ac ,-2e3,0\n'
    peptides = data.read(written(tmp_path, "a.csv", text), values=("mic", "active"))
    assert peptides.sequences == ("KWK", "AC") and peptides.values["mic"].tolist() == [0.5, -2000]
    text = "peptide\tscore\nKWK\t1\nAC\t\n"
    assert data.read(written(tmp_path, "a.tsv", text), "peptide").sequences == ("KWK", "AC")
    with pytest.raises(ValueError, match="line 3: score = '' is not a number"):
        data.read(tmp_path / "a.tsv", "peptide", ("score",))
    again = written(tmp_path, "b.csv", data.table({"sequence": ["AC", "KW"], "x": [1.5, 2]}))
    assert data.read(again, values=("x",)).values["x"].tolist() == [1.5, 2]


LONG = b"K" * 200_000
HOSTILE = {
    "empty.fasta": (b"", "has no peptide"),
    "blank.fasta": (b"\n \n", "has no peptide"),
    "headless.fasta": (b"KWK\n", "line 1: a sequence without a header; write >NAME above"),
    "nameless.fasta": (b">\nKWK\n", "line 1: the header has no name"),
    "twice.fasta": (b">a\nKWK\n>a\nKW\n", "line 3: 'a' is the name of line 1, too; rename or remove"),
    "hollow.fasta": (b">a\n>b\nKW\n", "line 1: 'a' has no sequence; add it"),
    "letters.fasta": (b">a\nKWK\nKXB\n", "line 3: 'X' is not an amino acid; remove the peptide, or write one of"),
    "stop.fasta": (b">a\nKW*\n", r"line 2: '\*' is not an amino acid"),
    "sharp.fasta": (">a\nK\u00df\n".encode(), "line 2: '\u00df' is not an amino acid"),
    "long_s.fasta": (">a\nK\u017f\n".encode(), "line 2: '\u017f' is not an amino acid"),
    "giant.fasta": (b">a\n" + LONG, "line 2: more than 100,000 characters"),
    "giant_header.fasta": (b">" + LONG, "line 1: more than 100,000 characters"),
    "binary.fasta": (b"\x1f\x8b\x08\xff", "is not text in UTF-8"),
    "nul.fasta": (b">a\nK\0K\n", r"line 2: '\\x00' is not an amino acid"),
    "empty.csv": (b"", "line 1: 0 columns 'sequence'"),
    "header.csv": (b"sequence,y\n", "has no peptide; below the header"),
    "other.csv": (b"seq,y\nKW,1\n", "line 1: 0 columns 'sequence' in 'seq, y'; one is needed"),
    "twice.csv": (b"sequence,y,y\nKW,1,2\n", "line 1: 2 columns 'y'"),
    "short.csv": (b"sequence,y\nKW,1\nKW\n", "line 3: 1 fields where the header has 2"),
    "letters.csv": (b"sequence,y\nKZ,1\n", "line 2: 'Z' is not an amino acid"),
    "void.csv": (b"sequence,y\n,1\n", "line 2: there is no sequence"),
    "word.csv": (b"sequence,y\nKW,AMP\n", "line 2: y = 'AMP' is not a number; write one"),
    "nan.csv": (b"sequence,y\nKW,nan\n", "line 2: y = 'nan' is not a number"),
    "underscore.csv": (b"sequence,y\nKW,1_0\n", "line 2: y = '1_0' is not a number"),
    "infinite.csv": (b"sequence,y\nKW,1e999\n", "line 2: y = '1e999' is not a number"),
    "quote.csv": (b'sequence,y\n"KW,1\n', "line 2: unexpected end of data; correct the quotes"),
    "giant.csv": (b"sequence,y\n" + LONG, "line 2: more than 100,000 characters"),
    "peptides.xlsx": (b"PK", "peptides are read from .fasta, .fa, .faa, .csv, .tsv"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_wrong_files(tmp_path, name):
    content, said = HOSTILE[name]
    path = written(tmp_path, name, content)
    with pytest.raises(ValueError, match=said) as error:
        data.read(path, values=("y",) if name.endswith("csv") else ())
    assert str(path) in str(error.value) and len(str(error.value)) < 400


def test_files_that_are_not_there(tmp_path):
    for name in ("a.csv", "a.fasta"):
        with pytest.raises(ValueError, match=f"there is no file .*{name}"):
            data.read(tmp_path / name)
    with pytest.raises(ValueError, match=r"FASTA has no column 'y'; give a \.csv"):
        data.read(written(tmp_path, "b.fasta", ">a\nK\n"), values=("y",))


def test_copies_and_lengths():
    peptides = data.Peptides(("KW", "KW", "AC", "AC", "AAAA"), {"y": np.array([1.0, 1, 0, 1, 0])})
    unique = peptides.unique()
    assert unique.sequences == ("KW", "AAAA") and unique.values["y"].tolist() == [1, 0]
    assert unique.notes == ("2 copies left out", "1 peptides with contradicting values left out")
    short = peptides.of_length(1, 3)
    assert len(short) == 4 and short.notes == ("1 peptides not of 1 to 3 residues left out",)
    assert peptides.of_length(1, 9).notes == ()


def test_data_sets_of_modlamp(tmp_path, monkeypatch):
    """The layout of modlamp 4.3.3, in an imitation of the package."""
    (tmp_path / "modlamp" / "data").mkdir(parents=True)
    (tmp_path / "modlamp" / "__init__.py").write_text("raise ImportError('it is not imported')")
    path = written(tmp_path / "modlamp" / "data", "AMPvsUniProt.csv", "4,1,UniProt,AMP\nGLWSK, 1\nYVPLP, 1\nMKTA, 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    peptides = data.read_modlamp("AMPvsUniProt", "antimicrobial")
    assert peptides.sequences == ("GLWSK", "YVPLP", "MKTA")
    assert peptides.values["antimicrobial"].tolist() == [1, 1, 0]
    with pytest.raises(ValueError, match="no data set 'AMP'; there are AMPvsUniProt, AMPvsTM"):
        data.read_modlamp("AMP")
    path.write_text("4,1,UniProt,AMP\nGLWSK,7\n")
    with pytest.raises(ValueError, match="line 2: 'GLWSK,7' is not a sequence and 0 or 1"):
        data.read_modlamp("AMPvsUniProt")
    monkeypatch.setattr(data, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the package modlamp; pip install modlamp"):
        data.read_modlamp("AMPvsTM")
    assert "modlamp" not in sys.modules


def test_the_grammar():
    peptides = grammar.grammar(600)
    assert len(set(peptides.sequences)) == 600
    assert {len(x) for x in peptides.sequences} == set(range(10, 25))
    assert not re.search("[CGPY]", "".join(peptides.sequences))
    assert grammar.grammar(600).sequences == peptides.sequences != grammar.grammar(600, 1).sequences
    active, values = peptides.values["active"] == 1, properties(peptides.sequences)
    assert 0.2 < active.mean() < 0.5
    for name in ("charge", "moment"):
        assert values[name][active].mean() > values[name][~active].mean() + 0.5 * values[name].std()


def test_the_grammars_own_perplexity():
    """Quadrature over the hidden numbers against a sum over a fine grid of them, and against the entropy of one."""
    peptide = "LKKLAEIV"
    s, b = (np.arange(400) + 0.5) / 400, (np.arange(400) + 0.5) / 400
    weights = np.stack([3 * b + 0.3, 2 * b + 0.2, 0 * b + 0.3, 1 - b, 1 - b, *[0 * b + 1] * 4])
    polar = weights / weights.sum(0)
    of_s, of_b = np.ones(400), np.ones(400)
    for i, x in enumerate(peptide):
        hydrophobic = (1 - s) / 2 + s * (np.cos(np.radians(100) * i) > 0)
        if x in "AILMFWV":
            of_s *= hydrophobic / 7
        else:
            of_s *= 1 - hydrophobic
            of_b *= polar["KRHEDNQST".index(x)]
    likelihood = of_s.mean() * of_b.mean() / 15
    assert grammar.perplexity([peptide]) == pytest.approx(likelihood ** (-1 / 9), rel=1e-5)
    assert grammar.perplexity(["LK"] * 3, nodes=8) == pytest.approx(grammar.perplexity(["LK"]), rel=1e-9)
