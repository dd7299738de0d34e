"""Claims about peptide generation, on a grammar whose truth is known: the complete run of `tutti peptides`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tutti.science.peptides import command

RUN = Path(__file__).parents[2] / "runs" / "peptides.toml"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    out = tmp_path_factory.mktemp("peptides")
    command.run(RUN, str(out))
    return json.loads((out / "report.json").read_text())


def test_held_out_peptides_are_predicted_almost_as_well_as_by_the_grammar(report):
    perplexity = report["perplexity"]
    assert report["data"]["largest identity"] < 0.6
    assert perplexity["language model"] < 1.03 * perplexity["the grammar itself"]
    assert perplexity["language model"] < 0.9 * min(perplexity[n] for n in ("unigram", "bigram", "trigram"))
    assert perplexity["language model, conditions given"] < 0.96 * perplexity["language model"]


def test_samples_are_valid_new_and_different(report):
    held_out, plain = report["sets"]["held out"], report["sets"]["unconditioned"]
    for row in report["sets"].values():
        assert row["validity"] > 0.95 and row["uniqueness"] > 0.99 and row["novelty"] > 0.99
        assert row["near copies"] < 0.01
    for name in ("diversity", "nearest identity"):
        assert plain[name] == pytest.approx(held_out[name], abs=0.02)
    assert plain["composition divergence"] < 0.005


def test_conditioned_samples_are_what_was_asked_for(report):
    both, anionic = report["targets"]["cationic amphipathic"]["hits"], report["targets"]["anionic"]["hits"]
    assert both["conditioned"]["rate"] > 0.5 and both["conditioned"]["interval"][0] > 6
    assert anionic["conditioned"]["rate"] > 0.7 and anionic["conditioned"]["interval"][0] > 2.5
    assert both["conditioned"]["rate"] > both["fine-tuned"]["rate"]


def test_an_oracle_that_the_generator_has_not_seen_predicts_the_shift(report):
    """The activity of the grammar rises with the charge and the moment."""
    oracle = report["oracle"]
    assert (
        oracle["ROC-AUC"] > 0.75 and oracle["calibration error"] < 0.06 and oracle["inside"] > 0.95 * oracle["peptides"]
    )
    shifts = {name: entry["predicted shift"]["conditioned"] for name, entry in report["targets"].items()}
    assert shifts["cationic amphipathic"]["interval"][0] > 0.25 and shifts["anionic"]["interval"][1] < -0.1
