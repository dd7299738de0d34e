"""Each step against its published rule or an independent computation."""

# ruff: noqa: E501, RUF001

from __future__ import annotations

import json
import random
import re
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from corpus_batches import batch_of, texts_of

from tutti.data.corpus import native
from tutti.data.corpus.steps import Extract, Language, Licence, Lines, MaskPii, Mix, Repair, Rules, Secrets, Words
from tutti.data.corpus.steps.licence import allowed, licence_of
from tutti.data.corpus.steps.phrases import Decontaminate
from tutti.data.corpus.steps.repair import _suspicious
from tutti.data.corpus.steps.rules import FEATURES, features, read_table

GOOD = (
    "The committee met on Tuesday to discuss the plan for the new bridge over the river. It was agreed that the work "
    "would begin in spring, and that the cost should be shared between both towns. Several residents said they have "
    "concerns about noise.\nThe engineer answered that most of the work can be done during the day. People who live "
    "near the site will be told in time.\nA report with all details is to be published before the end of the month."
)


def value(text: str, name: str) -> float:
    return float(features(pa.array([text]))[0, FEATURES.index(name)])


def test_features_are_those_of_the_cpp_file():
    assert native.call("feature_names").decode().split() == list(FEATURES)


def test_features_equal_a_plain_computation():
    rng = random.Random(0)
    for _ in range(50):
        words = [rng.choice(["the", "Cat's", "42", "...", "--", "naïve", "ÉTÉ", "#tag", "x"]) for _ in range(80)]
        text = "".join(w + rng.choice([" ", " ", "\n", "\n\n", "  "]) for w in words)
        bare = [re.sub(r"[^\w]|_", "", w) for w in text.split()]
        real = [w for w in bare if w]
        assert value(text, "words") == len(real)
        assert value(text, "mean_word_length") == pytest.approx(sum(map(len, real)) / len(real))
        assert value(text, "characters") == len(text) and value(text, "bytes") == len(text.encode())
        assert value(text, "hashes_per_word") == pytest.approx(text.count("#") / len(real))
        assert value(text, "ellipses_per_word") == pytest.approx(text.count("...") / len(real))
        letters = sum(any(c.isalpha() for c in w) for w in text.split())
        assert value(text, "alphabetic_words") == pytest.approx(letters / len(text.split()))
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        repeated = [n - 1 for n in Counter(lines).values()]
        assert value(text, "duplicate_lines") == pytest.approx(sum(repeated) / len(lines))
        assert value(text, "short_lines") == pytest.approx(sum(len(line) <= 30 for line in lines) / len(lines))
        assert value(text, "top_2_gram") == pytest.approx(top_gram([w.lower() for w in real], 2))
        assert value(text, "duplicate_5_grams") == pytest.approx(repeated_grams([w.lower() for w in real], 5))


def top_gram(words: list[str], n: int) -> float:
    grams = Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
    most = max(grams.values())
    if most < 2:
        return 0.0
    return max(sum(map(len, g)) * most for g, c in grams.items() if c == most) / sum(map(len, words))


def repeated_grams(words: list[str], n: int) -> float:
    seen, i, characters = set(), 0, 0
    while i + n <= len(words):
        gram = tuple(words[i : i + n])
        if gram in seen:
            characters += sum(map(len, gram))
            i += n
        else:
            seen.add(gram)
            i += 1
    return characters / sum(map(len, words))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (GOOD, None),
        ("Too short to be of use.", "too_few_words"),
        (GOOD.replace(".", " #. #"), "hashes"),
        ("\n".join(f"- the {w}" for w in GOOD.split()), "bullets"),
        ("\n".join(f"{line}..." for line in re.split(r"[.\n]+", GOOD)), "lines_in_ellipses"),
        (" ".join(f"{w} 12345" for w in GOOD.split()), "not_alphabetic"),
        (re.sub(r"\b(the|be|to|of|and|that|have|with)\b", "zz", GOOD, flags=re.I), "too_few_stop_words"),
        (" ".join(w + "abcdefghijkl" for w in GOOD.split()) + " the of.", "word_length"),
        ("\n".join([*GOOD.split("\n"), *GOOD.split("\n")[:2]]), "duplicate_lines"),
        (GOOD + " " + GOOD.split("\n")[0] + " " + GOOD.split("\n")[0], "duplicate_10_grams"),
    ],
)
def test_documents_break_the_published_rules(text, reason):
    outcome = Rules(("gopher_quality", "gopher_repetition", "fineweb"))(batch_of([text]))
    broken = outcome.reasons[0]
    if reason == "duplicate_10_grams":
        assert broken is not None and broken.startswith("duplicate_"), broken
    else:
        assert broken == reason, (broken, outcome.details)


