"""Tiny models of every family with their own losses: what the operator rules are held against.

Most come from `transformers` and `diffusers`; the rest are a few lines of plain torch. Dims divide by 2 and 3, so that
meshes of 2, 3, 4, 6 and 8 devices find something to split.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from tutti.nn import MoE

transformers.logging.set_verbosity_error()

BATCH, LENGTH, VOCABULARY = 12, 16, 96
Case = tuple[nn.Module, dict[str, Tensor], Callable | None]  # model, batch, loss

TEXT = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=6, vocab_size=VOCABULARY)


def random(*shape: int, seed: int = 1) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(*shape: int, below: int, seed: int = 1) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


def tokens(**more: Tensor) -> dict[str, Tensor]:
    """Token ids with labels, of which some are ignored."""
    ids = integers(BATCH, LENGTH, below=VOCABULARY)
    labels = ids.clone()
    for row in range(BATCH):
        labels[row, : row % 5] = -100
    return {"input_ids": ids, "labels": labels, **more}


def images(size: int, channels: int = 3, seed: int = 2) -> Tensor:
    return random(BATCH, channels, size, size, seed=seed)


def mean_squared(prediction: str, target: str) -> Callable:
    """The loss of a model that is called with all of the batch but the target."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        output = model(**{k: v for k, v in batch.items() if k != target})
        return F.mse_loss(getattr(output, prediction) if prediction else output, batch[target])

    return loss


def gpt2() -> Case:
    config = transformers.GPT2Config(
        n_embd=48, n_layer=2, n_head=6, vocab_size=VOCABULARY, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    config.loss_type = "ForCausalLM"
    return transformers.GPT2LMHeadModel(config), tokens(), None


def llama() -> Case:
    config = transformers.LlamaConfig(**TEXT, num_key_value_heads=3, intermediate_size=96)
    return transformers.LlamaForCausalLM(config), tokens(), None


def qwen3() -> Case:
    config = transformers.Qwen3Config(**TEXT, num_key_value_heads=2, head_dim=12, intermediate_size=96)
    return transformers.Qwen3ForCausalLM(config), tokens(), None


def gemma2() -> Case:
    """Soft caps on scores and logits, tied embeddings, a sliding window in every other layer."""
    config = transformers.Gemma2Config(
        **TEXT, num_key_value_heads=3, head_dim=8, intermediate_size=96, sliding_window=8
    )
    return transformers.Gemma2ForCausalLM(config), tokens(), None


def bert() -> Case:
    config = transformers.BertConfig(**TEXT, intermediate_size=96, max_position_embeddings=32)
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[::3, -4:] = 0
    return transformers.BertForMaskedLM(config), tokens(attention_mask=mask), None


def t5() -> Case:
    """Encoder and decoder with relative position bias."""
    config = transformers.T5Config(
        d_model=48, d_kv=8, d_ff=96, num_layers=2, num_heads=6, vocab_size=VOCABULARY, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config), tokens(), None


def vit() -> Case:
    config = transformers.ViTConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=6, intermediate_size=96, image_size=24, patch_size=6
    )
    config.num_labels = 12
    batch = {"pixel_values": images(24), "labels": integers(BATCH, below=12)}
    return transformers.ViTForImageClassification(config), batch, None


def clip() -> Case:
    """Contrastive loss: every image against every text of the global batch."""
    text = dict(TEXT, intermediate_size=96, max_position_embeddings=32, eos_token_id=95)
    vision = dict(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=6, intermediate_size=96, image_size=24, patch_size=6
    )
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)
    batch = {"input_ids": tokens()["input_ids"], "pixel_values": images(24)}
    return transformers.CLIPModel(config), batch, lambda model, b: model(**b, return_loss=True).loss


def mixtral() -> Case:
    config = transformers.MixtralConfig(
        **TEXT, num_key_value_heads=3, intermediate_size=48, num_local_experts=6, output_router_logits=True
    )
    return transformers.MixtralForCausalLM(config), tokens(), None


def qwen3_moe() -> Case:
    config = transformers.Qwen3MoeConfig(
        **TEXT, num_key_value_heads=3, head_dim=8, intermediate_size=96, moe_intermediate_size=24,
        num_experts=6, num_experts_per_tok=2, decoder_sparse_step=1, norm_topk_prob=True,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config), tokens(), None


def deepseek() -> Case:
    """Latent attention, groups of experts, a sigmoid router and shared experts; the first layer is dense."""
    config = transformers.DeepseekV3Config(
        **TEXT, num_key_value_heads=6, intermediate_size=96, moe_intermediate_size=24, n_routed_experts=6,
        num_experts_per_tok=2, n_group=3, topk_group=2, n_shared_experts=2, first_k_dense_replace=1, q_lora_rank=24,
        kv_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config), tokens(), None


