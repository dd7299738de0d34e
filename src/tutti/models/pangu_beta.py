"""An encoder-decoder in the style of PanGu-beta: one embedding for all, a masked-LM head on the encoder, generation.

Encoder, decoder, the decoder's output layer and the masked-LM head share one embedding of tokens. The encoder is
trained with masked language modelling and serves understanding (classifiers, cloze questions); encoder and decoder
together generate. One saved model serves all classes:

    from tutti.models.pangu_beta import PanGuBetaConfig, PanGuBetaForConditionalGeneration, PanGuBetaForMaskedLM

    masked = PanGuBetaForMaskedLM(PanGuBetaConfig(vocab_size=500))
    masked.save_pretrained("pretrained")
    model = PanGuBetaForConditionalGeneration.from_pretrained("pretrained")  # the decoder is new
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    DynamicCache,
    EncoderDecoderCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    Seq2SeqLMOutput,
    SequenceClassifierOutput,
)

from tutti.models.blocks import CACHE, TransformerBlock, look_around, look_back, place_of


class PanGuBetaConfig(PreTrainedConfig):
    """Sizes of a model. num_hidden_layers: number of layers of the encoder. decoder_start_token_id: token that the
    decoder begins with; None is the padding token."""

    model_type = "pangu_beta"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012

    vocab_size: int = 40000
    hidden_size: int = 256
    intermediate_size: int = 1024
    num_hidden_layers: int = 4
    num_decoder_layers: int = 4
    num_attention_heads: int = 4
    max_position_embeddings: int = 512
    dropout: float = 0.0
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    use_cache: bool = True
    is_encoder_decoder: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    decoder_start_token_id: int | None = None

    def __post_init__(self, **kwargs: Any):
        if self.decoder_start_token_id is None:
            self.decoder_start_token_id = self.pad_token_id
        super().__post_init__(**kwargs)


class Stack(nn.Module):
    """Blocks with positions in front and a layer norm behind. A decoder looks at an encoder's output and back only."""

    def __init__(self, config: PanGuBetaConfig, decoder: bool = False):
        super().__init__()
        width, layers = config.hidden_size, config.num_decoder_layers if decoder else config.num_hidden_layers
        self.positions = nn.Embedding(config.max_position_embeddings, width)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(TransformerBlock(config, i, decoder) for i in range(layers))
        self.norm = nn.LayerNorm(width, config.layer_norm_eps)


class PanGuBetaPreTrainedModel(PreTrainedModel):
    """Base of the classes with this configuration. Those without a decoder say so in their copy of it."""

    has_decoder = False
    config_class = PanGuBetaConfig
    base_model_prefix = "model"
    _no_split_modules = ["Block"]  # noqa: RUF012
    _keys_to_ignore_on_load_unexpected = [r"decoder", r"head\."]  # noqa: RUF012

    def __init__(self, config: PanGuBetaConfig):
        config = copy.deepcopy(config)
        config.is_encoder_decoder = self.has_decoder
        super().__init__(config)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, MaskedHead):
            nn.init.zeros_(module.bias)


class PanGuBetaEncoder(PanGuBetaPreTrainedModel):
    """The shared embedding and the encoder."""

    def __init__(self, config: PanGuBetaConfig):
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.encoder = Stack(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.tokens = value

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> BaseModelOutput:
        """input_ids: (batch, tokens) int64. attention_mask: (batch, tokens), 0 at padding."""
        stack, mask = self.encoder, look_around(attention_mask)
        x = stack.dropout(self.tokens(input_ids) + stack.positions(place_of(input_ids, None)))
        for layer in stack.layers:
            x = layer(x, mask)
        return BaseModelOutput(last_hidden_state=stack.norm(x))


class PanGuBetaModel(PanGuBetaEncoder):
    """The shared embedding, the encoder and the decoder."""

    has_decoder = True
    _keys_to_ignore_on_load_unexpected = [r"head\."]  # noqa: RUF012

    def __init__(self, config: PanGuBetaConfig):
        super().__init__(config)
        self.decoder = Stack(config, decoder=True)
        self.post_init()

    def decode(self, ids: Tensor, mask: Tensor | None, encoded: Tensor, encoded_mask: Tensor | None,
               cache: Any = None) -> Tensor:  # fmt: skip
        """ids: tokens of the decoder, (batch, tokens) int64. Returns (batch, tokens, width)."""
        stack, past = self.decoder, 0 if cache is None else cache.get_seq_length()
        look, causal = look_back(mask, ids.shape[1], past + ids.shape[1], ids.device)
        around = look_around(encoded_mask)
        x = stack.dropout(self.tokens(ids) + stack.positions(place_of(ids, cache)))
        for layer in stack.layers:
            x = layer(x, look, causal, cache, encoded=encoded, encoded_mask=around)
        return stack.norm(x)


class MaskedHead(nn.Module):
    """Linear, GELU, layer norm; then the embedding of tokens, and a bias."""

    def __init__(self, config: PanGuBetaConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """x: (batch, tokens, width). tokens: (vocabulary, width). Returns logits, (batch, tokens, vocabulary)."""
        return nn.functional.linear(self.norm(nn.functional.gelu(self.dense(x))), tokens, self.bias)


class PanGuBetaForMaskedLM(PanGuBetaPreTrainedModel):
    """The encoder with the masked-LM head."""

    _keys_to_ignore_on_load_unexpected = [r"decoder", r"classifier"]  # noqa: RUF012

    def __init__(self, config: PanGuBetaConfig):
        super().__init__(config)
        self.model = PanGuBetaEncoder(config)
        self.masked_head = MaskedHead(config)
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None,
                num_items_in_batch: Tensor | None = None, **_: Any) -> MaskedLMOutput:  # fmt: skip
        """labels: (batch, tokens) int64, -100 where there is no loss. Logits: (batch, tokens, vocabulary)."""
        hidden = self.model(input_ids, attention_mask).last_hidden_state
        logits = self.masked_head(hidden, self.model.tokens.weight)
        loss = None if labels is None else token_loss(logits, labels, num_items_in_batch)
        return MaskedLMOutput(loss=loss, logits=logits)


class PanGuBetaForSequenceClassification(PanGuBetaPreTrainedModel):
    """The encoder with a classifier that reads the first token."""

    _keys_to_ignore_on_load_unexpected = [r"decoder", r"masked_head"]  # noqa: RUF012
    accepts_loss_kwargs = False

    def __init__(self, config: PanGuBetaConfig):
        super().__init__(config)
        self.model = PanGuBetaEncoder(config)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels or 2)
        self.post_init()

    def forward(self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
                labels: Tensor | None = None, **_: Any) -> SequenceClassifierOutput:  # fmt: skip
        """labels: (batch,) int64. Logits: (batch, num_labels)."""
        first = self.model(input_ids, attention_mask).last_hidden_state[:, 0]
        logits = self.classifier(torch.tanh(self.dense(first)))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


