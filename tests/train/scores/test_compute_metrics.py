import numpy as np
import pytest
from transformers import EvalPrediction

from tutti.data.tokenizer import train_wordpiece
from tutti.train.scores import compute_metrics
from tutti.train.scores.compute import decoded


def test_metrics_by_name():
    logits, labels = np.eye(2)[[0, 1, 1, 0]], np.array([0, 1, 0, 0])
    metrics = compute_metrics(["accuracy", "f1", "f1_macro"])(EvalPrediction(predictions=logits, label_ids=labels))
    assert metrics == pytest.approx({"accuracy": 0.75, "f1": 2 / 3, "f1_macro": (2 / 3 + 0.8) / 2})


def test_a_causal_model_predicts_the_next_token():
    labels = np.array([[1, 2, 0, -100]])
    logits = np.log(np.full((1, 4, 3), 0.2) + 0.4 * np.eye(3)[[[2, 0, 1, 1]]])
    prediction = EvalPrediction(predictions=(logits, None), label_ids=labels)
    metrics = compute_metrics(["accuracy", "perplexity"], shift=1)(prediction)
    assert metrics["accuracy"] == 1 and metrics["perplexity"] == pytest.approx(1 / 0.6)


def test_texts_are_decoded():
    tokenizer = train_wordpiece(["the cat sat on the mat"], 60)
    ids = np.array(tokenizer(["the cat sat on", "the mat sat on"])["input_ids"])
    assert decoded(np.where(ids == 3, -100, ids), tokenizer) == ["the cat sat on", "the mat sat on"]
    prediction = EvalPrediction(predictions=np.eye(len(tokenizer))[ids], label_ids=ids)
    metrics = compute_metrics(["bleu", "rouge"], tokenizer)(prediction)
    assert metrics == pytest.approx({"bleu": 100, "rouge1": 1, "rouge2": 1, "rougeL": 1})


def test_errors():
    with pytest.raises(ValueError, match="no metric 'acuracy'; the nearest is 'accuracy'"):
        compute_metrics(["acuracy"])
    with pytest.raises(ValueError, match="give the tokenizer"):
        compute_metrics(["bleu"])
