"""Cloze scores against their definition, and the errors of patterns, verbalizers and tasks."""

from __future__ import annotations

import pytest
import torch
import transformers

from tutti.data.tokenizer import train_wordpiece
from tutti.train.multitask import MultiTaskModel, mixed
from tutti.train.pet import Cloze, ClozeCollator, ClozeModel

TEXTS = ["the film was good", "the film was very bad", "a film"]
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture(scope="module")
def tokenizer():
    return train_wordpiece(TEXTS * 3, 200)


def masked(tokenizer):
    torch.manual_seed(0)
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=len(tokenizer), **SIZES)).eval()


def test_scores_are_mean_log_probabilities_of_the_words(tokenizer):
    cloze = Cloze("{text} : {mask}", {"no": "very bad", "yes": ["good", "film"]})
    model = ClozeModel(masked(tokenizer), cloze.words(tokenizer)).eval()
    rows = [{"text": text, "label": label} for text, label in zip(TEXTS, ["yes", "no", "yes"], strict=True)]
    batch = ClozeCollator(tokenizer)(cloze.features(rows, tokenizer))
    assert batch["labels"].tolist() == [1, 0, 1]
    assert (batch["input_ids"].gather(1, batch["mask_positions"]) == tokenizer.mask_token_id).all()
    with torch.no_grad():
        outputs = model(**batch)
        logprobs = model.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.log_softmax(
            -1
        )
    words = {w: tokenizer(w, add_special_tokens=False)["input_ids"] for w in ("very bad", "good", "film")}
    for i, (first, second) in enumerate(batch["mask_positions"].tolist()):
        score = {w: sum(logprobs[i, at, t] for at, t in zip((first, second), ids, strict=False)) / len(ids)
                 for w, ids in words.items()}  # fmt: skip
        wanted = torch.stack([score["very bad"], (score["good"] + score["film"]) / 2])
        torch.testing.assert_close(outputs.logits[i], wanted)


def test_mistakes_are_named(tokenizer):
    words = {0: "bad", 1: "good"}
    for pattern, said in [("{text}", "mask"), ("{mask}", "no column"), ("{text} {mask} {mask}", "once")]:
        with pytest.raises(ValueError, match=said):
            Cloze(pattern, words)
    cloze = Cloze("{text} {mask}", words)
    with pytest.raises(ValueError, match="does not know"):
        Cloze("{text} {mask}", {0: "bad", 1: "\u4e2d"}).words(tokenizer)
    with pytest.raises(ValueError, match="no column 'text'"):
        cloze.features([{"txt": "a", "label": 0}], tokenizer)
    with pytest.raises(ValueError, match="label is 7"):
        cloze.features([{"text": "a", "label": 7}], tokenizer)
    long = Cloze("{text} {mask}", words, length=8).features([{"text": "the film was good " * 9, "label": 1}], tokenizer)
    assert len(long[0]["input_ids"]) <= 8 and tokenizer.mask_token_id in long[0]["input_ids"]


def test_a_row_has_the_logits_of_its_task(tokenizer):
    model = MultiTaskModel(masked(tokenizer), {"two": 2, "three": 3}).eval()
    ids = torch.tensor(tokenizer(["the film", "a film"])["input_ids"])
    with torch.no_grad():
        outputs = model(task=torch.tensor([0, 1]), input_ids=ids, labels=torch.tensor([1, 2]))
        alone = [model.single(name).eval()(input_ids=ids).logits[i] for i, name in enumerate(("two", "three"))]
    torch.testing.assert_close(outputs.logits[0, :2], alone[0])
    torch.testing.assert_close(outputs.logits[1], alone[1])
    losses = [torch.nn.functional.cross_entropy(x, torch.tensor(y)) for x, y in zip(alone, (1, 2), strict=True)]
    torch.testing.assert_close(outputs.loss, sum(losses) / 2)
    assert [row["task"] for row in mixed({"three": [{}], "two": [{}]}, model)] == [1, 0]
    with pytest.raises(ValueError, match="no task 'four'"):
        mixed({"four": [{}]}, model)
