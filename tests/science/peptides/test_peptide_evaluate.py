"""Measures of samples, by hand and by distributions that are known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.distance import jensenshannon

from tutti.science.peptides import evaluate
from tutti.science.peptides.conditions import OPEN
from tutti.science.peptides.properties import counts


def test_measures():
    samples = ["KWKL", "KWKL", "AAAA", "AAAC", "", "KW", "KWKLF"]
    measures = evaluate.assess(samples, ["AAAA", "WWWW"], ["KWKL", "AAAA"], (4, 5))
    assert measures["samples"] == 7 and measures["validity"] == pytest.approx(5 / 7)
    assert measures["uniqueness"] == pytest.approx(4 / 5) and measures["novelty"] == pytest.approx(4 / 5)
    assert measures["nearest identity"] == pytest.approx((0.75 + 0.25) / 2)  # of 1, 0.75, 0.25 and 0.2
    assert measures["near copies"] == pytest.approx(1 / 4)
    assert 0 < measures["composition divergence"] < 1
    assert evaluate.assess(["", "KW"], ["A"], ["A"], (4, 5)) == {"samples": 2, "validity": 0}
    assert evaluate.assess([], ["A"], ["A"], (4, 5))["validity"] == 0


def test_divergence_of_scipy():
    p, q = ["KWKL", "AAC"], ["AAAWKK"]
    expected = jensenshannon(counts(p).sum(0), counts(q).sum(0), base=2) ** 2
    assert evaluate.divergence(p, q) == pytest.approx(expected)
    assert evaluate.divergence(p, p) == 0 and evaluate.divergence(["A"], ["K"]) == pytest.approx(1)


def test_hits():
    bins = np.array([[0, 1], [1, 1], [-2, 1]])
    assert evaluate.hits(bins, np.array([1, OPEN])).tolist() == [False, True, False]
    assert evaluate.hits(bins, np.array([OPEN, OPEN])).all()


def test_intervals_cover():
    """About 95 % of the intervals of 200 experiments with rates of 0.5 and 0.1 hold the ratio of 5."""
    draw, covered = np.random.default_rng(0), 0
    for seed in range(200):
        x = evaluate.lift(int(draw.binomial(300, 0.5)), 300, int(draw.binomial(300, 0.1)), 300, seed)
        covered += x["interval"][0] <= 5 <= x["interval"][1]
    assert 180 <= covered <= 198
    tenfold = evaluate.lift(30, 60, 10, 200)
    assert (tenfold["rate"], tenfold["plain rate"], tenfold["ratio"]) == (0.5, 0.05, 10)
    assert tenfold["difference"][0] < 0.45 < tenfold["difference"][1]
    nothing = evaluate.lift(10, 100, 0, 100)
    assert nothing["ratio"] is None and nothing["interval"] == [None, None] and nothing["difference"][0] > 0.03


def test_shifts():
    draw = np.random.default_rng(0)
    a, b = np.append(draw.normal(6, 1, 400), np.nan), draw.normal(5, 1, 400)
    x = evaluate.shift(a, b)
    low, high = x["interval"]
    assert x["shift"] == pytest.approx(a[:400].mean() - b.mean()) and low < x["shift"] < high
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(2 / 400), rel=0.15)
    assert evaluate.shift(np.array([np.nan]), b) == {"shift": None, "interval": [None, None]}
