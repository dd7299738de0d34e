import numpy as np
import pytest
from transformers import BertForMultipleChoice, EvalPrediction

from tiny_models import bert
from tutti.train.tasks import get_task

TASK = get_task("multiple-choice")
ROWS = [{"context": "the cat", "choices": ["sleeps", "river", "tree"], "label": 0},
        {"context": "a", "choices": ["dog", "in", "on"], "label": 1}]  # fmt: skip


def test_a_batch_has_a_dim_of_choices(tokenizer):
    features = TASK.prepare(ROWS, tokenizer)
    batch = TASK.collator(tokenizer, buckets=(16,))([features[0], features[1]])
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, 3, 16)
    expected = tokenizer("a", "on")["input_ids"]
    assert batch["input_ids"][1, 2, : len(expected)].tolist() == expected
    loss = bert(BertForMultipleChoice, tokenizer)(**batch).loss
    assert loss.item() == pytest.approx(np.log(3), abs=0.3)


def test_rows_have_as_many_choices(tokenizer):
    features = TASK.prepare([ROWS[0], {**ROWS[1], "choices": ["dog", "in"]}], tokenizer)
    with pytest.raises(ValueError, match="rows have 2 and 3 choices"):
        TASK.collator(tokenizer)([features[0], features[1]])


def test_a_label_is_one_of_the_choices(tokenizer):
    with pytest.raises(ValueError, match=r"row 0: label is 3, and the row has 3 choices \(0 to 2\)"):
        TASK.check(bert(BertForMultipleChoice, tokenizer), tokenizer, [{**ROWS[0], "label": 3}])


def test_scores():
    prediction = EvalPrediction(predictions=np.array([[1, 2], [3, 0]]), label_ids=np.array([1, 1]))
    assert TASK.metrics(prediction) == {"accuracy": 0.5}
