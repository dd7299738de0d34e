"""The learned oracle: what it scores on other clusters, its calibration, its domain. Scores against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics

from tutti.science.peptides import scores
from tutti.science.peptides.grammar import grammar
from tutti.science.peptides.oracle import Oracle, Prediction, features
from tutti.science.peptides.properties import properties
from tutti.science.peptides.similarity import clusters, split


@pytest.fixture(scope="module")
def parts():
    peptides = grammar(1500)
    groups = clusters(peptides.sequences, 0.6)
    learn, test = split(groups, (0.3,))
    return peptides.take(learn), groups[learn], peptides.take(test)


@pytest.fixture(scope="module")
def labels(parts):
    learn, groups, _ = parts
    return Oracle.fit(learn.sequences, learn.values["active"], groups)


def test_features():
    x = features(["KW", "KWK", "A"])
    assert x.shape == (3, 134) and np.isfinite(x).all()
    assert x[0, :20].sum() == pytest.approx(1) and x[0, 26:62].sum() == pytest.approx(1)
    assert x[2, 26:].sum() == 0  # no pairs
    assert features(["KKKKW"])[0, 26 + 36 : 26 + 72].sum() == pytest.approx(1)  # two pairs at distance 3


def test_of_labels(parts, labels):
    test = parts[2]
    prediction = labels.predict(test.sequences)
    measures = scores.assess(prediction, test.values["active"], True)
    assert measures["inside"] > 0.9 * len(test)
    assert measures["ROC-AUC"] > 0.75 and measures["MCC"] > 0.3
    assert measures["Brier"] < 0.85 * measures["Brier base"] and measures["calibration error"] < 0.1
    inside = prediction.inside
    assert (prediction.low[inside] <= prediction.mean[inside]).all()
    assert (prediction.high[inside] >= prediction.mean[inside]).all()
    assert 0 < prediction.spread[inside].mean() < 0.3


def test_of_scores(parts):
    learn, groups, test = parts
    target = {name: properties(x.sequences)["charge"] + properties(x.sequences)["moment"]
              for name, x in (("learn", learn), ("test", test))}  # fmt: skip
    noise = np.random.default_rng(0).normal(0, 0.5, (2, 2000))
    oracle = Oracle.fit(learn.sequences, target["learn"] + noise[0, : len(learn)], groups)
    prediction = oracle.predict(test.sequences)
    measures = scores.assess(prediction, target["test"] + noise[1, : len(test)], False)
    assert not oracle.binary and measures["R2"] > 0.85 and 0.84 < measures["coverage"] < 0.96


def test_it_refuses_to_extrapolate(parts, labels):
    other = ["W" * 20, "C" * 12, "K" * 40, "GPGPGPGPGPGPGP", "KW"]
    prediction = labels.predict([*other, parts[0].sequences[0]])
    assert prediction.inside.tolist() == [False] * 5 + [True]
    assert np.isnan(prediction.mean[:5]).all() and np.isfinite(prediction.mean[5])
    with pytest.raises(ValueError, match="5 of 5 peptides are outside of the oracle's domain, first WWWW"):
        labels.predict(other, strict=True)
    assert labels.predict([]).mean.shape == (0,)


def test_it_is_saved_and_the_same_again(parts, labels, tmp_path):
    learn, groups, test = parts
    labels.save(tmp_path)
    loaded, again = Oracle.load(tmp_path), Oracle.fit(learn.sequences, learn.values["active"], groups)
    expected = labels.predict(test.sequences).mean
    assert np.array_equal(loaded.predict(test.sequences).mean, expected, equal_nan=True)
    assert np.array_equal(again.predict(test.sequences).mean, expected, equal_nan=True)


def test_data_that_do_not_suffice(parts):
    learn, groups, _ = parts
    with pytest.raises(ValueError, match=r"20 peptides in .* clusters are too few"):
        Oracle.fit(learn.sequences[:20], np.ones(20), groups[:20])
    with pytest.raises(ValueError, match="should be finite and differ"):
        Oracle.fit(learn.sequences, np.ones(len(learn)), groups)


def test_scores_of_scikit_learn():
    draw = np.random.default_rng(0)
    labels = (draw.random(200) < 0.4).astype(float)
    probability = np.round(np.clip(labels * 0.3 + draw.random(200) * 0.7, 0, 1), 2)  # with ties
    assert scores.roc_auc(probability, labels) == pytest.approx(metrics.roc_auc_score(labels, probability))
    predicted = (probability > 0.5).astype(float)
    assert scores.matthews(predicted, labels) == pytest.approx(metrics.matthews_corrcoef(labels, predicted))
    everywhere = np.ones(200, bool)
    prediction = Prediction(probability, probability, probability, probability, everywhere)
    measures = scores.assess(prediction, labels, True)
    assert measures["Brier"] == pytest.approx(metrics.brier_score_loss(labels, probability))
    assert sum(n for _, _, n in measures["bins"]) == 200
    aims = draw.normal(size=200)
    assert scores.assess(prediction, aims, False)["R2"] == pytest.approx(metrics.r2_score(aims, probability))
    assert np.isnan(scores.roc_auc(probability, np.ones(200))) and scores.matthews(np.ones(200), labels) == 0
    nowhere = Prediction(probability, probability, probability, probability, ~everywhere)
    assert scores.assess(nowhere, labels, True) == {"peptides": 200, "inside": 0}
    assert scores.assess(prediction, np.ones(200), True) == {"peptides": 200, "inside": 200}
