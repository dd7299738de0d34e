import pytest

from tiny_models import colors, mae
from tutti.data.rows import Numbered
from tutti.train.tasks import get_task

TASK = get_task("masked-image", size=8, patches=16)


def test_the_mask_is_a_function_of_the_sample_and_masks_three_quarters():
    features, model = Numbered(TASK.prepare(colors(3), None)), mae().eval()
    collate = TASK.collator(None)
    together, alone = collate([features[0], features[2]]), collate([features[2]])
    assert (together["noise"][1] == alone["noise"][0]).all() and (together["noise"][0] != alone["noise"][0]).any()
    masks = model(**together).mask
    assert masks.sum(1).tolist() == [12, 12] and (masks[1] == model(**alone).mask[0]).all()


def test_as_many_patches_as_the_model_has():
    with pytest.raises(ValueError, match=r"the model has 16 patches, patches is 196; set patches=16"):
        get_task("masked-image", size=8).check(mae(), None, colors(1))


def test_a_masked_autoencoder_learns(train):
    losses = train(TASK, mae(), colors(16), None, steps=30)
    assert losses[0] > 0.5 and losses[-1] < 0.2
