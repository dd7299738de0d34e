import numpy as np
import pytest
from transformers import EvalPrediction

from tiny_models import t5
from tutti.train.tasks import get_task

ROWS = [{"source": "the cat", "target": "a dog sings"}, {"source": "bird", "target": "house"}]


def test_sources_are_padded_and_labels_ignored(tokenizer):
    task = get_task("seq2seq", buckets=(8, 12))
    features = task.prepare(ROWS, tokenizer)
    batch = task.collator(tokenizer)([features[0], features[1]])
    assert batch["input_ids"].shape == batch["attention_mask"].shape and batch["input_ids"].shape[1] in (8, 12)
    short = len(tokenizer("house")["input_ids"])
    assert (batch["labels"][1, short:] == -100).all() and (batch["labels"][1, :short] != -100).all()


def test_scores_are_of_the_same_place():
    logits = np.zeros((1, 2, 3))
    logits[0, 0, 2] = 1
    prediction = EvalPrediction(predictions=(logits, np.zeros(1)), label_ids=np.array([[2, -100]]))
    assert get_task("seq2seq").metrics(prediction)["accuracy"] == 1


@pytest.mark.slow
def test_a_t5_learns_to_translate(tokenizer, train):
    losses = train(get_task("seq2seq"), t5(tokenizer), ROWS * 8, tokenizer, steps=30, lr=1e-2)
    assert losses[0] > 5 and losses[-1] < 1.0
