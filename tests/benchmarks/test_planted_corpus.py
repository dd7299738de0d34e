"""Planted corpora: the same bytes from a seed, and a truth that is true."""

import gzip
import html
import importlib
import io
import itertools
import json
import random
import re
import sys
import unicodedata
from pathlib import Path
from pydoc_data.topics import topics

import pytest

PATH = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def modules():
    names = ("planted_text", "planted_kinds", "planted_private", "planted_corpus", "planted_pages")
    sys.path.insert(0, str(PATH))
    try:
        yield {x.removeprefix("planted_"): importlib.import_module(x) for x in names}
    finally:
        sys.path.remove(str(PATH))


@pytest.fixture(scope="module")
def text(modules):
    """Sentences of the language's own reference, which comes with every Python."""
    distinct = dict.fromkeys(x for y in topics.values() for x in modules["text"].sentences_of(y))
    return modules["text"].pool_of(distinct, 4000, foreign=60)


@pytest.fixture(scope="module")
def records(modules, text):
    return list(itertools.islice(modules["corpus"].Corpus(text, seed=3), 1200))


def of_kind(records, kind):
    return [(record, truth) for record, truth in records if truth and truth["kind"] == kind]


def test_equal_seeds_give_equal_bytes(modules, text, tmp_path):
    def files(name, seed):
        modules["corpus"].write(tmp_path / name, 300_000, seed, "gz", shard=100_000, text=text)
        return {x.relative_to(tmp_path / name): x.read_bytes() for x in (tmp_path / name).rglob("*") if x.is_file()}

    first, second, other = files("a", 1), files("b", 1), files("c", 2)
    assert first == second and first.keys() == other.keys() and first != other


def test_documents_are_of_the_size_and_number_that_the_manifest_says(modules, text, tmp_path):
    facts = modules["corpus"].write(tmp_path, 400_000, text=text, shard=150_000)
    paths = sorted((tmp_path / "documents").iterdir())
    documents = [json.loads(x) for path in paths for x in path.read_text().splitlines()]
    assert len(documents) == facts["documents"] == sum(facts["kinds"].values()) and len(paths) == facts["files"] == 3
    assert [x["id"] for x in documents] == [f"{i:09d}" for i in range(len(documents))]
    assert sum(len(x["text"].encode()) for x in documents) == facts["bytes"] >= 400_000
    truth = modules["corpus"].read_truth(tmp_path)
    assert len(truth) == facts["documents"] - facts["kinds"]["clean"]
    with pytest.raises(ValueError, match="is not empty"):
        modules["corpus"].write(tmp_path, 1000, text=text)


def test_stated_similarities_are_exact(modules, records):
    def shingles(string):
        words = re.findall(r"\w+", string.lower())
        return {tuple(words[i : i + 5]) for i in range(len(words) - 4)}

    texts = {record["id"]: record["text"] for record, _ in records}
    copies = [x for kind in ("exact", "normalized", "near", "chain") for x in of_kind(records, kind)]
    assert len(copies) > 100
    for record, truth in copies:
        a, b = shingles(texts[truth["of"]]), shingles(record["text"])
        assert truth["jaccard"] == len(a & b) / len(a | b)
        assert truth["of"] < record["id"] and (truth["kind"] == "exact") == (record["text"] == texts[truth["of"]])
    for _, truth in of_kind(records, "near"):
        assert abs(truth["jaccard"] - truth["goal"]) < 0.05


def test_distinct_documents_are_not_alike(modules, records):
    shingles = [modules["text"].shingles(record["text"]) for record, truth in records if truth is None][:80]
    alike = [len(a & b) / len(a | b) for a, b in itertools.combinations(shingles, 2)]
    assert max(alike) < min(modules["corpus"].SIMILARITIES)


def test_links_of_a_chain_follow_each_other(records):
    roots = {}
    for record, truth in of_kind(records, "chain"):
        assert truth["root"] == roots.get(truth["of"], truth["of"])
        roots[record["id"]] = truth["root"]
    assert len(set(roots.values())) < len(roots)


def test_what_is_planted_stands_in_the_text(modules, text, records):
    questions = {x["id"]: x["question"] for x in modules["corpus"].Corpus(text, seed=3).evaluation}
    words = modules["text"].words
    for record, truth in records:
        truth = truth or {}
        for string in [
            *truth.get("lines", []),
            *(x for _, x in truth.get("private", []) + truth.get("lookalikes", [])),
        ]:
            assert string in record["text"]
        if "sequence" in truth:
            assert truth["sequence"] in record["text"]
            assert " ".join(words(truth["sequence"])) in " ".join(words(questions[truth["evaluation"]]))
            size = len(words(truth["sequence"]))
            assert size >= 13 if truth["kind"] == "contaminated" else size < 13


def test_clean_documents_have_nothing_of_the_evaluation_set(modules, text, records):
    questions = {
        y for x in modules["corpus"].Corpus(text).evaluation for y in modules["text"].shingles(x["question"], 13)
    }
    for record, truth in records:
        if truth is None or truth["kind"] == "near_miss":
            assert not questions & modules["text"].shingles(record["text"], 13)


