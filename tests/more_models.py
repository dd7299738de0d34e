"""Tiny models of families that `models` lacks, called as their libraries document it.

From `transformers`, `diffusers` and `peft`; those in plain torch are in `torch_models`. Dropout and random masking are
off, so that plain PyTorch computes the same numbers. Dims divide by 2 and 3.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import torch_models
from models import BATCH, LENGTH, VOCABULARY, Case, images, integers, mean_squared, random, tokens

TEXT = dict(
    hidden_size=48, num_hidden_layers=2, num_attention_heads=6, intermediate_size=96, vocab_size=VOCABULARY,
    max_position_embeddings=32, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
VISION = dict(
    hidden_size=48, num_hidden_layers=2, num_attention_heads=6, intermediate_size=96, image_size=24, patch_size=6
)
SEQ2SEQ = dict(
    d_model=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=6, decoder_attention_heads=6,
    encoder_ffn_dim=96, decoder_ffn_dim=96, vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    decoder_start_token_id=1, forced_eos_token_id=None,
)  # fmt: skip


def quiet(config: Any) -> Any:
    """The config with every dropout rate at zero."""
    for name, value in vars(config).items():
        if isinstance(value, transformers.PreTrainedConfig):
            quiet(value)
        elif isinstance(value, float) and ("drop" in name or "pdrop" in name):
            setattr(config, name, 0.0)
    return config


def build(kind: str, head: str, **options: Any) -> nn.Module:
    """`{kind}{head}` of transformers for these options of its config."""
    labels = options.pop("num_labels", None)
    config = quiet(getattr(transformers, f"{kind}Config")(**options))
    kind = kind.removesuffix("Text")
    if labels:
        config.num_labels = labels
    return getattr(transformers, f"{kind}{head}")(config)


def causal(kind: str, head: str = "ForCausalLM", **options: Any) -> Case:
    return build(kind, head, **options), tokens(), None


def padded(kind: str, head: str = "ForMaskedLM", **options: Any) -> Case:
    """With an attention mask that hides the end of some rows."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[::3, -4:] = 0
    labels = integers(BATCH, LENGTH, below=VOCABULARY, seed=5)
    return build(kind, head, **options), tokens(attention_mask=mask) | {"labels": labels}, None


def translation(kind: str, **options: Any) -> Case:
    ids = integers(BATCH, LENGTH, below=VOCABULARY, seed=3)
    labels = integers(BATCH, 12, below=VOCABULARY, seed=4)
    labels[::3, -3:] = -100
    return build(kind, "ForConditionalGeneration", **options), {"input_ids": ids, "labels": labels}, None


def classified(kind: str, head: str = "ForImageClassification", size: int = 24, **options: Any) -> Case:
    batch = {"pixel_values": images(size), "labels": integers(BATCH, below=12)}
    return build(kind, head, num_labels=12, **options), batch, None


# ---- language models ----------------------------------------------------------------------------------------------

GQA = dict(TEXT, num_key_value_heads=3)

