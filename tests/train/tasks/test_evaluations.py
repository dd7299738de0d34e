"""`Trainer.evaluate` of tasks against the packages that define their scores, with batches of different lengths."""

import jiwer
import numpy as np
import pytest
import seqeval.metrics
import torch
import transformers
from sklearn.metrics import accuracy_score, f1_score

import tutti
from tiny_models import VOCABULARY, bert, clip, colors, tones, unet, wav2vec2
from tutti.data.rows import BadRow
from tutti.train.tasks import Task, get_task
from tutti.train.tasks.scores import entities, entity_scores, multi_label_scores

TEXTS = [
    "the cat",
    "a small bird sings in the tree",
    "dog",
    "the big red house on the river",
    "blue bird",
    "a cat runs",
]


def evaluated(tmp_path, model, rows, task, processor, size=4):
    options = {"report_to": "none", "per_device_eval_batch_size": size, "disable_tqdm": True, "use_cpu": True}
    trainer = tutti.Trainer(model, tutti.TrainingArguments(str(tmp_path), **options), eval_dataset=rows, task=task,
                            processing_class=processor)  # fmt: skip
    return trainer, trainer.evaluate()


def test_several_labels_a_row(tmp_path, tokenizer):
    draw = np.random.default_rng(0)
    rows = [{"text": text, "label": draw.integers(0, 2, 3).tolist()} for text in TEXTS]
    model = bert(transformers.BertForSequenceClassification, tokenizer, num_labels=3,
                 problem_type="multi_label_classification").eval()  # fmt: skip
    _, metrics = evaluated(tmp_path, model, rows, "sequence-classification", tokenizer)
    encoded = tokenizer(TEXTS, padding=True, return_tensors="pt")
    labels = np.array([row["label"] for row in rows])
    outputs = model(**encoded, labels=torch.tensor(labels).float())
    predicted = outputs.logits.detach().numpy() > 0
    assert metrics["eval_loss"] == pytest.approx(outputs.loss.item(), rel=1e-5)
    assert metrics["eval_accuracy"] == accuracy_score(labels, predicted)
    for name, average in (("f1", "micro"), ("f1_macro", "macro")):
        expected = f1_score(labels, predicted, average=average, zero_division=0)
        assert metrics[f"eval_{name}"] == pytest.approx(expected)


def test_scores_of_several_labels():
    draw = np.random.default_rng(1)
    logits, labels = draw.normal(size=(50, 6)), draw.integers(0, 2, (50, 6))
    labels[:, 5] = 0
    logits[:, 5] = -1  # neither predicted nor true
    scores = multi_label_scores(logits, labels)
    assert scores["f1"] == pytest.approx(f1_score(labels, logits > 0, average="micro"))
    assert scores["f1_macro"] == pytest.approx(f1_score(labels, logits > 0, average="macro", zero_division=0))


def test_lists_of_labels_are_as_long_as_the_outputs(tokenizer):
    model = bert(transformers.BertForSequenceClassification, tokenizer, num_labels=3)
    rows = [{"text": "cat", "label": [0.0, 1.0, 0.0]}, {"text": "dog", "label": [1.0]}]
    with pytest.raises(BadRow, match=r"row 1: label is \[1\.0\]; it must be a list of 3 numbers"):
        get_task("sequence-classification").check(model, tokenizer, rows)


NAMES = ("O", "B-A", "I-A", "B-B", "I-B")


def test_entities_are_those_of_seqeval(tmp_path, tokenizer):
    draw = np.random.default_rng(0)
    for _ in range(200):
        tags = [NAMES[i] for i in draw.integers(0, 5, draw.integers(1, 12))]
        assert entities(tags) == set(seqeval.metrics.sequence_labeling.get_entities(tags))
    predicted, labels = draw.integers(0, 5, (2, 40, 9))
    labels[draw.random((40, 9)) < 0.2] = -100
    pairs = [[[NAMES[i] for i in row[mask]] for row, mask in zip(rows, labels != -100, strict=True)]
             for rows in (labels, predicted)]  # fmt: skip
    scores = entity_scores(predicted, labels, NAMES)
    for name in ("precision", "recall", "f1"):
        kind = getattr(seqeval.metrics, f"{name}_score")
        assert scores[f"entity_{name}"] == pytest.approx(kind(*pairs))
    rows = [{"tokens": text.split(), "labels": [(3 * i) % 5 for i in range(len(text.split()))]} for text in TEXTS]
    names = dict(enumerate(NAMES))
    model = bert(transformers.BertForTokenClassification, tokenizer, id2label=names, num_labels=5)
    _, metrics = evaluated(tmp_path, model, rows, "token-classification", tokenizer)
    assert metrics.keys() > {
        "eval_accuracy",
        "eval_f1",
        "eval_entity_precision",
        "eval_entity_recall",
        "eval_entity_f1",
    }


