"""Conditions, rows, perplexity, sampling: on a model that has learned nothing, and on distributions that are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tutti.models.peptides import PeptideConfig, PeptideForCausalLM
from tutti.science.peptides import ngrams
from tutti.science.peptides.conditions import OPEN, Conditions, condition_tokenizer, prefix
from tutti.science.peptides.generator import IGNORED, Generator

CONDITIONS = Conditions({"charge": (0.0, 2.0), "moment": (0.5,)})


@pytest.fixture(scope="module")
def generator():
    return Generator.create(CONDITIONS, 12, width=16, layers=1, heads=2)


def test_bins():
    values = {"charge": np.array([-1.0, 0.0, 1.9, 2.0, np.nan]), "moment": np.array([0.4, 0.5, 0.6, 0.0, 0.0])}
    assert CONDITIONS.bins(values).tolist() == [[0, 0], [1, 1], [1, 1], [2, 0], [-2, 0]]
    fitted = Conditions.fit({"charge": np.arange(10.0)}, {"charge": 5})
    assert np.bincount(fitted.bins({"charge": np.arange(10.0)})[:, 0]).tolist() == [2] * 5
    assert CONDITIONS.target({"moment": 1}).tolist() == [OPEN, 1]
    assert CONDITIONS.said(CONDITIONS.target({"charge": 1, "moment": 1})) == "0 <= charge < 2, 0.5 <= moment"
    assert CONDITIONS.said(CONDITIONS.target({"charge": 0})) == "charge < 0"
    assert CONDITIONS.said(CONDITIONS.target({})) == "any peptide"


@pytest.mark.parametrize(
    ("bins", "said"),
    [
        ([3.0], "no training peptide is in bin 1 of the edges 3; give fewer"),
        (1, "should be 2 or more bins"),
        ([2.0, 2.0], "should ascend"),
        ([], "should ascend"),
        (4, "should ascend"),
    ],
)
def test_wrong_bins(bins, said):
    with pytest.raises(ValueError, match=f"condition.bins.x.*{said}"):
        Conditions.fit({"x": np.ones(8)}, {"x": bins})


def test_wrong_targets():
    with pytest.raises(ValueError, match="no condition 'mass'; there are charge, moment"):
        CONDITIONS.target({"mass": 1})
    with pytest.raises(ValueError, match="moment = 2 is no bin; there are 0 to 1"):
        CONDITIONS.target({"moment": 2})
    with pytest.raises(ValueError, match="charge = 3 is no bin"):
        Generator.create(CONDITIONS, 12, width=16, layers=1, heads=2).sample({"charge": 3}, 1)


def test_tokens():
    tokenizer = condition_tokenizer(CONDITIONS)
    assert len(tokenizer) == 30 + 5 and tokenizer.convert_tokens_to_ids("<charge:0>") == 30
    assert prefix(tokenizer, CONDITIONS, np.array([2, OPEN])) == [1, 32, 3]  # <bos> <charge:2> <mask>
    assert prefix(tokenizer, CONDITIONS, np.array([-2, 0])) == [1, 3, 33]  # of a value that is not known


def test_rows(generator):
    bins = np.array([[2, 1]])
    rows = generator.rows(["KW"], bins)
    heads = [row["input_ids"][:3] for row in rows]
    assert len(rows) == 4 and heads[0] == [1, 32, 34] and heads[1] == [1, 3, 3]
    assert all(row["labels"] == [IGNORED] * 3 + row["input_ids"][3:] for row in rows)
    assert rows[0]["input_ids"][-1] == generator.tokenizer.eos_token_id
    assert generator.rows(["KW"], bins, drop=False) == rows[:1]
    batch = generator.collate(rows)
    assert batch["input_ids"].shape == (4, 12 + 2 + 2) and batch["attention_mask"].sum(1).tolist() == [6] * 4
    assert (batch["labels"] != IGNORED).sum(1).tolist() == [3] * 4


def test_perplexity(generator):
    peptides, bins = ["KWKLF", "AC"], np.array([[0, 1], [OPEN, OPEN]])
    total, count = 0.0, 0
    for peptide, own in zip(peptides, bins, strict=True):
        ids = [*prefix(generator.tokenizer, CONDITIONS, own),
               *generator.tokenizer(peptide)["input_ids"][1:], generator.tokenizer.eos_token_id]  # fmt: skip
        with torch.no_grad():
            logits = generator.model.eval()(torch.tensor([ids])).logits[0].log_softmax(-1)
        total += sum(float(logits[i - 1, ids[i]]) for i in range(3, len(ids)))
        count += len(peptide) + 1
    assert generator.perplexity(peptides, bins) == pytest.approx(math.exp(-total / count), rel=1e-5)


class Scripted(torch.nn.Module):
    """In place of a model: rows of tokens that `generate` returns."""

    device = torch.device("cpu")

    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def generate(self, first, **options):
        self.options = options
        return torch.tensor([[*first[0].tolist(), *row] for row in self.rows])


def test_samples_that_are_no_peptides():
    generator = Generator.create(CONDITIONS, 4, width=16, layers=1, heads=2)
    k, w, end, mask, control = generator.tokenizer.convert_tokens_to_ids(["K", "W", "<eos>", "<mask>", "<moment:0>"])
    generator.model = Scripted([[k, w, end, 0, 0], [k, w, k, w, k], [k, mask, end, 0, 0], [k, control, w, end, 0],
                                [end, 0, 0, 0, 0], [k, 0, w, end, 0]])  # fmt: skip
    assert generator.sample({"charge": 1}, 6, top_k=5, temperature=0.7) == ["KW", "", "", "", "", ""]
    assert generator.model.options["top_k"] == 5 and generator.model.options["max_new_tokens"] == 5
    assert "guidance_scale" not in generator.model.options


def test_samples_follow_seed_and_guidance(generator):
    target = {"charge": 2, "moment": 1}
    first = generator.sample(target, 300, seed=1)
    state = torch.random.get_rng_state()
    assert generator.sample(target, 300, seed=1) == first != generator.sample(target, 300, seed=2)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(len(x) <= 12 for x in first)
    assert generator.sample({}, 99, guidance=3.0) == generator.sample({}, 99)  # it has nothing to strengthen
    assert generator.sample(target, 300, seed=1, guidance=30.0) != first


def test_a_saved_generator(generator, tmp_path):
    generator.save(tmp_path)
    loaded = Generator.load(tmp_path)
    assert loaded.conditions == CONDITIONS and loaded.longest == 12
    assert loaded.sample({"charge": 0}, 10) == generator.sample({"charge": 0}, 10)
    PeptideForCausalLM(PeptideConfig(hidden_size=16, num_hidden_layers=1)).save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="plain has a model without conditions"):
        Generator.load(tmp_path / "plain")


def test_ngrams():
    """By hand: of "AA" and "AD" a unigram counts 3 A, 1 D and 2 ends, three kinds; below it are 21 equal symbols."""
    a = (3 + 3 / 21) / (6 + 3)
    end = (2 + 3 / 21) / 9
    assert ngrams.perplexity(1, ["AA", "AD"], ["A"]) == pytest.approx((a * end) ** -0.5)
    start = (2 + 1 * a) / (2 + 1)  # after the begin always A
    stop = (1 + 3 * end) / (3 + 3)  # after A: A, D, end
    assert ngrams.perplexity(2, ["AA", "AD"], ["A"]) == pytest.approx((start * stop) ** -0.5)
    unseen = ngrams.perplexity(3, ["AA"], ["WWW"])
    assert np.isfinite(unseen) and unseen > 21
    uniform = ["".join(x) for x in np.random.default_rng(0).choice(list("ACDE"), (2000, 9))]
    expected = (4 * (4 / 0.9) ** 8 * 10) ** 0.1  # after the first residue, one of ten symbols is an end
    assert ngrams.perplexity(2, uniform[:1900], uniform[1900:]) == pytest.approx(expected, rel=0.01)
