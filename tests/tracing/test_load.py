"""A model of transformers and the batch that is made for it."""

import json

import pytest
import torch
import transformers

import tutti
from tutti.tracing.load import load, suiting

SMALL = dict(hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)
IMAGES = dict(SMALL, image_size=24, patch_size=6)
TEXT = dict(SMALL, vocab_size=96, max_position_embeddings=16)


def saved(folder, config, architecture: str, **changes) -> str:
    """The file of a config."""
    path = folder / "config.json"
    text = json.loads(config.to_json_string()) | {"architectures": [architecture], **changes}
    path.write_text(json.dumps({key: value for key, value in text.items() if value is not ...}))
    return str(path)


def shapes_of(source: str) -> dict[str, tuple[int, ...]]:
    """The shapes of the batch, with which the model was captured."""
    model, batch = load(source, 3, 20)
    assert {x.device.type for x in batch.values()} == {"meta"}
    with suiting(model):
        graph = tutti.capture(model, batch)
    assert graph.outputs["loss"].meta["val"].shape == () and graph.gradient_names
    return {key: tuple(x.shape) for key, x in batch.items()}


def test_images_get_a_label_each(tmp_path):
    config = transformers.ViTConfig(**IMAGES)
    shapes = shapes_of(saved(tmp_path, config, "ViTForImageClassification"))
    assert shapes == {"pixel_values": (3, 3, 24, 24), "labels": (3,)}


def test_texts_are_scored_against_images(tmp_path):
    config = transformers.CLIPConfig(text_config=dict(TEXT, eos_token_id=95), vision_config=IMAGES, projection_dim=12)
    shapes = shapes_of(saved(tmp_path, config, "CLIPModel"))
    assert shapes == {"input_ids": (3, 16), "pixel_values": (3, 3, 24, 24)}, "there are 16 positions"


def test_speech_is_a_spectrogram(tmp_path):
    config = transformers.WhisperConfig(
        d_model=24, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=24, decoder_ffn_dim=24, vocab_size=96, max_source_positions=10, max_target_positions=8,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
    )  # fmt: skip
    shapes = shapes_of(saved(tmp_path, config, "WhisperForConditionalGeneration"))
    assert shapes == {"input_features": (3, 80, 20), "labels": (3, 8)}


def test_a_decoder_starts_with_padding_where_nothing_else_is_said(tmp_path):
    config = transformers.T5Config(d_model=24, d_kv=12, d_ff=24, num_layers=1, num_heads=2, vocab_size=96)
    source = saved(tmp_path, config, "T5ForConditionalGeneration", decoder_start_token_id=...)
    assert shapes_of(source) == {"input_ids": (3, 20), "labels": (3, 20)}
    assert load(source, 3, 20)[0].config.decoder_start_token_id == config.pad_token_id == 0


@pytest.mark.parametrize(
    ("config", "architecture", "message"),
    [
        (transformers.Swin2SRConfig(image_size=16, embed_dim=24, depths=[1], num_heads=[2], window_size=4),
         "Swin2SRForImageSuperResolution", "Swin2SRForImageSuperResolution needs labels, which cannot be generated"),
        (transformers.Wav2Vec2Config(**SMALL | {"hidden_size": 32}), "Wav2Vec2ForCTC",
         "Wav2Vec2ForCTC needs input_values, which cannot be generated"),
        (transformers.ViTConfig(**IMAGES), "ViTModel", "ViTModel takes no labels"),
        (transformers.BertConfig(**TEXT | {"max_position_embeddings": 32}), "BertForNextSentencePrediction",
         r"BertForNextSentencePrediction does not accept the generated batch \(ValueError: Expected input batch_size"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_is_one_line(tmp_path, config, architecture, message):
    with pytest.raises(ValueError, match=f"{message}.*: give package.module:function, which returns"):
        shapes_of(saved(tmp_path, config, architecture))


def test_a_mistake_of_ones_own_model_stays_what_it_is():
    with pytest.raises(AttributeError, match="mine"), suiting(torch.nn.Linear(1, 1)):
        raise AttributeError("mine")
