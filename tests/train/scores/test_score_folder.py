import json
import math

import pytest
import torch
import transformers

from tutti import cli
from tutti.train.scores import score_folder

TEXTS = [f"the {a} {b} sat on the bed" for a in ("big", "small") for b in ("cat", "dog")]


def rows(path, examples):
    path.write_text("\n".join(json.dumps(row) for row in examples))
    return str(path)


def test_perplexity_of_text(causal, tmp_path):
    data = rows(tmp_path / "text.jsonl", [{"text": text} for text in TEXTS])
    metrics = score_folder(causal, "causal-lm", data, layout="padded", length=32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(causal)
    model = transformers.AutoModelForCausalLM.from_pretrained(causal).eval()
    total, right, count = 0.0, 0, 0
    for text in TEXTS:
        ids = torch.tensor([*tokenizer(text)["input_ids"], 0])
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum").item()
        right, count = right + (logits.argmax(-1) == ids[1:]).sum().item(), count + len(ids) - 1
    assert metrics["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    assert metrics["accuracy"] == pytest.approx(right / count)


def test_classes_from_the_command_line(classifier, tmp_path, capsys):
    examples = [{"text": text, "label": i % 2} for i, text in enumerate(TEXTS)]
    data = rows(tmp_path / "classes.jsonl", examples)
    metrics = score_folder(classifier, "sequence-classification", data, ["accuracy", "f1_macro"], length=16)
    args = ["eval", str(classifier), "--task", "sequence-classification", "--data", data, "--metrics", "accuracy,f1",
            "--length", "16", "--cluster", "cpu:2", "--plan", "dp2"]  # fmt: skip
    assert cli.main(args) == 0
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines() if len(line.split()) == 2)
    assert float(printed["accuracy"]) == pytest.approx(metrics["accuracy"], abs=1e-4)
    assert float(printed["loss"]) == pytest.approx(metrics["loss"], abs=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(classifier)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(classifier).eval()
    best = model(**tokenizer(TEXTS, padding=True, return_tensors="pt")).logits.argmax(-1)
    assert metrics["accuracy"] == (best == torch.tensor([0, 1, 0, 1])).float().mean().item()
    assert set(metrics) == {"loss", "accuracy", "f1_macro"}


def test_bleu_and_rouge_of_what_a_model_writes(writer, tmp_path):
    data = rows(
        tmp_path / "pairs.jsonl", [{"source": "cat", "target": "the cat"}, {"source": "dog", "target": "the big dog"}]
    )
    metrics = score_folder(writer, "seq2seq", data, ["bleu", "rouge", "perplexity"], length=8, target_length=8)
    assert metrics["rouge1"] == pytest.approx((1 + 0.8) / 2)
    assert metrics["rougeL"] == pytest.approx(0.9)
    assert metrics["bleu"] == 0, "no four words are in common"
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))


def test_metrics_that_do_not_fit(classifier, causal, tmp_path, capsys):
    data = rows(tmp_path / "classes.jsonl", [{"text": TEXTS[0], "label": 0}])
    with pytest.raises(ValueError, match="need the task 'seq2seq'"):
        score_folder(classifier, "sequence-classification", data, ["bleu"])
    with pytest.raises(ValueError, match="models of text"):
        score_folder(classifier, "sequence-classification", data, ["perplexity"])
    with pytest.raises(ValueError, match="has no metric 'exact_match'"):
        score_folder(causal, "causal-lm", data, ["exact_match"], length=16, layout="padded")
    assert cli.main(["eval", str(causal), "--data", data]) == 2
    assert "need --task" in capsys.readouterr().err
    assert cli.main(["eval", str(causal), "--task", "causal-lm"]) == 2
    assert "--task needs --data" in capsys.readouterr().err