CAUSAL: dict[str, Callable[[], Case]] = {
    "opt": partial(
        causal, "OPT", ffn_dim=96, word_embed_proj_dim=48, **{k: v for k, v in TEXT.items() if k != "intermediate_size"}
    ),
    "bloom": partial(causal, "Bloom", hidden_size=48, n_layer=2, n_head=6, vocab_size=VOCABULARY),
    "falcon": partial(causal, "Falcon", **dict(TEXT, num_kv_heads=3, new_decoder_architecture=True)),
    "phi": partial(causal, "Phi", **TEXT),
    "gemma3": partial(causal, "Gemma3Text", **dict(GQA, head_dim=8, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"])),
    "stablelm": partial(causal, "StableLm", **GQA),
    "gpt_neox": partial(causal, "GPTNeoX", **TEXT),
    "gptj": partial(causal, "GPTJ", n_embd=48, n_layer=2, n_head=6, rotary_dim=4, vocab_size=VOCABULARY, n_positions=32,
                    bos_token_id=1, eos_token_id=2),
    "olmo2": partial(causal, "Olmo2", **GQA),
    "granite": partial(causal, "Granite", **GQA),
    "gpt_oss": partial(causal, "GptOss", **dict(GQA, head_dim=8, num_local_experts=6, num_experts_per_tok=2,
        sliding_window=8)),
    "deepseek_v2": partial(causal, "DeepseekV2", **dict(TEXT, num_key_value_heads=6, moe_intermediate_size=24,
        n_routed_experts=6,
        num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=2, first_k_dense_replace=1, q_lora_rank=24,
        kv_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8)),
    "qwen3_next": partial(causal, "Qwen3Next", **dict(GQA, head_dim=8, linear_num_value_heads=6, linear_num_key_heads=3,
        linear_key_head_dim=8, linear_value_head_dim=8, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24,
        shared_expert_intermediate_size=24, layer_types=["linear_attention", "full_attention"])),
    "mamba2": partial(causal, "Mamba2", hidden_size=24, num_hidden_layers=2, vocab_size=VOCABULARY, state_size=6,
        num_heads=6, head_dim=8, n_groups=2, chunk_size=8, expand=2, bos_token_id=1, eos_token_id=2, pad_token_id=0),
    "rwkv": partial(causal, "Rwkv", hidden_size=24, attention_hidden_size=24, num_hidden_layers=2,
        vocab_size=VOCABULARY,
        intermediate_size=48, context_length=32, bos_token_id=1, eos_token_id=2),
    "jamba": partial(causal, "Jamba", **dict(GQA, num_experts=6, num_experts_per_tok=2, mamba_d_state=4,
        mamba_dt_rank=6,
        attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
        use_mamba_kernels=False)),
    "xlnet": partial(causal, "XLNet", "LMHeadModel", d_model=48, n_layer=2, n_head=6, d_inner=96,
        vocab_size=VOCABULARY),
}  # fmt: skip

MASKED: dict[str, Callable[[], Case]] = {
    "roberta": partial(padded, "Roberta", **dict(TEXT, pad_token_id=1)),
    "deberta_v2": partial(padded, "DebertaV2", **dict(TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"],
                          position_buckets=8, max_relative_positions=16, share_att_key=True)),
    "albert": partial(padded, "Albert", embedding_size=24, **TEXT),
    "funnel": partial(padded, "Funnel", vocab_size=VOCABULARY, block_sizes=[1, 1], num_decoder_layers=1, d_model=48,
        n_head=6,
                      d_head=8, d_inner=96),
    "big_bird": partial(padded, "BigBird", **dict(TEXT, block_size=2, num_random_blocks=1)),
    "distilbert": partial(padded, "DistilBert", dim=48, n_layers=2, n_heads=6, hidden_dim=96, vocab_size=VOCABULARY,
                          max_position_embeddings=32),
    "longformer": partial(padded, "Longformer", **dict(TEXT, attention_window=[4, 4], max_position_embeddings=40)),
    "perceiver": partial(padded, "Perceiver", vocab_size=VOCABULARY, max_position_embeddings=LENGTH, d_model=24,
        d_latents=48,
                         num_latents=12, num_self_attends_per_block=2, num_self_attention_heads=6,
                         num_cross_attention_heads=6, qk_channels=24, v_channels=48),
}  # fmt: skip

TRANSLATION: dict[str, Callable[[], Case]] = {
    "bart": partial(translation, "Bart", max_position_embeddings=32, **SEQ2SEQ),
    "pegasus": partial(translation, "Pegasus", max_position_embeddings=32, **SEQ2SEQ),
    "mbart": partial(translation, "MBart", max_position_embeddings=32, **SEQ2SEQ),
}


def electra() -> Case:
    """Which tokens were replaced: a binary label each."""
    batch = {"input_ids": tokens()["input_ids"], "labels": integers(BATCH, LENGTH, below=2)}
    return build("Electra", "ForPreTraining", embedding_size=24, **TEXT), batch, None


def lora() -> Case:
    """A frozen GPT-2 with low-rank adapters by `peft`."""
    import peft

    config = transformers.GPT2Config(
        n_embd=48, n_layer=2, n_head=6, vocab_size=VOCABULARY, n_positions=32, bos_token_id=0, eos_token_id=0,
        loss_type="ForCausalLM",
    )  # fmt: skip
    options = peft.LoraConfig(
        r=6, lora_alpha=12, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, init_lora_weights=False
    )
    return peft.get_peft_model(transformers.GPT2LMHeadModel(quiet(config)), options), tokens(), None


# ---- audio --------------------------------------------------------------------------------------------------------

SPEECH = dict(
    {k: v for k, v in TEXT.items() if k != "max_position_embeddings"}, conv_dim=(24, 24), conv_kernel=(10, 3),
    conv_stride=(5, 2), num_feat_extract_layers=2, num_conv_pos_embeddings=6, num_conv_pos_embedding_groups=6,
    mask_time_prob=0.0,
)  # fmt: skip


def whisper() -> Case:
    model = build("Whisper", "ForConditionalGeneration", num_mel_bins=24, max_source_positions=12,
                  max_target_positions=32, **SEQ2SEQ)  # fmt: skip
    return model, {"input_features": random(BATCH, 24, 24), "labels": integers(BATCH, 12, below=VOCABULARY)}, None


def wav2vec2() -> Case:
    """Connectionist temporal classification; labels of several lengths."""
    labels = integers(BATCH, 6, below=VOCABULARY - 1) + 1
    labels[::3, 4:] = -100
    model = build("Wav2Vec2", "ForCTC", ctc_loss_reduction="mean", **SPEECH)
    return model, {"input_values": random(BATCH, 305), "labels": labels}, None


def hubert() -> Case:
    batch = {"input_values": random(BATCH, 305), "labels": integers(BATCH, below=12)}
    return build("Hubert", "ForSequenceClassification", num_labels=12, **SPEECH), batch, None


# ---- images and video ---------------------------------------------------------------------------------------------

VISUAL: dict[str, Callable[[], Case]] = {
    "beit": partial(classified, "Beit", **VISION, use_relative_position_bias=True),
    "dinov2": partial(classified, "Dinov2", **{k: v for k, v in VISION.items() if k != "intermediate_size"},
        mlp_ratio=2),
    "swin": partial(classified, "Swin", image_size=24, patch_size=2, embed_dim=24, depths=[2, 2], num_heads=[2, 6],
                    window_size=3),
    "convnext": partial(classified, "ConvNext", size=48, depths=[2, 1], hidden_sizes=[24, 48], num_stages=2),
}  # fmt: skip


def vit_mae() -> Case:
    """A masked autoencoder whose noise comes with the batch."""
    model = build("ViTMAE", "ForPreTraining", decoder_hidden_size=24, decoder_num_hidden_layers=1,
                  decoder_num_attention_heads=6, decoder_intermediate_size=48, **VISION)  # fmt: skip
    return model, {"pixel_values": images(24), "noise": random(BATCH, 16).sigmoid()}, None


def segformer() -> Case:
    model = build(
        "Segformer", "ForSemanticSegmentation", num_labels=12, depths=[1, 1], hidden_sizes=[12, 24],
        num_encoder_blocks=2,
        sr_ratios=[2, 1], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[2, 6], mlp_ratios=[2, 2],
        decoder_hidden_size=24,
    )  # fmt: skip
    return model, {"pixel_values": images(24), "labels": integers(BATCH, 24, 24, below=12)}, None


def resnet_config() -> Any:
    return transformers.ResNetConfig(
        embedding_size=12, hidden_sizes=[12, 24], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )


def boxes(image: int) -> dict[str, Tensor]:
    """One to three objects of an image."""
    n = image % 3 + 1
    corner = integers(n, 2, below=1000, seed=image) / 2000 + 0.25
    return {"class_labels": integers(n, below=12, seed=image), "boxes": torch.cat([corner, corner / 2], 1)}


def detr() -> Case:
    """Detection: the objects of an image are matched with predictions (SciPy's linear_sum_assignment)."""
    model = build(
        "Detr", "ForObjectDetection", num_labels=12, num_queries=6, use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None, backbone_config=resnet_config(), auxiliary_loss=True,
        **{k: v for k, v in SEQ2SEQ.items() if k not in ("vocab_size", "decoder_start_token_id",
        "forced_eos_token_id")},
    )  # fmt: skip
    return model, {"pixel_values": images(48), "labels": [boxes(i) for i in range(BATCH)]}, None


def mask2former() -> Case:
    backbone = transformers.SwinConfig(
        image_size=48,
        patch_size=2,
        embed_dim=12,
        depths=[1, 1, 1, 1],
        num_heads=[2, 2, 2, 2],
        window_size=3,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = transformers.Mask2FormerConfig(
        backbone_config=backbone,
        feature_size=96,
        mask_feature_size=96,
        hidden_dim=96,
        encoder_feedforward_dim=48,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=6,
        dim_feedforward=48,
        num_queries=6,
        train_num_points=24,
    )
    config.num_labels = 12
    model = transformers.Mask2FormerForUniversalSegmentation(quiet(config))
    masks = [(integers(2, 48, 48, below=2, seed=i)).float() for i in range(BATCH)]
    return (
        model,
        {
            "pixel_values": images(48),
            "mask_labels": masks,
            "class_labels": [integers(2, below=12, seed=i) for i in range(BATCH)],
        },
        None,
    )


def timesformer() -> Case:
    batch = {"pixel_values": random(BATCH, 3, 3, 24, 24), "labels": integers(BATCH, below=12)}
    return build("Timesformer", "ForVideoClassification", num_labels=12, num_frames=3, **VISION), batch, None


# ---- images with text ---------------------------------------------------------------------------------------------


def with_images(marker: int, count: int, length: int = LENGTH) -> dict[str, Tensor]:
    """Token ids of which the second and following ones stand for an image."""
    ids = integers(BATCH, length, below=VOCABULARY - 12)
    ids[:, 1 : 1 + count] = marker
    labels = ids.clone()
    labels[:, : 1 + count] = -100
    return {"input_ids": ids, "labels": labels}


def qwen2_vl() -> Case:
    text = dict(
        TEXT,
        num_key_value_heads=3,
        rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
    )
    vision = dict(depth=2, embed_dim=24, hidden_size=48, num_heads=6, mlp_ratio=2, patch_size=4, spatial_merge_size=2)
    config = transformers.Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=95,
        video_token_id=94,
        vision_start_token_id=93,
        vision_end_token_id=92,
    )
    batch = with_images(95, 4)
    batch["input_ids"][:, 0] = 93
    grid = torch.tensor([[1, 4, 4]] * BATCH)
    batch |= {"pixel_values": random(BATCH * 16, 3 * 2 * 4 * 4), "image_grid_thw": grid}
    batch["mm_token_type_ids"] = (batch["input_ids"] == 95).to(torch.int64)
    return transformers.Qwen2VLForConditionalGeneration(quiet(config)), batch, None


def llava() -> Case:
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**GQA), vision_config=transformers.CLIPVisionConfig(**VISION),
        image_token_id=95, vision_feature_layer=-2,
    )  # fmt: skip
    batch = with_images(95, 16, 24) | {"pixel_values": images(24)}
    return transformers.LlavaForConditionalGeneration(quiet(config)), batch, None


