import numpy as np
import pytest
from sklearn.metrics import accuracy_score, f1_score

from tutti.train.scores import accuracy, f1


def drawn(classes, seed=0):
    draw = np.random.default_rng(seed)
    return draw.integers(0, classes, 200), draw.integers(0, classes, 200)


@pytest.mark.parametrize("classes", [2, 5])
def test_scores_are_those_of_scikit_learn(classes):
    predicted, wanted = drawn(classes)
    assert accuracy(predicted, wanted) == pytest.approx(accuracy_score(wanted, predicted))
    assert f1(predicted, wanted, "macro") == pytest.approx(f1_score(wanted, predicted, average="macro"))
    if classes == 2:
        assert f1(predicted, wanted) == pytest.approx(f1_score(wanted, predicted))


def test_logits_and_labels_that_do_not_count():
    logits = np.eye(3)[[0, 1, 2, 2]]
    assert accuracy(logits, [0, 1, -100, 0]) == pytest.approx(2 / 3)
    assert f1([0, 0], [0, 0]) == 0.0
    assert f1(logits[:3], [0, 1, -100]) == 1.0


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="use average='macro'"):
        f1([2, 1], [1, 1])
    with pytest.raises(ValueError, match=r"shape \(3,\) and labels \(2,\)"):
        accuracy([1, 2, 3], [1, 2])
    with pytest.raises(ValueError, match="no label"):
        accuracy([1], [-100])
    with pytest.raises(ValueError, match="'binary' or 'macro'"):
        f1([1], [1], "micro")  # pyright: ignore
