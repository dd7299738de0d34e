"""Byte-level BPE: learned from text, saved for `transformers.AutoTokenizer`."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
"""Ends every document; also the tokenizer's begin, end and padding token. Its id is 0."""

_SMALLEST = 256 + 1  # every byte, and the end of text


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn `vocab_size` tokens by byte-pair encoding (Sennrich et al. 2016) over bytes, as GPT-2 does.

    Any text is encoded without loss. The vocabulary is smaller than `vocab_size` if the text has no more pairs to
    merge.
    """
    if vocab_size < _SMALLEST:
        raise ValueError(f"a byte-level vocabulary needs at least {_SMALLEST} tokens, not {vocab_size}")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def train_wordpiece(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn word pieces of lower-case text (Schuster and Nakajima 2012), at most `vocab_size` with BERT's special ones.

    A text becomes `[CLS] text [SEP]`, a pair `[CLS] a [SEP] b [SEP]` with token types 0 and 1. Equal texts give equal
    vocabularies in all processes.
    """
    names, texts = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], list(texts)
    normalizer, splitter = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    words = {word for text in texts for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text))}
    # The trainer numbers pieces inside of words as it meets them, in an order that differs by process, and breaks ties
    # by number. As special tokens they have numbers of their own.
    inside = [f"##{letter}" for letter in sorted({letter for word in words for letter in word[1:]})]
    learning = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # pyright: ignore[reportCallIssue]
    learning.normalizer, learning.pre_tokenizer = normalizer, splitter
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=[*names, *inside], show_progress=False)
    learning.train_from_iterator(texts, trainer)
    vocabulary = learning.get_vocab(with_added_tokens=True)
    pieces = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))  # pyright: ignore[reportCallIssue]
    pieces.normalizer, pieces.pre_tokenizer, pieces.decoder = normalizer, splitter, decoders.WordPiece()
    pieces.add_special_tokens(names)
    pieces.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    pad, unknown, first, between, mask = names
    return PreTrainedTokenizerFast(
        tokenizer_object=pieces, pad_token=pad, unk_token=unknown, cls_token=first, sep_token=between, mask_token=mask,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip


def load_tokenizer(folder: Path, seq: int | None = None) -> PreTrainedTokenizerFast:
    """A saved tokenizer, for a model of `seq` tokens."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    if seq is not None:
        tokenizer.model_max_length = seq
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[list[int]]:
    """Token ids of each text, the end-of-text token last, computed on all cores.

    A text that spells out `<|endoftext|>` is encoded as those letters.
    """
    bpe = tokenizer.backend_tokenizer
    end = bpe.token_to_id(END_OF_TEXT)
    assert end is not None
    bpe.encode_special_tokens = True
    return [[*e.ids, end] for e in bpe.encode_batch_fast(texts, add_special_tokens=False)]
