import inspect
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from tutti.data.tokenizer import END_OF_TEXT, encode, train_tokenizer, train_wordpiece

TEXT = inspect.getsource(json) + inspect.getsource(json.decoder)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([TEXT], vocab_size=512)


def test_the_vocabulary_has_the_size_asked_for(tokenizer):
    assert len(tokenizer) == 512
    assert tokenizer.eos_token == END_OF_TEXT and tokenizer.eos_token_id == 0


def test_it_compresses_what_it_was_trained_on(tokenizer):
    assert len(tokenizer(TEXT)["input_ids"]) < len(TEXT) / 2


@settings(max_examples=50)
@given(st.text())
def test_any_text_comes_back(tokenizer, text):
    (ids,) = encode(tokenizer, [text])
    assert ids[-1] == 0 and tokenizer.decode(ids[:-1]) == text


def test_a_document_that_spells_the_end_of_text_does_not_end(tokenizer):
    (ids,) = encode(tokenizer, [f"a {END_OF_TEXT} b"])
    assert ids.count(0) == 1 and ids[-1] == 0
    assert tokenizer.decode(ids[:-1]) == f"a {END_OF_TEXT} b"


def test_transformers_loads_it(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("def f(x):\n    return x")["input_ids"] == tokenizer("def f(x):\n    return x")["input_ids"]
    assert loaded.eos_token_id == 0


def test_training_is_deterministic(tokenizer):
    assert train_tokenizer([TEXT], 512).get_vocab() == tokenizer.get_vocab()


def test_too_small_a_vocabulary_is_an_error():
    with pytest.raises(ValueError, match="at least 257 tokens, not 100"):
        train_tokenizer([TEXT], 100)


def test_word_pieces_are_those_of_bert():
    tokenizer = train_wordpiece(iter([TEXT]), 200)
    assert tokenizer.get_vocab() == train_wordpiece([TEXT], 200).get_vocab() and len(tokenizer) == 200
    single, pair = tokenizer("json Text"), tokenizer("json", "text")
    assert single["input_ids"][0] == tokenizer.cls_token_id and single["input_ids"][-1] == tokenizer.sep_token_id
    assert tokenizer.decode(single["input_ids"]) == "[CLS] json text [SEP]"
    assert tokenizer.decode(pair["input_ids"]) == "[CLS] json [SEP] text [SEP]"
    assert pair["token_type_ids"][0] == 0 and pair["token_type_ids"][-1] == 1
    reader = models.WordPiece(tokenizer.get_vocab(), unk_token="[UNK]")
    words = Tokenizer(reader).encode("decoder", add_special_tokens=False).tokens
    assert tokenizer.tokenize("Decoder") == words, "no piece is taken for a special token"
