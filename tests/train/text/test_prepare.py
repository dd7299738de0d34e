from dataclasses import replace

import pytest

from tutti.data.tokenizer import load_tokenizer
from tutti.train.text import prepare as module
from tutti.train.text.prepare import prepare
from tutti.train.text.progress import Display


@pytest.fixture
def fresh(tiny, tmp_path):
    return replace(tiny, data=replace(tiny.data, cache=str(tmp_path / "cache")))


def test_text_becomes_a_tokenizer_and_two_rows_of_tokens(fresh):
    prepared = prepare(fresh, Display(silent=True))
    tokenizer = load_tokenizer(prepared.tokenizer)
    assert len(tokenizer) == prepared.vocab_size == 300
    documents = tokenizer.decode(prepared.train.open().tolist()).split("<|endoftext|>")[:-1]
    assert len(documents) == prepared.train.documents and all(d.startswith("def add_") for d in documents)
    assert prepared.train.documents + prepared.held_out.documents == 30


def test_nothing_is_made_twice(fresh, monkeypatch):
    first = prepare(fresh, Display(silent=True))
    monkeypatch.setattr(module, "train_tokenizer", None)
    assert prepare(fresh, Display(silent=True)) == first


def test_another_vocabulary_is_other_tokens(fresh):
    first = prepare(fresh, Display(silent=True))
    other = prepare(replace(fresh, tokenizer=replace(fresh.tokenizer, vocab_size=310)), Display(silent=True))
    assert other.vocab_size == 310 and other.tokenizer != first.tokenizer and other.key != first.key


def test_the_sample_for_the_tokenizer_is_bounded(fresh, monkeypatch):
    real, seen = module.train_tokenizer, []

    def counted(texts, vocab_size):
        seen.extend(texts)
        return real(seen, vocab_size)

    monkeypatch.setattr(module, "train_tokenizer", counted)
    prepare(replace(fresh, tokenizer=replace(fresh.tokenizer, sample_mb=0.002)), Display(silent=True))
    assert 1 <= len(seen) < 24 and sum(map(len, seen)) <= 2000
