import gzip
import json

import numpy as np
import pytest
from transformers import EvalPrediction

from tiny_models import llama
from tutti.data import Stream, open_source
from tutti.train.tasks import get_task

ROWS = [{"text": t} for t in ["the cat runs", "a dog", "the red bird sings in the tree", "dog"]]


def ids(tokenizer, text):
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def test_windows_are_the_texts_one_after_the_other(tokenizer):
    features = get_task("causal-lm", length=5).prepare(ROWS, tokenizer)
    every = [i for row in ROWS for i in ids(tokenizer, row["text"])]
    tokens = [i for f in features for i in f["input_ids"].tolist()]
    assert tokens == every[: len(tokens)] and len(every) - len(tokens) < 5
    batch = get_task("causal-lm", length=5).collator(tokenizer)([features[0], features[1]])
    assert batch["input_ids"].tolist() == batch["labels"].tolist() == [every[:5], every[5:10]]


def test_padded_rows_have_no_loss_at_padding(tokenizer):
    task = get_task("causal-lm", length=6, layout="padded")
    features = task.prepare(ROWS, tokenizer)
    batch = task.collator(tokenizer)([features[2], features[3]])
    assert batch["input_ids"].shape == (2, 6) and batch["input_ids"][0].tolist() == ids(tokenizer, ROWS[2]["text"])[:6]
    short = ids(tokenizer, "dog")
    assert batch["labels"][1].tolist() == short + [-100] * (6 - len(short))
    assert batch["attention_mask"][1].tolist() == [1] * len(short) + [0] * (6 - len(short))


def test_packed_rows_hold_every_token_once(tokenizer):
    task = get_task("causal-lm", length=12, layout="packed")
    packs = task.prepare(ROWS, tokenizer)
    every = sorted(tuple(s) for pack in packs for s in pack["sequences"])
    assert every == sorted(tuple(ids(tokenizer, row["text"])) for row in ROWS)
    batch = task.collator(tokenizer)([packs[i] for i in range(len(packs))])
    assert batch["attention_mask"].shape == (len(packs), 1, 12, 12)


def test_scores():
    logits = np.zeros((1, 3, 4))
    logits[0, 0, 2] = logits[0, 1, 1] = np.log(3)  # probability 3/6
    prediction = EvalPrediction(predictions=logits, label_ids=np.array([[0, 2, 3]]))
    scores = get_task("causal-lm").metrics(prediction)
    assert scores["accuracy"] == 0.5 and scores["perplexity"] == pytest.approx((2 * 6) ** 0.5)
    ignored = EvalPrediction(predictions=logits, label_ids=np.array([[0, 2, -100]]))
    assert get_task("causal-lm").metrics(ignored)["perplexity"] == pytest.approx(2)


def test_a_llama_learns(tokenizer, train):
    rows = [{"text": "the red cat sleeps under the big tree"}] * 40
    losses = train(get_task("causal-lm", length=16), llama(tokenizer), rows, tokenizer, steps=30)
    assert losses[0] > 5 and losses[-1] < 1.0


def test_a_streaming_source_gives_the_same_windows_and_packs(tokenizer, tmp_path):
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write("\n".join(json.dumps(row) for row in ROWS))
    streamed = open_source(tmp_path / "a.jsonl.gz")
    for layout, key in (("windows", "input_ids"), ("packed", "sequences")):
        task = get_task("causal-lm", length=8, layout=layout)
        expected = [list(f[key]) for f in task.prepare(ROWS, tokenizer)]
        assert [f[key] for f in task.prepare(streamed, tokenizer).open(0, 0)] == expected
        with Stream(task.prepare(streamed, tokenizer), 2, shuffle=None, collate=task.collator(tokenizer)) as stream:
            assert next(stream)["input_ids"].shape == (2, 8)
    with pytest.raises(ValueError, match=r"no column 'body'; its columns are text"):
        task.check(llama(tokenizer), tokenizer, streamed) or task.prepare(streamed, tokenizer, text="body")
