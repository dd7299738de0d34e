"""What is planted in a corpus: texts that each published rule must catch, faults of encoding, changed copies.

A rule's name is `paper/what`. The papers: C4 (Raffel et al., 2020), Gopher (Rae et al., 2021, appendix A1; its rules of
quality and of repetition), FineWeb (Penedo et al., 2024).
"""

from __future__ import annotations

import html
import random
import unicodedata
from collections.abc import Callable

from planted_text import STOP_WORDS, Pool, words


def paragraphs(pool: Pool, rng: random.Random, sentences: int) -> list[str]:
    """Paragraphs of two to six sentences, drawn from the pool."""
    draw, count = rng.random, len(pool.sentences)
    drawn = [pool.sentences[int(draw() * count)] for _ in range(sentences)]
    parts, at = [], 0
    while at < sentences:
        size = 2 + int(draw() * 5)
        parts.append(" ".join(drawn[at : at + size]))
        at += size
    return parts


def clean(pool: Pool, rng: random.Random, longest: int = 110) -> str:
    """A document of 100 words and more: sentences in paragraphs. Their number is uniform in its logarithm."""
    count = int(9 * (longest / 9) ** rng.random())
    parts = paragraphs(pool, rng, count)
    while (size := sum(x.count(" ") + 1 for x in parts)) < 100:
        parts += paragraphs(pool, rng, 1 + (100 - size) // 20)
    return ("\n" if rng.random() < 0.5 else "\n\n").join(parts)


def _short(pool: Pool, rng: random.Random) -> str:
    return " ".join(" ".join(paragraphs(pool, rng, 8)).split()[: rng.randrange(30, 46)])


def _every(text: str, steps: int, change: Callable[[str], str]) -> str:
    return " ".join(change(x) if i % steps == 0 else x for i, x in enumerate(text.split(" ")))


def _lines(pool: Pool, rng: random.Random, form: str, end: str = "") -> str:
    """One sentence in a line."""
    lines = [pool.sentences[int(rng.random() * len(pool.sentences))] for _ in range(rng.randrange(12, 40))]
    return "\n".join(form.format(x[: -1 if end else None] + end) for x in lines)


def _small_words(pool: Pool, rng: random.Random) -> str:
    small = ["to", "of", "be", "a", "is", "it", "in", "at", "by", "we", "so", "he", "up", "as", "an", "the"]
    tails = "abcdefghijklmnopqrstuvwxyz"
    return " ".join(" ".join(rng.choice(small) if rng.random() < 0.5 else rng.choice(tails) for _ in range(12)) + "."
                    for _ in range(20)).replace(". ", ". The use of ", 2)  # fmt: skip


def _large_words(pool: Pool, rng: random.Random) -> str:
    large = [x for x in pool.words if len(x) > 6]
    line = "The {} of {} and {} to {} with {}. "
    return "".join(line.format(*(rng.choice(large) + rng.choice(large) + rng.choice(large) for _ in range(5)))
                   for _ in range(15)).strip()  # fmt: skip


def _numbers(pool: Pool, rng: random.Random) -> str:
    def row() -> str:
        return " ".join(
            rng.choice(pool.words) if rng.random() < 0.6 else str(rng.randrange(100, 10**6)) for _ in range(9)
        )

    return "\n".join(f"{row()} of {row()} to {row()}." for _ in range(20))


def _without_stop_words(pool: Pool, rng: random.Random) -> str:
    return "\n".join(" ".join(x for x in line.split(" ") if not STOP_WORDS & set(words(x)))
                     for line in paragraphs(pool, rng, 30))  # fmt: skip


def _repeated_lines(pool: Pool, rng: random.Random) -> str:
    lines = [pool.sentences[int(rng.random() * len(pool.sentences))] for _ in range(8)]
    return "\n".join(lines + [rng.choice(lines) for _ in range(10)])


def _repeated_paragraphs(pool: Pool, rng: random.Random) -> str:
    parts = paragraphs(pool, rng, 20)
    return "\n\n".join(parts + parts[: max(2, 2 * len(parts) // 3)])


def _top_2_gram(pool: Pool, rng: random.Random) -> str:
    first, second = rng.sample([x for x in pool.words if len(x) > 6], 2)
    return " ".join(f"{first} {second} {x}" for x in " ".join(paragraphs(pool, rng, 15)).split(" "))


def _repeated_5_gram(pool: Pool, rng: random.Random) -> str:
    phrase = " ".join(rng.choice(pool.words) for _ in range(9))
    return " ".join(f"{x[:-1]} and {phrase}." for x in (rng.choice(pool.sentences) for _ in range(25)))


def _curly(pool: Pool, rng: random.Random) -> str:
    parts = paragraphs(pool, rng, 20)
    name = rng.choice(pool.words)
    parts.insert(rng.randrange(len(parts)), f"function {name}(value) {{ return value; }} is how the code of it begins.")
    return "\n".join(parts)


def _lorem(pool: Pool, rng: random.Random) -> str:
    parts = paragraphs(pool, rng, 20)
    parts.insert(rng.randrange(len(parts)), "Lorem ipsum dolor sit amet, consectetur adipiscing elit, sed do eiusmod.")
    return "\n".join(parts)


def _few_sentences(pool: Pool, rng: random.Random) -> str:
    return ", and ".join(x[:-1] for x in (rng.choice(pool.sentences) for _ in range(12))) + "."


def _notices(pool: Pool, rng: random.Random) -> str:
    """All but three of its sentences are in lines that must go."""
    lines = [rng.choice(pool.sentences).split(" ") for _ in range(15)]
    for line in lines[3:]:
        line[rng.randrange(1, len(line) - 1)] = rng.choice(
            ["JavaScript", "privacy policy", "terms of use", "use cookies"]
        )
    rng.shuffle(lines)
    return "\n".join(map(" ".join, lines))


def _open_lines(pool: Pool, rng: random.Random) -> str:
    lines = [f"{rng.choice(pool.sentences)} {rng.choice(pool.sentences)[:-1]}" for _ in range(rng.randrange(10, 30))]
    return "\n".join(lines)


def _short_lines(pool: Pool, rng: random.Random) -> str:
    """Lines of four short words; one in three ends in a mark."""
    split = [x.strip(".,?!()") for x in " ".join(paragraphs(pool, rng, 25)).split(" ") if len(x) < 8]
    lines = [" ".join(split[i : i + 4])[:29] for i in range(0, len(split) - 3, 4)]
    return "\n".join(x + "." * (i % 3 == 0) for i, x in enumerate(lines))


def _repeated_characters(pool: Pool, rng: random.Random) -> str:
    """Two lines twice, which is too little for Gopher's rules."""
    lines = [rng.choice(pool.sentences) for _ in range(30)]
    return "\n".join([*lines, lines[3], lines[7]])


def _list(pool: Pool, rng: random.Random) -> str:
    """Lines of three words that are too long to be short lines; one in seven ends in a mark."""
    middle = [x for x in pool.words if len(x) in (9, 10)]
    lines = [" ".join(rng.choice(middle) for _ in range(3)) + "." * (i % 7 == 0) for i in range(100)]
    return "\n".join([*lines, "That is to be the end of it."])


RULES: dict[str, Callable[[Pool, random.Random], str]] = {
    "gopher/short_document": _short,
    "gopher/hashes": lambda pool, rng: _every(clean(pool, rng, 20), 4, lambda x: f"#{x}"),
    "gopher/ellipses": lambda pool, rng: _every(clean(pool, rng, 20), 5, lambda x: f"{x.strip('.')}..."),
    "gopher/bullets": lambda pool, rng: _lines(pool, rng, rng.choice(["- {}", "\u2022 {}"])),
    "gopher/line_ellipses": lambda pool, rng: _lines(pool, rng, "{}", "..."),
    "gopher/short_words": _small_words,
    "gopher/long_words": _large_words,
    "gopher/alphabetic_words": _numbers,
    "gopher/stop_words": _without_stop_words,
    "gopher/repeated_lines": _repeated_lines,
    "gopher/repeated_paragraphs": _repeated_paragraphs,
    "gopher/top_2_gram": _top_2_gram,
    "gopher/repeated_5_gram": _repeated_5_gram,
    "c4/lorem_ipsum": _lorem,
    "c4/curly_bracket": _curly,
    "c4/few_sentences": _few_sentences,
    "c4/notices": _notices,
    "fineweb/line_punctuation": _open_lines,
    "fineweb/short_lines": _short_lines,
    "fineweb/repeated_characters": _repeated_characters,
    "fineweb/list": _list,
}
NOTICE_WORDS = ("JavaScript", "privacy policy", "terms of use", "use cookies")
NOTICES = (
    "Please enable JavaScript in the settings of your browser to see this page.",
    "This page uses cookies to give you the best experience that it can.",
    "By going on you agree to the terms of use and to the privacy policy of this site.",
    "Read the cookie policy of this site for what is done with your data.",
)
LINES = {  # of an otherwise clean document, which C4's rules remove
    "c4/javascript": lambda pool, rng: NOTICES[0],
    "c4/policy": lambda pool, rng: rng.choice(NOTICES[1:]),
    "c4/few_words": lambda pool, rng: f"{rng.choice(pool.words).capitalize()} {rng.choice(pool.words)}",
    "c4/long_word": lambda pool, rng: (
        "The value of it is " + "".join(rng.choice(pool.words) for _ in range(400))[:1010] + "."
    ),
}


ENDS = frozenset(".,?!)")


def near(text: str, similarity: float, pool: Pool, rng: random.Random) -> str:
    """The text with words replaced at random until its shingles of five have about this similarity to its own."""
    split, draw, common = text.split(" "), rng.random, pool.words
    total = len(split) - 4
    target = total * 2 * similarity / (1 + similarity)
    gone, left = bytearray(total), total
    while left > target:
        at = int(draw() * len(split))
        old = split[at]
        if "\n" in old:  # two words with the end of a paragraph between them
            continue
        start, end = max(0, at - 4), min(total, at + 1)
        left -= gone.count(0, start, end)
        gone[start:end] = b"\1" * (end - start)
        split[at] = common[int(draw() * len(common))] + (old[-1] if old[-1:] in ENDS else "")
    return " ".join(split)


def _random_case(text: str, rng: random.Random) -> str:
    return text.upper() if rng.random() < 0.3 else text.lower() if rng.random() < 0.5 else text.title()


def _random_spaces(text: str, rng: random.Random) -> str:
    return "  " + " ".join(x + rng.choice(["", "", "", " ", "\t"]) for x in text.split(" ")) + " \n"


def _compatible(text: str, rng: random.Random) -> str:
    """Other code points that NFKC makes the same: ligatures and no-break spaces."""
    return text.replace("fi", "\ufb01").replace("fl", "\ufb02").replace(" of ", "\u00a0of\u00a0")


FORMS: dict[str, Callable[[str, random.Random], str]] = {
    "case": _random_case, "whitespace": _random_spaces, "unicode": _compatible,
    "punctuation": lambda text, rng: text.replace(",", " ,").replace(". ", " ! ").replace("(", "[").replace(")", "]"),
}  # fmt: skip

ACCENTED = {"a": "caf\u00e9", "an": "na\u00efve", "for": "\u2013 f\u00fcr \u2013", "is": "\u201cis\u201d",
            "not": "don\u2019t", "this": "Z\u00fcrich\u2019s", "in": "\u00e0 la"}  # fmt: skip
_SLOPPY = [bytes([i]).decode("cp1252", "ignore") or chr(i) for i in range(256)]  # as browsers read the five gaps


def accented(text: str) -> str:
    """The text with letters and marks outside ASCII: what faults of encoding break."""
    return " ".join(ACCENTED.get(x, x) for x in text.split(" "))


def _misread(text: str, rng: random.Random | None = None) -> str:
    return "".join(_SLOPPY[x] for x in text.encode())


def _sprinkled(marks: str) -> Callable[[str, random.Random], str]:
    return lambda text, rng: _every(text, 9, lambda x: x[:1] + rng.choice(marks) + x[1:])


FAULTS: dict[str, Callable[[str, random.Random], str]] = {
    "latin-1": lambda text, rng: text.encode().decode("latin-1"),
    "cp1252": _misread,
    "cp1252 twice": lambda text, rng: _misread(_misread(text)),
    "nfd": lambda text, rng: unicodedata.normalize("NFD", text),
    "entities": lambda text, rng: html.escape(text).encode("ascii", "xmlcharrefreplace").decode(),
    "zero width": _sprinkled("\u200b\u200c\u200d\ufeff\u00ad"),
    "control": _sprinkled("\x00\x01\x08\x0b\x1f\x7f"),
}
