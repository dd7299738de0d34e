import numpy as np
import pytest
import torch
from PIL import Image

from tutti.train.tasks.images import augmented, pixels


def test_pixels_without_a_processor_are_scaled_to_one():
    batch = pixels([np.full((4, 4, 3), 255, np.uint8), Image.new("RGB", (8, 6), (0, 0, 0))], None, 4)
    assert batch.shape == (2, 3, 4, 4) and batch.dtype == torch.float32
    assert (batch[0] == 1).all() and (batch[1] == -1).all()
    assert pixels([np.zeros((5, 5), np.uint8)], None).shape == (1, 1, 5, 5)


def test_the_middle_is_kept():
    image = np.zeros((4, 8, 3), np.uint8)
    image[:, 2:6] = 255
    assert (pixels([Image.fromarray(image)], None, 4) == 1).all()


def test_a_size_is_needed_for_images_of_any_size():
    with pytest.raises(ValueError, match="give size, or an image processor"):
        pixels([Image.new("RGB", (8, 6))], None)


def test_augmentation_is_a_function_of_the_draw():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3)).astype(np.uint8))
    augmentations = [np.asarray(augmented(image, np.random.default_rng(s), True, 0.3)) for s in (1, 1, 2)]
    assert (
        (augmentations[0] == augmentations[1]).all()
        and (augmentations[0] != augmentations[2]).any()
        and augmentations[0].shape == (16, 16, 3)
    )
    flips = [np.asarray(augmented(image, np.random.default_rng(s), True, None)) for s in range(100)]
    mirrored = sum((f == np.asarray(image)[:, ::-1]).all() for f in flips)
    assert 35 < mirrored < 65 and mirrored + sum((f == np.asarray(image)).all() for f in flips) == 100
