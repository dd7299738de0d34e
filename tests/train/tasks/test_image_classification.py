import numpy as np
import pytest
from transformers import EvalPrediction

from tiny_models import colors, image_processor, vit
from tutti.data.rows import Numbered
from tutti.train.tasks import get_task


def test_batches_by_an_image_processor():
    processor = image_processor(8)
    task = get_task("image-classification")
    features = task.prepare(colors(4), processor)
    batch = task.collator(processor)([features[i] for i in range(4)])
    assert batch["pixel_values"][1, 2].min() > 0.4  # blue
    assert batch["pixel_values"][1, 0].max() < -0.5
    assert batch["pixel_values"].shape == (4, 3, 8, 8) and batch["labels"].tolist() == [0, 1, 0, 1]


def test_augmentation_is_a_function_of_the_sample():
    task = get_task("image-classification", size=8, flip=True, crop=0.5)
    features = Numbered(task.prepare(colors(2) * 2, None))
    collate = task.collator(None)
    both, alone = collate([features[0], features[2]]), collate([features[2]])
    assert (both["pixel_values"][1] == alone["pixel_values"][0]).all()


def test_a_label_out_of_range():
    with pytest.raises(ValueError, match="row 1: label is 1, and the model has 1 classes"):
        get_task("image-classification").check(vit(num_labels=1), None, colors(2))


def test_scores():
    prediction = EvalPrediction(predictions=np.eye(2)[[0, 1, 1]], label_ids=np.array([0, 1, 0]))
    assert get_task("image-classification").metrics(prediction)["accuracy"] == pytest.approx(2 / 3)


def test_a_vit_learns(train):
    losses = train(get_task("image-classification", size=8), vit(), colors(16), None, steps=20)
    assert losses[0] > 0.4 and losses[-1] < 0.05