class Mixture(nn.Module):
    """Two layers of experts, the second with a capacity, shared experts and a bias that balances; auxiliary losses."""

    def __init__(self, width: int = 24):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            [
                MoE(width, 12, 6, 2),
                MoE(width, 12, 6, 2, capacity_factor=0.75, shared=1, scores="sigmoid", bias_update=0.01),
            ]
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, loss = self.embed(input_ids), torch.zeros(())
        for layer in self.layers:
            y, aux = layer(x)
            x, loss = x + y, loss + 0.01 * aux.balance + 0.001 * aux.z
        return loss + F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def mixture() -> Case:
    return Mixture(), tokens(), None


def swin2sr() -> Case:
    config = transformers.Swin2SRConfig(
        image_size=16, embed_dim=24, depths=[2, 2], num_heads=[2, 2], window_size=4, upscale=2, num_channels=3
    )
    batch = {"pixel_values": images(16), "target": images(32, seed=3)}
    return transformers.Swin2SRForImageSuperResolution(config), batch, mean_squared("reconstruction", "target")


def unet2d() -> Case:
    import diffusers

    model = diffusers.UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(24, 48),
        norm_num_groups=6, attention_head_dim=8, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    batch = {"sample": images(16), "timestep": integers(BATCH, below=1000), "noise": images(16, seed=3)}
    return model, batch, mean_squared("sample", "noise")


class EDSR(nn.Module):
    """Enhanced deep super-resolution (Lim et al. 2017): residual blocks without norms, pixel shuffle."""

    def __init__(self, width: int = 24, blocks: int = 2, scale: int = 2):
        super().__init__()
        self.head = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))
            for _ in range(blocks)
        )
        self.up = nn.Sequential(nn.Conv2d(width, width * scale**2, 3, padding=1), nn.PixelShuffle(scale))
        self.tail = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        """(batch, 3, height, width) -> (batch, 3, scale x height, scale x width)"""
        x = y = self.head(image)
        for block in self.body:
            y = y + 0.1 * block(y)
        return self.tail(self.up(x + y))


def edsr() -> Case:
    return EDSR(), {"image": images(24), "target": images(48, seed=3)}, mean_squared("", "target")


def resnet() -> Case:
    """ResNet-50's bottleneck blocks with batch norm, in training mode."""
    config = transformers.ResNetConfig(
        embedding_size=12, hidden_sizes=[24, 48], depths=[2, 1], layer_type="bottleneck", num_labels=12
    )
    batch = {"pixel_values": images(24), "labels": integers(BATCH, below=12)}
    return transformers.ResNetForImageClassification(config), batch, None


class DLRM(nn.Module):
    """Deep learning recommendation model (Naumov et al. 2019): embedding bags, dot interactions, two MLPs."""

    def __init__(self, rows: tuple[int, ...] = (96, 48, 24), width: int = 12, dense: int = 6):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, width, mode="sum") for n in rows)
        self.bottom = nn.Sequential(nn.Linear(dense, 24), nn.ReLU(), nn.Linear(24, width), nn.ReLU())
        pairs = (len(rows) + 1) * len(rows) // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """dense: (batch, dense); sparse: (batch, tables, bag) int64. Returns (batch,) logits."""
        x = self.bottom(dense)
        vectors = torch.stack([x, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], 1)
        i, j = torch.tril_indices(vectors.shape[1], vectors.shape[1], -1)
        dots = (vectors @ vectors.transpose(1, 2))[:, i, j]
        return self.top(torch.cat([x, dots], 1)).squeeze(1)


def dlrm() -> Case:
    sparse = torch.stack([integers(BATCH, 4, below=n, seed=n) for n in (96, 48, 24)], 1)
    batch = {"dense": random(BATCH, 6), "sparse": sparse, "clicked": integers(BATCH, below=2).float()}

    def loss(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(b["dense"], b["sparse"]), b["clicked"])

    return DLRM(), batch, loss


def mamba() -> Case:
    """A selective state space; the scan over the sequence is unrolled."""
    config = transformers.MambaConfig(
        hidden_size=24, state_size=4, num_hidden_layers=2, vocab_size=VOCABULARY, time_step_rank=6
    )
    return transformers.MambaForCausalLM(config), tokens(), None


class Tagger(nn.Module):
    """A two-layer LSTM that labels every token."""

    def __init__(self, width: int = 24, classes: int = 12):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, classes)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        states, _ = self.lstm(self.embed(input_ids))
        return F.cross_entropy(self.head(states).flatten(0, 1), labels.flatten())


def lstm() -> Case:
    return Tagger(), {"input_ids": tokens()["input_ids"], "labels": integers(BATCH, LENGTH, below=12)}, None


MODELS: dict[str, Callable[[], Case]] = {
    make.__name__: make
    for make in (gpt2, llama, qwen3, gemma2, bert, t5, vit, clip, mixtral, qwen3_moe, deepseek, mixture, swin2sr, edsr,
                 unet2d, resnet, dlrm, mamba, lstm)
}  # fmt: skip


def case(name: str, seed: int = 0) -> Case:
    """A model in training mode with random weights, its batch and its loss (None where the model computes it)."""
    torch.manual_seed(seed)
    model, batch, loss = MODELS[name]()
    return model.train(), batch, loss