class PanGuBetaForConditionalGeneration(PanGuBetaPreTrainedModel, GenerationMixin):
    """Encoder and decoder. With `masked_tokens`, the loss of the masked-LM head on the encoder is added.

    The output layer is the embedding of tokens.
    """

    has_decoder = True
    _keys_to_ignore_on_load_unexpected = [r"classifier", r"^dense"]  # noqa: RUF012

    def __init__(self, config: PanGuBetaConfig):
        super().__init__(config)
        self.model: Any = PanGuBetaModel(config)
        self.masked_head = MaskedHead(config)
        self.post_init()

    def get_encoder(self, modality: str | None = None) -> Any:
        """The part that reads, for generation."""
        return _Reader(self.model)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """The labels after the start token, (batch, tokens) int64."""
        first = torch.full_like(labels[:, :1], self.config.decoder_start_token_id)
        ids = torch.cat([first, labels[:, :-1]], 1)
        return ids.masked_fill(ids == -100, self.config.pad_token_id)

    def forward(self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
                decoder_input_ids: Tensor | None = None, decoder_attention_mask: Tensor | None = None,
                encoder_outputs: Any = None, labels: Tensor | None = None, masked_tokens: Tensor | None = None,
                use_cache: bool | None = None, num_items_in_batch: Tensor | None = None,
                **kwargs: Any) -> Seq2SeqLMOutput:  # fmt: skip
        """labels: what the decoder writes, (batch, target) int64, -100 at padding.

        masked_tokens: what the masked tokens of input_ids were, (batch, source) int64, -100 elsewhere.
        Logits: (batch, target, vocabulary).
        """
        cache = kwargs.pop(CACHE, None)
        if encoder_outputs is None:
            if input_ids is None:
                raise ValueError("give input_ids or encoder_outputs")
            encoder_outputs = PanGuBetaEncoder.forward(self.model, input_ids, attention_mask)
        encoded = encoder_outputs[0]
        if decoder_input_ids is None:
            if labels is None:
                raise ValueError("give labels or decoder_input_ids")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        if use_cache and cache is None and labels is None:
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        hidden = self.model.decode(decoder_input_ids, decoder_attention_mask, encoded, attention_mask, cache)
        tokens = self.model.tokens.weight
        logits = nn.functional.linear(hidden, tokens)
        loss = None if labels is None else token_loss(logits, labels, num_items_in_batch)
        if masked_tokens is not None:
            masked = token_loss(self.masked_head(encoded, tokens), masked_tokens)
            loss = masked if loss is None else loss + masked
        cache_output: Any = {CACHE: cache}
        return Seq2SeqLMOutput(loss=loss, logits=logits, encoder_last_hidden_state=encoded, **cache_output)


class _Reader:
    """Calls the encoder of a whole model."""

    main_input_name = "input_ids"
    _is_stateful = False

    def __init__(self, model: PanGuBetaModel):
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> BaseModelOutput:
        return PanGuBetaEncoder.forward(self.model, input_ids, attention_mask)

    __call__ = forward


def token_loss(logits: Tensor, labels: Tensor, items: Tensor | None = None) -> Tensor:
    """Cross-entropy over labels that are not -100: the mean, or the sum divided by `items`. 0-d."""
    kind = "mean" if items is None else "sum"
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=kind)
    return loss if items is None else loss / items


AutoConfig.register("pangu_beta", PanGuBetaConfig)
AutoModelForMaskedLM.register(PanGuBetaConfig, PanGuBetaForMaskedLM)
AutoModelForSequenceClassification.register(PanGuBetaConfig, PanGuBetaForSequenceClassification)
AutoModelForSeq2SeqLM.register(PanGuBetaConfig, PanGuBetaForConditionalGeneration)
