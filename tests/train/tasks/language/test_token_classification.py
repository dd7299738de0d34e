import numpy as np
import pytest
from transformers import BertForTokenClassification, EvalPrediction

from tiny_models import bert
from tutti.train.tasks import get_task

TASK = get_task("token-classification")
ROW = {"tokens": ["the", "extraordinary", "cat"], "labels": [0, 2, 1]}


def test_the_first_token_of_a_word_has_its_label(tokenizer):
    feature = TASK.prepare([ROW], tokenizer)[0]
    words = tokenizer(ROW["tokens"], is_split_into_words=True).word_ids()
    firsts = [words.index(w) for w in range(3)]
    assert [feature["labels"][i] for i in firsts] == [0, 2, 1]
    assert sum(label != -100 for label in feature["labels"]) == 3
    every = TASK.prepare([ROW], tokenizer, all_tokens=True)[0]["labels"]
    assert [label != -100 for label in every] == [w is not None for w in words]


def test_labels_are_padded_with_those_that_are_ignored(tokenizer):
    features = TASK.prepare([ROW, {"tokens": ["dog"], "labels": [1]}], tokenizer)
    batch = TASK.collator(tokenizer, buckets=(24,))([features[0], features[1]])
    assert batch["labels"].shape == batch["input_ids"].shape == (2, 24)
    assert (batch["labels"] != -100).sum(1).tolist() == [3, 1]


def test_as_many_labels_as_words(tokenizer):
    with pytest.raises(ValueError, match="2 words with 1 labels"):
        TASK.prepare([{"tokens": ["a", "b"], "labels": [1]}], tokenizer)[0]


def test_a_label_out_of_range_names_the_row(tokenizer):
    model = bert(BertForTokenClassification, tokenizer, num_labels=2)
    with pytest.raises(ValueError, match=r"row 0: labels is 2, and the model has 2 classes"):
        TASK.check(model, tokenizer, [ROW])


def test_names_of_other_labels_than_those_of_the_model(tokenizer):
    model = bert(BertForTokenClassification, tokenizer, num_labels=3)
    TASK.but(names=("O", "B-X", "I-X")).check(model, tokenizer, [ROW])
    with pytest.raises(ValueError, match="names has 2 labels, and the model has 3"):
        TASK.but(names=("O", "B-X")).check(model, tokenizer, [ROW])


def test_scores_leave_out_ignored_tokens():
    prediction = EvalPrediction(predictions=np.eye(2)[[[0, 1, 1]]], label_ids=np.array([[0, -100, 0]]))
    assert TASK.metrics(prediction)["accuracy"] == 0.5
