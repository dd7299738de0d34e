"""`tutti.pipeline` against `transformers.pipeline`."""

from __future__ import annotations

import pytest
import torch
import transformers

import tutti
from tutti.data.tokenizer import train_wordpiece

TEXTS = ["the cat sat on the mat", "a dog", "the dog sat on a cat and the cat was not amused"]


def parts(kind):
    torch.manual_seed(0)
    tokenizer = train_wordpiece(TEXTS, 100)
    config = transformers.BertConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_labels=3,
                                     num_attention_heads=2, intermediate_size=32,
                                     max_position_embeddings=32)  # fmt: skip
    return getattr(transformers, kind)(config).eval(), tokenizer


@pytest.mark.parametrize(("task", "kind"), [("text-classification", "BertForSequenceClassification"),
                                            ("token-classification", "BertForTokenClassification"),
                                            ("fill-mask", "BertForMaskedLM")])  # fmt: skip
def test_it_answers_as_transformers_does(task, kind):
    texts = [x.replace("sat", "[MASK]") for x in TEXTS if "sat" in x] if task == "fill-mask" else TEXTS
    model, tokenizer = parts(kind)
    wanted = transformers.pipeline(task, model, tokenizer=tokenizer, device="cpu")(texts)
    for plan in ("dp", "tp"):
        model, _ = parts(kind)
        pipe = tutti.pipeline(task, model, tokenizer=tokenizer, device="cpu", cluster="cpu:2", plan=plan)
        assert approximately(pipe(texts), wanted)


def approximately(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(approximately(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(approximately, a, b))
    return a == pytest.approx(b, rel=1e-4) if not isinstance(a, str) else a == b
