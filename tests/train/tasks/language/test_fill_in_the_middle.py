import numpy as np
import pytest

from tutti.train.tasks import get_task
from tutti.train.tasks.language.fill_in_the_middle import markers

TEXT = "def add(x, y):\n    return x + y\n"


def parts(tokenizer, row):
    """The texts after each marker, in order."""
    prefix, middle, suffix = markers(tokenizer)
    names = {prefix: "prefix", middle: "middle", suffix: "suffix"}
    pieces, at = [], None
    for token in row[:-1]:
        if token in names:
            pieces.append([names[token], []])
            at = pieces[-1][1]
        else:
            at.append(token)
    return [(name, tokenizer.decode(ids)) for name, ids in pieces]


@pytest.mark.parametrize("spm", (0.0, 1.0))
def test_the_parts_in_their_order_are_the_text(tokenizer, spm):
    task = get_task("fill-in-the-middle", rate=1.0, spm=spm, length=100)
    for sample in range(20):
        row = task.rearranged({"text": TEXT, "sample_index": sample}, tokenizer)
        assert row[-1] == tokenizer.eos_token_id
        pieces = parts(tokenizer, row)
        names, texts = [name for name, _ in pieces], dict(pieces)
        assert names == (["prefix", "suffix", "middle"])
        if spm:
            assert texts["prefix"] == ""
        assert texts["prefix"] + texts["middle"] + texts["suffix"] == TEXT


def test_rate_and_form_are_fractions_of_texts(tokenizer):
    task = get_task("fill-in-the-middle", rate=0.5, spm=0.25, length=100)
    prefix, _, suffix = markers(tokenizer)
    rows = [task.rearranged({"text": TEXT, "sample_index": i}, tokenizer) for i in range(400)]
    cut = [row for row in rows if prefix in row]
    spm = [row for row in cut if row[:2] == [prefix, suffix]]
    assert abs(len(cut) / 400 - 0.5) < 0.1 and abs(len(spm) / len(cut) - 0.27) < 0.13  # an empty prefix looks alike


def test_too_long_a_text_keeps_its_markers_and_middle(tokenizer):
    task = get_task("fill-in-the-middle", rate=1.0, spm=0.0, length=20)
    markers_, lengths = set(markers(tokenizer)), []
    for sample in range(20):
        row = task.rearranged({"text": TEXT * 3, "sample_index": sample}, tokenizer)
        lengths.append(len(row))
        assert markers_ < set(row) and row[-1] == tokenizer.eos_token_id
    assert max(lengths) == 20


def test_places_are_uniform(tokenizer):
    task = get_task("fill-in-the-middle", rate=1.0, spm=0.0, length=200)
    text = "x" * 50
    lengths = [len(dict(parts(tokenizer, task.rearranged({"text": text, "sample_index": i}, tokenizer)))["prefix"])
               for i in range(300)]  # fmt: skip
    assert abs(np.mean(lengths) - 50 / 3) < 3  # the smaller of two uniform places


def test_missing_markers_are_an_error():
    from tutti.data.tokenizer import train_tokenizer

    with pytest.raises(ValueError, match=r"the tokenizer has no <\|fim_prefix\|>; tokenizer\.add_tokens"):
        markers(train_tokenizer([TEXT], 260))
