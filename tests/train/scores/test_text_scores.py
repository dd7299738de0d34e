import math
import sys

import numpy as np
import pytest

from tutti.train.scores import bleu, perplexity, rouge

CAT = "the cat sat on the mat"


def test_bleu_by_its_definition():
    """Papineni et al. 2002: the geometric mean of n-gram precisions, times the brevity penalty."""
    assert bleu([CAT], [CAT]) == pytest.approx(100)
    sentence = "the cat sat on a mat"  # precisions 5/6, 3/5, 2/4, 1/3
    assert bleu([sentence], [CAT]) == pytest.approx(100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)
    short = "the cat sat on"
    assert bleu([short], [CAT]) == pytest.approx(100 * math.exp(1 - 6 / 4))
    assert bleu([sentence], [["nothing here", sentence]]) == pytest.approx(100)
    assert bleu([CAT, sentence], [[CAT], ["nothing", sentence]]) == pytest.approx(100)


def test_rouge_by_its_definition():
    """Lin 2004: F of common words, common pairs of words, and the longest common subsequence."""
    scores = rouge(["the cat on mat"], [CAT])
    assert scores["rouge1"] == pytest.approx(2 * (4 / 4) * (4 / 6) / (4 / 4 + 4 / 6))
    assert scores["rouge2"] == pytest.approx(2 * (1 / 3) * (1 / 5) / (1 / 3 + 1 / 5))
    assert scores["rougeL"] == pytest.approx(0.8)
    assert rouge(["a b", CAT], ["c d", CAT])["rouge1"] == pytest.approx(0.5)
    assert rouge(["a b"], [["c d", "a b"]])["rouge1"] == 1


def test_perplexity_is_that_of_the_probabilities():
    logits = np.log(np.array([[[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [1 / 3, 1 / 3, 1 / 3]]]))
    assert perplexity(logits, np.array([[9, 1, 1]])) == pytest.approx((0.25 * 0.8) ** -0.5)
    assert perplexity(logits, np.array([[0, -100, 2]]), shift=0) == pytest.approx((0.5 / 3) ** -0.5)
    with pytest.raises(ValueError, match="no label"):
        perplexity(logits, np.full((1, 3), -100))


def test_errors(monkeypatch):
    with pytest.raises(ValueError, match="1 predictions and 2 references"):
        bleu(["a"], ["a", "b"])
    with pytest.raises(ValueError, match="0 predictions"):
        rouge([], [])
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(ModuleNotFoundError, match=r"no package sacrebleu; pip install 'tutti\[eval\]'"):
        bleu(["a"], ["a"])