def test_thresholds_are_those_of_the_papers():
    gopher = {rule.name: (rule.min, rule.max) for rule in read_table("gopher_quality")}
    assert gopher["too_few_words"][0] == 50 and gopher["too_many_words"][1] == 100_000
    assert gopher["word_length"] == (3, 10) and gopher["not_alphabetic"][0] == 0.8
    repetition = [rule.max for rule in read_table("gopher_repetition")]
    assert repetition == [0.3, 0.3, 0.2, 0.2, 0.2, 0.18, 0.16, 0.15, 0.14, 0.13, 0.12, 0.11, 0.10]


def test_words_of_scripts_without_spaces_are_their_letters():
    assert value("私は学生です。", "words") == 6
    assert value("مرحبا بالعالم", "words") == 2


def test_a_table_of_your_own(tmp_path):
    table = tmp_path / "mine.toml"
    table.write_text('[[rule]]\nname = "long"\nfeature = "words"\nmax = 3\n')
    assert Rules((str(table),))(batch_of(["a b c", "a b c d"])).reasons == [None, "long"]
    table.write_text('[[rule]]\nname = "long"\nfeature = "wordz"\nmax = 3\n')
    read_table.cache_clear()
    with pytest.raises(ValueError, match="no feature wordz"):
        Rules((str(table),))


def test_lines_of_c4():
    text = (
        "This first line is kept because it ends well.\nno punctuation here\nToo short.\nPlease enable JavaScript to go on.\n"
        "We use cookies.\nAnother good line[1] with a citation that stays.\nThe end of a thought...\n"
        "A third line that is long enough. A fourth one is here too. And the fifth."
    )
    outcome = Lines()(batch_of([text, "One { two. " * 9, "Lorem Ipsum dolor sit. " * 9, "One good line only, alas."]))
    assert texts_of(outcome)[0] == (
        "This first line is kept because it ends well.\nAnother good line with a citation that stays.\n"
        "A third line that is long enough. A fourth one is here too. And the fifth."
    )
    assert outcome.reasons == [None, "curly_bracket", "lorem_ipsum", "too_few_sentences"]
    cut = {name: int(counts[0]) for name, (counts, _) in outcome.cut.items()}
    assert cut == {"citation_mark": 1, "no_terminal_punctuation": 2, "too_few_words": 1, "long_word": 0, "phrase": 2}


def test_encodings_are_repaired():
    broken = "The café’s naïve façade".encode().decode("cp1252")
    twice = "schön".encode().decode("latin-1").encode().decode("latin-1")
    texts = [broken, twice, "a\u200bb\u00adc", "x &amp; y", "e\u0301", "fine – “quotes” stay", "a\x00b\x1fc", "ﬁ"]
    assert texts_of(Repair()(batch_of(texts))) == [
        "The café’s naïve façade", "schön", "abc", "x & y", "é", "fine – “quotes” stay", "abc", "ﬁ",
    ]  # fmt: skip


def test_what_is_not_suspicious_is_what_ftfy_leaves():
    ftfy = pytest.importorskip("ftfy")
    import pyarrow.compute as pc

    config = ftfy.TextFixerConfig(uncurl_quotes=False, normalization=None, explain=False, fix_latin_ligatures=False)
    rng, texts = random.Random(1), []
    words = [
        "naïve",
        "café",
        "“quoted”",
        "text’s",
        "Größe",
        "—",
        "…",
        "señor",
        "Привет",
        "мир",
        "日本語",
        "£3",
        "½",
        "©2020",
        "œuvre",
        "Škoda",
        "Ελλάδα",
        "à",
        "ç",
        "Ãß",
    ]
    for _ in range(3000):
        text = " ".join(rng.choice(words) for _ in range(6))
        encoding = rng.choice(["latin-1", "cp1252", "cp1251", "cp1250", "cp1253", "cp437", "macroman", "utf-8"])
        texts.append(f"{text} {rng.choice(words).encode().decode(encoding, 'ignore')} end")
    likely = pc.match_substring_regex(pa.array(texts), _suspicious()).to_pylist()
    changed = [ftfy.fix_text(t, config) != t for t in texts]
    assert sum(changed) > 500 and not [t for t, c, x in zip(texts, changed, likely, strict=True) if c and not x]