def smolvlm() -> Case:
    config = transformers.SmolVLMConfig(
        text_config=dict(GQA, model_type="llama"),
        vision_config=VISION,
        image_token_id=95,
        scale_factor=2,
        pad_token_id=0,
    )
    batch = with_images(95, 4) | {"pixel_values": images(24)[:, None]}
    return transformers.SmolVLMForConditionalGeneration(quiet(config)), batch, None


def blip() -> Case:
    text = dict(TEXT, max_position_embeddings=32, encoder_hidden_size=48)
    config = transformers.BlipConfig(
        text_config=text, vision_config=VISION, projection_dim=24, image_text_hidden_size=24
    )
    batch = {"pixel_values": images(24), **tokens()}
    return transformers.BlipForConditionalGeneration(quiet(config)), batch, None


def siglip() -> Case:
    """Every image against every text of the global batch, each pair by itself."""
    config = transformers.SiglipConfig(text_config=dict(TEXT, projection_size=48), vision_config=VISION)
    batch = {"input_ids": tokens()["input_ids"], "pixel_values": images(24)}
    return transformers.SiglipModel(quiet(config)), batch, lambda model, b: model(**b, return_loss=True).loss


# ---- time series --------------------------------------------------------------------------------------------------


def patch_tst() -> Case:
    model = build(
        "PatchTST", "ForPrediction", num_input_channels=3, context_length=24, patch_length=6, patch_stride=6,
        prediction_length=6, d_model=24, num_attention_heads=6, num_hidden_layers=2, ffn_dim=48, loss="mse",
    )  # fmt: skip
    return model, {"past_values": random(BATCH, 24, 3), "future_values": random(BATCH, 6, 3, seed=2)}, None


