"""A language model of peptides and proteins: a small GPT over amino acids, and the tokenizer of their alphabet.

from tutti.models.peptides import PeptideConfig, PeptideForCausalLM, peptide_tokenizer

tokenizer, model = peptide_tokenizer(), PeptideForCausalLM(PeptideConfig())
tokenizer("KWKLFKKI")["input_ids"]  # [1, 12, 22, ...]: <bos>, then a token for each residue
"""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

from tutti.models.blocks import ForCausalLM, TransformerBlock, look_back, place_of

SPECIAL = ("<pad>", "<bos>", "<eos>", "<mask>")
RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
"""One-letter codes of the 20 amino acids of the genetic code (IUPAC-IUB 1984)."""
AMBIGUOUS = "XBZJUO"
"""Any residue, D or N, E or Q, I or L, selenocysteine, pyrrolysine."""
VOCABULARY = {token: i for i, token in enumerate([*SPECIAL, *RESIDUES, *AMBIGUOUS])}


def peptide_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each residue, with `<bos>` in front. Lower case is read as upper case, other letters as `X`.

    The vocabulary is fixed: 4 special tokens, 20 amino acids and 6 codes of what is ambiguous or rare.
    """
    backend = Tokenizer(models.WordLevel(VOCABULARY, unk_token="X"))  # pyright: ignore[reportCallIssue]
    upper = [normalizers.Replace(x.lower(), x) for x in RESIDUES + AMBIGUOUS]
    backend.normalizer = normalizers.Sequence([*upper, normalizers.Replace(Regex(r"\s+"), "")])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    pad, begin, end, mask = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=pad, bos_token=begin, eos_token=end, mask_token=mask,
        clean_up_tokenization_spaces=False, model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


class PeptideConfig(PreTrainedConfig):
    """Sizes of a peptide language model."""

    model_type = "peptide"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012

    vocab_size: int = len(VOCABULARY)
    hidden_size: int = 128
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    max_position_embeddings: int = 64
    dropout: float = 0.0
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = VOCABULARY["<pad>"]
    bos_token_id: int | None = VOCABULARY["<bos>"]
    eos_token_id: int | None = VOCABULARY["<eos>"]


class PeptideModel(nn.Module):
    """The model below the output layer."""

    def __init__(self, config: PeptideConfig):
        super().__init__()
        width = config.hidden_size
        self.tokens = nn.Embedding(config.vocab_size, width)
        self.positions = nn.Embedding(config.max_position_embeddings, width)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(TransformerBlock(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(width, config.layer_norm_eps)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                cache: Any = None) -> Tensor:  # fmt: skip
        """input_ids: (batch, tokens) int64. Returns (batch, tokens, width)."""
        past = 0 if cache is None else cache.get_seq_length()
        places, queries = place_of(input_ids, cache, position_ids), input_ids.shape[1]
        mask, causal = look_back(attention_mask, queries, past + queries, input_ids.device)
        x = self.dropout(self.tokens(input_ids) + self.positions(places))
        for layer in self.layers:
            x = layer(x, mask, causal, cache)
        return self.norm(x)


class PeptideForCausalLM(ForCausalLM):
    """A peptide language model with its output layer, which is tied to the embedding of residues."""

    config_class = PeptideConfig
    _no_split_modules = ["Block"]  # noqa: RUF012

    def make(self, config: PeptideConfig) -> nn.Module:
        return PeptideModel(config)


AutoConfig.register("peptide", PeptideConfig)
AutoModelForCausalLM.register(PeptideConfig, PeptideForCausalLM)
