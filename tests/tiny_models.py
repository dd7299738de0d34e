"""Tiny models of the size of a tokenizer, for the tests of tasks."""

import diffusers
import numpy as np
import torch
import transformers


def bert(kind, tokenizer, **options):
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    defaults = {**sizes, "intermediate_size": 64, "max_position_embeddings": 32, "pad_token_id": tokenizer.pad_token_id}
    return kind(transformers.BertConfig(**(defaults | options)))


def llama(tokenizer, **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    defaults = {**sizes, "vocab_size": len(tokenizer), "max_position_embeddings": 64, "pad_token_id": None}
    tokens = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(defaults | tokens | options)))


def t5(tokenizer, **options):
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_heads": 2, "vocab_size": len(tokenizer)}
    tokens = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id,
              "decoder_start_token_id": tokenizer.pad_token_id}  # fmt: skip
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**(sizes | tokens | options)))


def colors(count, size=8):
    """Images that are red (label 0) or blue (label 1), with noise."""
    draw = np.random.default_rng(0)
    rows = []
    for i in range(count):
        image = draw.integers(0, 60, (size, size, 3)).astype(np.uint8)
        image[..., 2 * (i % 2)] += 190
        rows.append({"image": image, "label": i % 2, "text": ("red", "blue")[i % 2]})
    return rows


def image_processor(size):
    """Scales to [-1, 1]."""
    mean = [0.5, 0.5, 0.5]
    return transformers.ViTImageProcessor(size={"height": size, "width": size}, image_mean=mean, image_std=mean)


VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 8,
       "patch_size": 4}  # fmt: skip


def vit(**options):
    torch.manual_seed(0)
    return transformers.ViTForImageClassification(transformers.ViTConfig(**VIT, **options))


def mae(**options):
    torch.manual_seed(0)
    decoder = {"decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
    sizes = {**VIT, **decoder, "decoder_intermediate_size": 64, "patch_size": 2}
    return transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**(sizes | options)))


def clip(tokenizer):
    torch.manual_seed(0)
    both = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    tokens = {"vocab_size": len(tokenizer), "max_position_embeddings": 32, "eos_token_id": tokenizer.sep_token_id,
              "bos_token_id": tokenizer.cls_token_id, "pad_token_id": tokenizer.pad_token_id}  # fmt: skip
    text, vision = {**both, **tokens}, {**both, "image_size": 8, "patch_size": 4}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


def unet(kind="UNet2DModel", channels=3, size=8, **options):
    torch.manual_seed(0)
    blocks = {"block_out_channels": (16, 16), "layers_per_block": 1, "norm_num_groups": 4, "attention_head_dim": 8}
    if kind == "UNet2DModel":
        types = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    else:
        types = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
                 "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")}  # fmt: skip
    return getattr(diffusers, kind)(
        sample_size=size, in_channels=channels, out_channels=channels, **(blocks | types | options)
    )


WAV2VEC2 = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
            "conv_dim": (16, 16), "conv_kernel": (10, 4), "conv_stride": (5, 4), "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer"}  # fmt: skip


VOCABULARY = ["<pad>", "<s>", "</s>", "<unk>", "|", "a", "b", "c"]


def tones(count=8):
    """Rows of speech: each letter is 100 samples of a tone of its own."""
    draw, rows = np.random.default_rng(0), []
    for i in range(count):
        text = "".join(draw.permutation(list("abc"))[: 2 + i % 2])
        waves = [np.sin(np.arange(100) * (0.2 + 0.5 * "abc".index(letter))) for letter in text]
        rows.append({"audio": {"array": np.concatenate(waves), "sampling_rate": 1000}, "text": text})
    return rows


def wav2vec2(vocabulary, **options):
    torch.manual_seed(0)
    plain = {"apply_spec_augment": False, "layerdrop": 0.0, "vocab_size": vocabulary, "pad_token_id": 0}
    return transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**(WAV2VEC2 | plain | options))).train()


def wav2vec2_pretraining(**options):
    torch.manual_seed(0)
    sizes = {**WAV2VEC2, "num_codevectors_per_group": 8, "codevector_dim": 16, "proj_codevector_dim": 16}
    plain = {"layerdrop": 0.0, "apply_spec_augment": True, "mask_feature_prob": 0.0}
    return transformers.Wav2Vec2ForPreTraining(transformers.Wav2Vec2Config(**(sizes | plain | options))).train()