def test_speech(tmp_path, processor):
    rows, model = tones(7), wav2vec2(len(VOCABULARY)).eval()
    with torch.no_grad():
        model.lm_head.bias += torch.randn(len(VOCABULARY), generator=torch.manual_seed(3))
    trainer, metrics = evaluated(tmp_path, model, rows, "speech-ctc", processor, size=2)
    task, texts = get_task("speech-ctc"), []
    for row in rows:
        feature = task.feature(row, processor)
        values = torch.tensor(feature["input_values"])[None]
        texts += task.decoded(model(values, attention_mask=torch.ones_like(values).long()).logits.detach(), processor)
    expected = jiwer.cer([row["text"] for row in rows], texts)
    assert metrics["eval_token_error_rate"] == pytest.approx(expected)
    logits = trainer.predict(trainer.eval_dataset).predictions
    assert task.decoded(logits, processor) == texts, "nothing is read after the end of the audio"


def test_images_and_texts(tmp_path, tokenizer):
    rows = [{**row, "text": f"{row['text']} {i}"} for i, row in enumerate(colors(7))]
    task, model = get_task("contrastive", size=8, length=8), clip(tokenizer).eval()
    trainer, metrics = evaluated(tmp_path, model, rows, task, tokenizer, size=3)
    right = []
    for batch in trainer.get_eval_dataloader():
        logits = model(**batch).logits_per_image
        right += (logits.argmax(1) == torch.arange(len(logits))).tolist()
    assert metrics["eval_accuracy"] == pytest.approx(np.mean(right))


class Rounding(Task):
    """A task whose rows have no labels."""

    def feature(self, row, processor):
        return row

    def batch(self, features, processor):
        return {"x": torch.tensor([f["x"] for f in features])}

    def loss(self, model, batch):
        return (model(batch["x"][:, None])[:, 0] - batch["x"]).square().mean()

    def outputs(self, model, batch):
        return {"distance": (model(batch["x"][:, None])[:, 0] - batch["x"]).abs()}

    def metrics(self, prediction):
        return {"most": float(np.max(prediction.predictions))}


def test_a_task_of_ones_own(tmp_path):
    model, rows = torch.nn.Linear(1, 1), [{"x": float(i)} for i in range(7)]
    _, metrics = evaluated(tmp_path, model, rows, Rounding(), None)
    distance = [(model(torch.tensor([row["x"]])) - row["x"]).abs().item() for row in rows]
    assert metrics["eval_most"] == pytest.approx(max(distance), rel=1e-5)
    assert metrics["eval_loss"] == pytest.approx(np.square(distance).mean(), rel=1e-5)


def test_a_task_whose_loss_has_no_outputs(tmp_path):
    draw = np.random.default_rng(0)
    rows = [{"image": draw.integers(0, 255, (8, 8, 3)).astype(np.uint8)} for _ in range(3)]
    _, metrics = evaluated(tmp_path, unet(), rows, get_task("diffusion", size=8), None)
    assert np.isfinite(metrics["eval_loss"])


def test_a_bad_row_has_its_name(tmp_path, tokenizer):
    rows = [{"text": "the cat", "label": 0}, {"text": "the dog", "label": 1}, {"label": 1}]
    task = get_task("sequence-classification")
    with pytest.raises(BadRow, match=r"row 2: KeyError: 'text'; correct the row"):
        task.prepare(rows, tokenizer)[2]
    with pytest.raises(BadRow, match=r"row 0: 2 words with 1 labels"):
        get_task("token-classification").prepare([{"tokens": ["a", "b"], "labels": [1]}], tokenizer)[0]


def test_texts_begin_as_the_tokenizer_lets_them(tokenizer):
    from copy import deepcopy

    from tokenizers import processors

    task, begin, end = get_task("causal-lm", layout="padded", length=16), tokenizer.cls_token_id, tokenizer.eos_token_id
    plain = tokenizer("the cat", add_special_tokens=False)["input_ids"]
    assert task.prepare([{"text": "the cat"}], tokenizer)[0]["input_ids"] == [*plain, end]
    other = deepcopy(tokenizer)
    other.bos_token = "[CLS]"
    other.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", begin)]
    )
    for layout in ("padded", "packed", "windows"):
        features = task.but(layout=layout, length=len(plain) + 2).prepare([{"text": "the cat"}] * 2, other)
        row = features[0]
        assert list(row.get("input_ids", row.get("sequences", [None])[0])) == [begin, *plain, end]
