"""Prompts of a server: how long one may be, and the threads that turn texts, images and sound into tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from fastapi import Request
from transformers import PreTrainedTokenizerFast

from tutti.serve.server.errors import Refused
from tutti.serve.server.service import Full
from tutti.serve.values import Json, JsonView, Tokenizer

T = TypeVar("T")
GONE = 499  # status of a request whose client has left
LOOK = 0.25  # seconds between looks whether a client is still there
LONG = 1 << 16  # characters of a text that is tokenized in a thread of its own, so that short ones do not wait for it
WAITING = 32 << 20  # characters of long texts that may wait
COMPOSED = 4  # characters that Unicode composes to one, at most
KEEPING = {"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation", "UnicodeScripts", "Sequence"}


class Prompts:
    """Turns texts into tokens. longest: tokens of a prompt with its output. limit: texts that may wait."""

    def __init__(self, tokenizer: Tokenizer, longest: int, limit: int):
        self.tokenizer, self.longest = tokenizer, longest
        self.short, self.long = _Pool(2, limit), _Pool(1, limit)
        self.characters, self.swallowing = _characters(tokenizer)
        self.direct = _is_direct(tokenizer)

    def check(self, text: str, name: str) -> None:
        """Raise Refused for a text that has more tokens than the engine holds, whatever they are. name: its field."""
        most = None if self.characters is None else self.longest * self.characters
        if most is not None and len(text) > most and not any(x in text for x in self.swallowing):
            raise Refused(400, f"{name} has {len(text)} characters; the {self.longest} tokens that the engine holds "
                               f"have at most {most}; shorten it", name)  # fmt: skip

    async def run(self, request: Request, size: int, function: Callable[[], T]) -> T:
        """`function()` in a thread; dropped when the client leaves. size: characters that it reads. Raises Full."""
        return await connected(request, (self.long if size > LONG else self.short).run(size, function))

    async def tokens(self, request: Request, prompt: str | Sequence[int], name: str, special: bool = True,
                     whole: bool = True) -> list[int]:  # fmt: skip
        """The tokens of a text. special: whether special tokens are added, such as one that begins a text. whole:
        whether it must fit into the engine."""
        if not isinstance(prompt, str):
            return list(prompt)
        if whole:
            self.check(prompt, name)
        try:
            return await self.run(request, len(prompt), lambda: self.encode(prompt, special))
        except (TypeError, UnicodeError) as error:
            raise Refused(400, f"{name} cannot be tokenized: {error}", name) from error

    def encode(self, text: str, special: bool) -> list[int]:
        """The tokens of a text, in the calling thread."""
        backend: Tokenizer = getattr(self.tokenizer, "backend_tokenizer", None)
        if self.direct and backend.truncation is None and backend.padding is None:  # it lets other threads run
            return backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return self.tokenizer(text, add_special_tokens=special)["input_ids"]

    def stop(self) -> None:
        """End the threads. What waits is dropped."""
        for pool in (self.short, self.long):
            pool.threads.shutdown(wait=False, cancel_futures=True)


class _Pool:
    """Threads. limit: how many functions may wait for them."""

    def __init__(self, threads: int, limit: int):
        self.threads, self.limit = ThreadPoolExecutor(threads, "tutti prompts"), limit
        self.unfinished: dict[Future, int] = {}  # with the characters that each reads

    async def run(self, size: int, function: Callable[[], T]) -> T:
        self.unfinished = {x: n for x, n in self.unfinished.items() if not x.done()}
        if len(self.unfinished) >= self.limit or sum(self.unfinished.values()) + size > WAITING:
            raise Full(5)
        future = self.threads.submit(function)
        self.unfinished[future] = size
        return await asyncio.wrap_future(future)


async def connected(request: Request, work: Awaitable[T]) -> T:
    """The result of some work, which is cancelled when the client leaves. Raises Refused then."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=LOOK))[0]:
            if await request.is_disconnected():
                raise Refused(GONE, "the client has left")
        return task.result()
    finally:
        task.cancel()


def _is_direct(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer is one of the `tokenizers` library whose class changes nothing about it."""
    names = "__call__", "_call_one", "_encode_plus", "_batch_encode_plus"
    return (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and not tokenizer.split_special_tokens
        and all(getattr(type(tokenizer), x, None) is getattr(PreTrainedTokenizerFast, x, None) for x in names)
    )


def _characters(tokenizer: Tokenizer) -> tuple[int | None, list[str]]:
    """The most characters of a text that one token stands for, if no text can have fewer tokens; None if there is no
    such number. And the special tokens that swallow space around them, whose texts have no such number."""
    backend: Tokenizer = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(backend, "to_str"):
        return None, []
    read: Json = json.loads(backend.to_str())
    model, vocabulary = read["model"], read["model"].get("vocab")
    if model.get("type") != "BPE" or not isinstance(vocabulary, dict) or not vocabulary:
        return None, []
    splits = _parts(read.get("pre_tokenizer"), "pretokenizers")
    bytes_ = {f"<0x{x:02X}>" for x in range(256)} if model.get("byte_fallback") else _byte_letters(splits)
    factor = 1
    for part in _parts(read.get("normalizer"), "normalizers"):
        factor *= _composes(part)
    if not bytes_ or not bytes_ <= vocabulary.keys() or not factor or not all(_keeps(x) for x in splits):
        return None, []
    added = read.get("added_tokens", ())
    swallowing = [x["content"] for x in added if x.get("lstrip") or x.get("rstrip")]
    return factor * max(len(x) for x in (*vocabulary, *(x["content"] for x in added))), swallowing


def _parts(part: JsonView | None, name: str) -> list[JsonView]:
    """The parts of a normalizer or a pre-tokenizer, one after the other."""
    if part is None:
        return []
    return [x for y in part[name] for x in _parts(y, name)] if part.get("type") == "Sequence" else [part]


def _byte_letters(splits: Sequence[JsonView]) -> set[str]:
    """The letters that stand for bytes, if texts are turned into bytes."""
    from tokenizers import pre_tokenizers

    return set(pre_tokenizers.ByteLevel.alphabet()) if any(x["type"] == "ByteLevel" for x in splits) else set()


def _keeps(split: JsonView) -> bool:
    """Whether a pre-tokenizer keeps all characters."""
    return split["type"] in KEEPING and split.get("behavior") != "Removed"


def _composes(normalizer: JsonView) -> int:
    """How many characters a normalizer turns into one, at most; 0 if any number."""
    kind = normalizer["type"]
    if kind in ("NFC", "NFKC"):
        return COMPOSED
    if kind == "Replace":
        pattern = normalizer.get("pattern", {}).get("String")
        return 1 if pattern is not None and len(normalizer.get("content", "")) >= len(pattern) else 0
    return 1 if kind in ("Prepend", "Lowercase", "NFD", "NFKD", "ByteLevel") else 0