def test_languages():
    texts = [
        GOOD, "Der Ausschuss traf sich am Dienstag, um den Plan für die neue Brücke über den Fluss zu besprechen.",
        "Le comité s'est réuni mardi pour discuter du projet de nouveau pont sur la rivière.", "12 34 @@ ##",
    ]  # fmt: skip
    outcome = Language(keep=("en", "de"))(batch_of(texts))
    assert outcome.batch.column("language").to_pylist()[:3] == ["en", "de", "fr"]
    assert outcome.reasons[:3] == [None, None, "other_language"] and outcome.reasons[3] is not None


PERSONAL = {
    "<EMAIL>": ["joe.doe@example.com", "x+y_z@mail.co.uk", "o'hara@uni-bonn.de"],
    "<IP>": ["8.8.8.8", "2001:4860:4860::8888", "93.184.216.34"],
    "<PHONE>": ["+49 30 1234567", "(415) 555-2671", "415-555-2671", "030/1234567", "+1-202-555-0143", "0044 20 7946 0958"],
    "<CARD>": ["4111 1111 1111 1111", "5500-0000-0000-0004", "340000000000009"],
    "<ACCOUNT>": ["DE89 3704 0044 0532 0130 00", "GB82WEST12345698765432"],
    "<KEY>": ["AKIAIOSFODNN7EXAMPLE", "ghp_" + "a1B2" * 9, "-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY-----"],
}  # fmt: skip
ORDINARY = [
    "user at example dot com", "@handle", "192.168.1.1", "127.0.0.1", "version 1.2.3.4.5", "10:30:45", "std::vector a::b",
    "2024-01-15", "12.05.2023", "1999-2004", "ISBN 978-3-16-148410-0", "4111 1111 1111 1112", "3.14159265358979",
    "x = 1234567890123", "DE89 3704 0044 0532 0130 01", "AKIA", "pages 100-200", "the 2020 census: 331449281", "01-12-2023 10:30 start and +1 of it", "0010 0020 0030 and (415) 1",
]  # fmt: skip


def test_personal_data_is_masked_and_its_like_is_not():
    texts = [f"Before {item}, after." for items in PERSONAL.values() for item in items]
    masks = [f"Before {mask}, after." for mask, items in PERSONAL.items() for _ in items]
    plain = [f"Before {item}, after." for item in ORDINARY]
    outcome = MaskPii()(batch_of(texts + plain))
    assert texts_of(outcome) == masks + plain
    removed = sum(len(t.encode()) for t in texts) - sum(map(len, masks))
    assert sum(int(size.sum()) for _, size in outcome.cut.values()) == removed


def test_patterns_take_linear_time():
    """Texts that would take a backtracking engine hours."""
    hostile = ["a" * 200_000 + "@", "'" * 200_000, "1 " * 100_000, "-----BEGIN PRIVATE KEY-----" * 8_000, "a:" * 100_000,
               "+1" + " (2" * 60_000, "secret = '" * 20_000]  # fmt: skip
    assert len(texts_of(MaskPii()(batch_of(hostile)))) == len(hostile)


def test_secrets():
    texts = [
        "aws = AKIAIOSFODNN7EXAMPLE", 'api_key = "x8f7Gk2LmQ9pZr4TnV1w"', 'password = "correct horse"', 'token = "aaaaaaaaaaaaaaaaaaaa"',
        "def key(): pass",
    ]  # fmt: skip
    assert Secrets()(batch_of(texts)).reasons == ["secret", "secret", None, None, None]
    assert texts_of(Secrets(action="mask")(batch_of(texts)))[0] == "aws = <KEY>"


