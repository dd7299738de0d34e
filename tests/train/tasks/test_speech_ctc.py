import numpy as np
import pytest
import torch
import transformers
from transformers import EvalPrediction

from tiny_models import VOCABULARY, tones, wav2vec2
from tutti.train.tasks import get_task
from tutti.train.tasks.speech_ctc import error_rate

TASK = get_task("speech-ctc")


def test_a_batch_is_padded(processor):
    features = TASK.prepare(tones(2), processor)
    batch = TASK.collator(processor, buckets=(256, 320))([features[0], features[1]])
    assert batch["input_values"].shape == batch["attention_mask"].shape == (2, 320)
    assert batch["attention_mask"].sum(1).tolist() == [200, 300] and not batch["input_values"][0, 200:].any()
    assert batch["labels"].shape == (2, 16) and (batch["labels"] != -100).sum(1).tolist() == [2, 3]


def test_the_loss_is_that_of_the_model(processor):
    model = wav2vec2(len(VOCABULARY), ctc_loss_reduction="mean", ctc_zero_infinity=True).eval()
    features = TASK.prepare(tones(4), processor)
    batch = TASK.collator(processor)([features[i] for i in range(4)])
    torch.testing.assert_close(TASK.loss(model, batch), model(**batch).loss)


def test_scores_by_hand(processor):
    paths = np.array([[5, 5, 0, 5, 6], [7, 0, 0, 0, 0]])
    prediction = EvalPrediction(predictions=np.eye(8)[paths], label_ids=np.array([[5, 5, 6], [5, 6, -100]]))
    assert TASK.metrics(prediction)["token_error_rate"] == pytest.approx(2 / 5)
    assert error_rate([("kitten", "sitting")]) == pytest.approx(3 / 7)
    assert TASK.decoded(np.eye(8)[paths], processor) == ["aab", "c"]


def test_what_does_not_fit_is_an_error(processor):
    with pytest.raises(ValueError, match=r"draws its masks in numpy.*set config\.apply_spec_augment = False"):
        TASK.check(wav2vec2(8, apply_spec_augment=True), processor, tones(1))
    with pytest.raises(ValueError, match=r"set config\.layerdrop = 0"):
        TASK.check(wav2vec2(8, layerdrop=0.1), processor, tones(1))
    with pytest.raises(ValueError, match="1000 samples a second, the model 16000"):
        other = transformers.Wav2Vec2Processor(transformers.Wav2Vec2FeatureExtractor(), processor.tokenizer)
        TASK.prepare(tones(1), other)[0]


def test_a_wav2vec2_learns(processor, train):
    losses = train(TASK, wav2vec2(len(VOCABULARY)), tones(), processor, steps=40)
    assert losses[0] > 3 and losses[-1] < 1.2