def test_clean_documents_keep_the_rules_that_garbage_breaks(modules, text, records):
    stop_words = modules["text"].STOP_WORDS
    for record, truth in records:
        if truth is None:
            words = record["text"].split()
            assert 100 <= len(words) < 5000 and len(stop_words & set(words)) >= 2
            assert not re.search(r"[#{\d@]|\.\.\.|javascript|lorem ipsum|cookie", record["text"], re.I)
            assert all(x.endswith((".", "?", "!")) for x in record["text"].splitlines() if x)
    rng = random.Random(0)
    garbage = {x: rule(text, rng) for x, rule in modules["kinds"].RULES.items()}
    assert len(garbage["gopher/short_document"].split()) < 50
    assert garbage["gopher/hashes"].count("#") > 0.1 * len(garbage["gopher/hashes"].split())
    assert all(x.startswith(("- ", "\u2022 ")) for x in garbage["gopher/bullets"].splitlines())
    assert not stop_words & set(modules["text"].words(garbage["gopher/stop_words"]))
    assert "lorem ipsum" in garbage["c4/lorem_ipsum"].lower() and "{" in garbage["c4/curly_bracket"]
    assert not any(x.endswith((".", "?", "!")) for x in garbage["fineweb/line_punctuation"].splitlines())
    lines = garbage["gopher/repeated_lines"].splitlines()
    assert 1 - len(set(lines)) / len(lines) > 0.3


def test_faults_of_encoding_can_be_undone(modules, records):
    undo = {
        "latin-1": lambda x: x.encode("latin-1").decode(),
        "nfd": lambda x: unicodedata.normalize("NFC", x),
        "entities": html.unescape,
        "zero width": lambda x: re.sub("[\u200b-\u200d\ufeff\u00ad]", "", x),
        "control": lambda x: re.sub(r"[\x00-\x08\x0b\x1f\x7f]", "", x),
    }
    for record, truth in of_kind(records, "encoding"):
        assert record["text"] != truth["expected"]
        if truth["fault"] in undo:
            assert undo[truth["fault"]](record["text"]) == truth["expected"]


def test_invented_numbers_have_their_check_digits(modules):
    private, rng = modules["private"].PRIVATE, random.Random(1)
    for _ in range(50):
        digits = [int(x) for x in private["card"](rng) if x.isdigit()][::-1]
        assert sum(digits[::2]) % 10 == -sum(sum(divmod(2 * x, 10)) for x in digits[1::2]) % 10
        iban = private["iban"](rng)
        assert int(iban[4:] + "1314" + iban[2:4]) % 97 == 1


def test_shares_are_chosen(modules, text):
    corpus = modules["corpus"].Corpus(text, shares={"clean": 1, "garbage": 1})
    kinds = [truth["kind"] if truth else "clean" for _, truth in itertools.islice(corpus, 300)]
    assert set(kinds) == {"clean", "garbage"} and 100 < kinds.count("clean") < 200
    with pytest.raises(ValueError, match="there is no kind 'nothing'"):
        modules["corpus"].Corpus(text, shares={"clean": 1, "nothing": 1})
    with pytest.raises(ValueError, match="needs a share of clean"):
        modules["corpus"].Corpus(text, shares={"garbage": 1})


def test_sizes_are_read(modules):
    assert [modules["corpus"].parse_size(x) for x in ("1.5GB", "3MB", "7")] == [1_500_000_000, 3_000_000, 7]
    with pytest.raises(ValueError, match="'many' is not a number of bytes"):
        modules["corpus"].parse_size("many")


def test_each_record_of_a_warc_file_is_a_member_of_its_own(modules, text, tmp_path):
    facts = modules["pages"].write(tmp_path, 150_000, text=text, pages=3)
    truth = [json.loads(x) for x in (tmp_path / "truth.jsonl").read_text().splitlines()]
    assert len(truth) == facts["records"] and facts["files"] == 1
    data, records = (tmp_path / "00000.warc.gz").read_bytes(), []
    for member in data.split(b"\x1f\x8b\x08\x00")[1:]:
        block = gzip.GzipFile(fileobj=io.BytesIO(b"\x1f\x8b\x08\x00" + member)).read()
        head, _, rest = block.partition(b"\r\n\r\n")
        fields = dict(x.split(": ", 1) for x in head.decode().split("\r\n")[1:])
        assert rest.endswith(b"\r\n\r\n") and len(rest) - 4 == int(fields["Content-Length"])
        records.append((fields["WARC-Type"], fields.get("WARC-Target-URI"), rest))
    assert [x[0] for x in records] == ["warcinfo", *(x["type"] for x in truth)]
    for (_, url, rest), line in zip(records[1:], truth, strict=True):
        assert url == line["url"]
        if line["variant"] == "article":
            page = html.unescape(rest.decode())
            assert all(x in page for x in [*line["inside"], *line["outside"]])
    perfect = {x["url"]: "\n".join(x["inside"]) for x in truth}
    assert modules["pages"].score(tmp_path, perfect) == {"inside": 1.0, "outside": 1.0, "no document": 1.0}
    everything = {x["url"]: " ".join([*x["inside"], *x["outside"], "text"]) for x in truth}
    assert modules["pages"].score(tmp_path, everything)["outside"] == 0
