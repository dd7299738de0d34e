import numpy as np
import pytest
from transformers import BertForSequenceClassification, EvalPrediction

from tiny_models import bert
from tutti.train.tasks import get_task

TASK = get_task("sequence-classification")


def test_a_pair_of_texts_is_one_sequence(tokenizer):
    rows = [{"a": "the cat", "b": "a dog", "label": 0.5}]
    feature = get_task("sequence-classification", text="a", pair="b").prepare(rows, tokenizer)[0]
    assert feature["input_ids"] == tokenizer("the cat", "a dog")["input_ids"] and feature["labels"] == 0.5
    assert feature["input_ids"].count(tokenizer.sep_token_id) == 2


def test_scores_of_classes_by_hand():
    logits = np.eye(3)[[0, 0, 1, 2]]
    scores = TASK.metrics(EvalPrediction(predictions=logits, label_ids=np.array([0, 1, 1, 2])))
    assert scores["accuracy"] == 0.75 and scores["f1"] == pytest.approx((2 / 3 + 2 / 3 + 1) / 3)


def test_scores_of_a_number():
    prediction = EvalPrediction(predictions=np.array([[1.0], [2.0], [4.0]]), label_ids=np.array([1.0, 2.0, 3.0]))
    scores = TASK.metrics(prediction)
    assert scores["mse"] == pytest.approx(1 / 3) and scores["pearson"] == pytest.approx(0.98198, abs=1e-5)


def test_a_bert_learns(tokenizer, train):
    rows = [{"text": "the red cat", "label": 0}, {"text": "a blue dog", "label": 1}] * 8
    losses = train(TASK, bert(BertForSequenceClassification, tokenizer), rows, tokenizer, steps=20)
    assert losses[0] > 0.4 and losses[-1] < 0.1