def test_licences():
    mit = "# Permission is hereby granted,\n#  free of charge, to any person obtaining a copy\n"
    assert licence_of(mit) == "MIT" and licence_of("x = 1") is None
    assert (
        licence_of("// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception\n") == "Apache-2.0 WITH LLVM-exception"
    )
    assert allowed("GPL-2.0 OR MIT", ("MIT",)) and not allowed("GPL-2.0 AND MIT", ("MIT",))
    assert not allowed("(MIT OR GPL-2.0) AND LicenseRef-Own", ("MIT",)) and allowed(
        "(MIT OR GPL-2.0) AND ISC", ("MIT", "ISC")
    )
    assert allowed("Apache-2.0 WITH LLVM-exception", ("Apache-2.0",)) and not allowed("(MIT", ("MIT",))
    isc = "Permission to use, copy, modify, and/or distribute this software for any purpose with or without fee"
    zlib = "This software is provided 'as-is', without any express or implied\nwarranty."
    assert licence_of(isc) == "ISC" and licence_of(zlib) == "Zlib"
    texts = [mit, "/* GNU GENERAL PUBLIC LICENSE */", "x = 1"]
    assert Licence(unknown=False)(batch_of(texts)).reasons == [None, "licence_not_allowed", "licence_unknown"]


def test_evaluation_texts_are_found(tmp_path):
    question = (
        "Which of the following rivers flows through the largest number of capital cities in Europe, and which ones?"
    )
    (tmp_path / "eval.jsonl").write_text(json.dumps({"q": question, "choices": ["Danube", "Rhine"]}))
    step = Decontaminate((str(tmp_path / "eval.jsonl"),))
    texts = [
        GOOD, f"{GOOD} {question}", "Quiz: WHICH of the following rivers -- flows through the largest number of capital cities in europe?",
        "Which of the following rivers flows through the largest city? Nobody knows. Danube. Rhine.",
    ]  # fmt: skip
    outcome = step(batch_of(texts))
    assert outcome.reasons == [None, "contaminated", "contaminated", None]
    assert "Which of the following rivers" in outcome.details[1]


def test_lists_of_words(tmp_path):
    (tmp_path / "bad.txt").write_text("# a list\nblorp\nfoo bar  # a phrase\n")
    step = Words((str(tmp_path / "bad.txt"),))
    assert (
        step(batch_of(["a Blorp!", "foo, bar", "foo and bar", "blorps"])).reasons == ["listed_words"] * 2 + [None] * 2
    )


def test_main_text_of_pages():
    page = (
        "<html><head><title>T</title><script>var x = 1;</script></head><body><nav><a href=/>Home</a><a href=/a>About</a></nav>"
        f"<article><h1>Title of it</h1><p>{GOOD.replace(chr(10), '</p><p>')}</p></article><footer>Imprint</footer></body></html>"
    )
    pages = [page.encode(), "<p>caf\xe9 au lait, s'il vous pla\xeet".encode("latin-1"), b"<html></html>", None]
    batch = batch_of(["", "", "", "as text"], raw=pages)
    outcome = Extract()(batch)
    text = texts_of(outcome)
    assert all(line in text[0] for line in GOOD.split("\n")) and "var x" not in text[0] and "Imprint" not in text[0]
    assert "café" in text[1] and text[3] == "as text" and outcome.reasons == [None, None, "no_text", None]


def test_mixtures():
    mix = Mix({"a": 3, "b": 1}, size=400)
    assert mix.fractions({"a": 600, "b": 200, "c": 9}) == {"a": 0.5, "b": 0.5}
    assert Mix({"a": 1, "b": 1}).fractions({"a": 100, "b": 50}) == {"a": 0.5, "b": 1.0}
    with pytest.raises(ValueError, match="need more of b than its 50 bytes"):
        Mix({"a": 1, "b": 1}, size=200).fractions({"a": 1000, "b": 50})
    with pytest.raises(ValueError, match="no documents of z"):
        Mix({"z": 1}).fractions({"a": 1})
    batch = batch_of([str(i) for i in range(4000)])
    batch = batch.set_column(5, "domain", pa.array(["a"] * 2000 + ["b"] * 1000 + ["c"] * 1000))
    fractions = {"a": 0.25, "b": 0.5}
    reasons = mix.apply(batch, fractions).reasons
    sampled = np.array([r is None for r in reasons])
    assert abs(sampled[:2000].mean() - 0.25) < 0.04 and abs(sampled[2000:3000].mean() - 0.5) < 0.06
    assert set(reasons[3000:]) == {"domain_not_in_mix"}
    more = np.array([r is None for r in mix.apply(batch, {"a": 0.3, "b": 0.5}).reasons])
    assert (more | ~sampled).all(), "a larger sample contains a smaller one"