def series(kind: str) -> Case:
    model = build(
        kind, "ForPrediction", prediction_length=6, context_length=12, lags_sequence=[1, 2], num_time_features=2,
        d_model=24, encoder_attention_heads=6, decoder_attention_heads=6, encoder_layers=1, decoder_layers=1,
        encoder_ffn_dim=48, decoder_ffn_dim=48,
    )  # fmt: skip
    batch = {
        "past_values": random(BATCH, 14), "past_time_features": random(BATCH, 14, 2, seed=2),
        "past_observed_mask": torch.ones(BATCH, 14), "future_values": random(BATCH, 6, seed=3),
        "future_time_features": random(BATCH, 6, 2, seed=4),
    }  # fmt: skip
    return model, batch, None


# ---- diffusion ----------------------------------------------------------------------------------------------------


def dit() -> Case:
    import diffusers

    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=3, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2, sample_size=12,
        patch_size=2, num_embeds_ada_norm=12, norm_num_groups=2,
    )  # fmt: skip
    for module in model.modules():
        if hasattr(module, "dropout_prob"):  # of classes
            module.dropout_prob = 0.0
    batch = {
        "hidden_states": images(12, 4), "timestep": integers(BATCH, below=12), "class_labels": integers(BATCH,
        below=12),
        "noise": images(12, 4, seed=3),
    }  # fmt: skip
    return model, batch, mean_squared("sample", "noise")


