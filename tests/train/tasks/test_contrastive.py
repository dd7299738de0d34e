import numpy as np
import pytest
import torch
import transformers
from transformers import BertModel, EvalPrediction

import tutti
from tiny_models import bert, clip, colors
from tutti.train.tasks import get_task

TASK = get_task("contrastive", size=8, length=8)


def rows():
    return [{**row, "text": f"{row['text']} {i}"} for i, row in enumerate(colors(8))]


def test_the_loss_is_over_the_global_batch_on_any_number_of_devices(tokenizer):
    model = clip(tokenizer)
    features = TASK.prepare(rows(), tokenizer)
    batch = TASK.collator(tokenizer)([features[i] for i in range(8)])
    expected, halves = model(**batch).loss, [model(**half).loss for half in split(batch)]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = tutti.parallelize(model, optimizer, batch, cluster="cpu:2", plan="dp2", level="O0")
    torch.testing.assert_close(step(batch), expected.detach(), rtol=1e-5, atol=1e-5)
    assert expected > sum(halves) / 2 + 0.3  # log 8, and not log 4


def split(batch):
    return [{k: v[at : at + 4] if isinstance(v, torch.Tensor) else v for k, v in batch.items()} for at in (0, 4)]


def test_a_clip_learns(tokenizer, train):
    sizes = {"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}}
    processor = transformers.CLIPProcessor(transformers.CLIPImageProcessor(**sizes), tokenizer)
    losses = train(TASK, clip(tokenizer), colors(2), processor, batch=2, steps=20)
    assert losses[0] > 0.4 and losses[-1] < 0.1


def test_scores_are_within_batches():
    logits = np.array([[2, 1], [0, 1], [1, 2], [0, 1]])
    assert TASK.metrics(EvalPrediction(predictions=(logits,), label_ids=None))["accuracy"] == 0.75


def test_a_model_without_a_contrastive_loss_is_an_error(tokenizer):
    with pytest.raises(ValueError, match="BertModel has no contrastive loss"):
        TASK.check(bert(BertModel, tokenizer), tokenizer, rows())
