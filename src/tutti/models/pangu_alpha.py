"""PanGu-alpha: a GPT with a query layer on top (Zeng et al. 2021, arXiv:2104.12369).

The last layer attends with an embedding of each position as its query, which asks for the token that comes next there.
As in the published code, a layer norm stands in front of the query layer and none behind it, and the number of layers
counts the query layer.

    from tutti.models.pangu_alpha import PanGuAlphaConfig, PanGuAlphaForCausalLM, config_of

    model = PanGuAlphaForCausalLM(PanGuAlphaConfig(vocab_size=500, hidden_size=64, num_hidden_layers=4))
    large = config_of("13B")
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from tutti.models.blocks import ForCausalLM, TransformerBlock, look_back, place_of

SIZES = {  # layers, width, heads: table 1 of the paper
    "350M": (24, 1024, 16),
    "2.6B": (32, 2560, 32),
    "13B": (40, 5120, 40),
    "200B": (64, 16384, 128),
}


class PanGuAlphaConfig(PreTrainedConfig):
    """Sizes of a PanGu-alpha model. num_hidden_layers: with the query layer. intermediate_size: None is 4 x width."""

    model_type = "pangu_alpha"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012

    vocab_size: int = 40000
    hidden_size: int = 256
    intermediate_size: int | None = None
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    max_position_embeddings: int = 1024
    dropout: float = 0.0
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any):
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        if self.num_hidden_layers < 1:
            raise ValueError("PanGu-alpha has at least one layer, the query layer")
        super().__post_init__(**kwargs)


class PanGuAlphaModel(nn.Module):
    """The model below the output layer."""

    def __init__(self, config: PanGuAlphaConfig):
        super().__init__()
        width, places = config.hidden_size, config.max_position_embeddings
        self.tokens = nn.Embedding(config.vocab_size, width)
        self.positions = nn.Embedding(places, width)
        self.queries = nn.Embedding(places, width)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(TransformerBlock(config, i) for i in range(config.num_hidden_layers - 1))
        self.norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.query_layer = TransformerBlock(config, config.num_hidden_layers - 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                cache: Any = None) -> Tensor:  # fmt: skip
        """input_ids: (batch, tokens) int64. Returns (batch, tokens, width)."""
        past = 0 if cache is None else cache.get_seq_length()
        places = place_of(input_ids, cache, position_ids)
        queries = input_ids.shape[1]
        mask, causal = look_back(attention_mask, queries, past + queries, input_ids.device)
        x = self.dropout(self.tokens(input_ids) + self.positions(places))
        for layer in self.layers:
            x = layer(x, mask, causal, cache)
        query = self.queries(places).expand(x.shape)
        return self.query_layer(self.norm(x), mask, causal, cache, query)


class PanGuAlphaForCausalLM(ForCausalLM):
    """PanGu-alpha with its output layer, which is tied to the embedding of tokens."""

    config_class = PanGuAlphaConfig
    _no_split_modules = ["Block"]  # noqa: RUF012

    def make(self, config: PanGuAlphaConfig) -> nn.Module:
        return PanGuAlphaModel(config)


def config_of(size: str, **options: Any) -> PanGuAlphaConfig:
    """The configuration of a published size: "350M", "2.6B", "13B" or "200B". Raises ValueError for another."""
    if size not in SIZES:
        raise ValueError(f"there is no PanGu-alpha of size {size!r}; the sizes are {', '.join(SIZES)}")
    layers, width, heads = SIZES[size]
    sizes: dict[str, Any] = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    return PanGuAlphaConfig(**(sizes | options))


AutoConfig.register("pangu_alpha", PanGuAlphaConfig)
AutoModelForCausalLM.register(PanGuAlphaConfig, PanGuAlphaForCausalLM)