def autoencoder_kl() -> Case:
    import diffusers

    model = diffusers.AutoencoderKL(
        block_out_channels=(12, 24), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4, norm_num_groups=6, sample_size=24,
    )  # fmt: skip

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        posterior = model.encode(batch["image"]).latent_dist
        latent = posterior.mean + posterior.std * batch["noise"]
        return F.mse_loss(model.decode(latent).sample, batch["image"]) + 1e-3 * posterior.kl().mean()

    return model, {"image": images(24), "noise": images(12, 4, seed=3)}, loss


def unet2d_condition() -> Case:
    import diffusers

    model = diffusers.UNet2DConditionModel(
        sample_size=12, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(12, 24),
        norm_num_groups=6, cross_attention_dim=24, attention_head_dim=6,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    batch = {
        "sample": images(12, 4), "timestep": integers(BATCH, below=1000), "encoder_hidden_states": random(BATCH, 6, 24),
        "noise": images(12, 4, seed=3),
    }  # fmt: skip
    return model, batch, mean_squared("sample", "noise")


MODELS: dict[str, Callable[[], Case]] = {
    **CAUSAL, **MASKED, **TRANSLATION, **VISUAL,
    **{make.__name__: make for make in (
        electra, lora, whisper, wav2vec2, hubert, vit_mae, segformer, detr, mask2former, timesformer, qwen2_vl, llava,
        smolvlm, blip, siglip, patch_tst, dit, autoencoder_kl, unet2d_condition,
    )},
    "informer": partial(series, "Informer"),
    "autoformer": partial(series, "Autoformer"),
    **torch_models.MODELS,
}  # fmt: skip


def case(name: str, seed: int = 0) -> Case:
    """A model in training mode with random weights, its batch and its loss (None where the model computes it)."""
    torch.manual_seed(seed)
    model, batch, loss = MODELS[name]()
    return model.train(), batch, loss
