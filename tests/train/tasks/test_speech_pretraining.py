import numpy as np
import pytest
import torch
import transformers

from tiny_models import wav2vec2, wav2vec2_pretraining
from tutti.data.rows import Numbered
from tutti.train.tasks import get_task

TASK = get_task("speech-pretraining", samples=400, frames=19, span=3, probability=0.5, negatives=5)
EXTRACTOR = transformers.Wav2Vec2FeatureExtractor(sampling_rate=1000)


def rows(count=8):
    """Tones whose pitch changes every 100 samples."""
    draw = np.random.default_rng(0)
    pitches = draw.uniform(0.1, 2.0, (count, 6))
    return [{"audio": {"array": np.concatenate([np.sin(np.arange(100) * p) for p in row]), "sampling_rate": 1000}}
            for row in pitches]  # fmt: skip


def test_masks_are_spans_and_their_fraction_is_that_of_overlapping_spans():
    task, fractions = get_task("speech-pretraining", span=10, probability=0.65), []
    for seed in range(200):
        mask = task.mask(np.random.default_rng(seed), 500)
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
        assert (edges[1::2] - edges[::2] >= 10).all()
        fractions.append(mask.mean())
    assert abs(np.mean(fractions) - 0.49) < 0.02  # as the paper says


def test_distractors_are_other_masked_frames():
    mask = TASK.mask(np.random.default_rng(1), 19)
    distractors = TASK.distractors(np.random.default_rng(2), mask)
    for frame in np.flatnonzero(mask):
        assert mask[distractors[frame]].all() and (distractors[frame] != frame).all()
    assert not distractors[~mask].any() and len(np.unique(distractors)) > 3


def test_the_loss_is_that_of_the_model_for_each_masked_frame():
    model = wav2vec2_pretraining().eval()  # without gumbel noise; masking is the model's own, so switched on
    model.wav2vec2.training = True
    features = TASK.prepare(rows(2), EXTRACTOR)
    batch = TASK.collator(EXTRACTOR)([features[0], features[1]])
    flat = batch["sampled_negative_indices"] + 19 * torch.arange(2)[:, None, None]
    expected = model(**{**batch, "sampled_negative_indices": flat}).loss / batch["mask_time_indices"].sum()
    torch.testing.assert_close(TASK.loss(model, batch), expected)


def test_draws_are_functions_of_the_sample():
    features = Numbered(TASK.prepare(rows(3), EXTRACTOR))
    collate = TASK.collator(EXTRACTOR)
    both, alone = collate([features[0], features[2]]), collate([features[2]])
    assert all((both[name][1] == alone[name][0]).all() for name in both)


def test_what_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match=r"the model makes 19 frames of 400 samples, not 1; set frames=19"):
        TASK.but(frames=1).check(wav2vec2_pretraining(), EXTRACTOR, rows(1))
    with pytest.raises(ValueError, match=r"set config\.layerdrop = 0"):
        TASK.check(wav2vec2_pretraining(layerdrop=0.1), EXTRACTOR, rows(1))
    with pytest.raises(ValueError, match="Wav2Vec2ForCTC does not fit speech-pretraining"):
        TASK.check(wav2vec2(8), EXTRACTOR, rows(1))
    with pytest.raises(ValueError, match="600 samples, fewer than 900; lower samples"):
        TASK.prepare(rows(1), EXTRACTOR, samples=900)[0]


def test_a_wav2vec2_learns(train):
    losses = train(TASK, wav2vec2_pretraining(), rows(), EXTRACTOR, steps=40)
    assert losses[0] > 1.5 and np.mean(losses[-5:]) < losses[0] - 0.4
