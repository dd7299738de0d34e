"""Constrained decoding: which tokens may follow, so that the output matches a schema, regex or grammar.

The grammars are those of `llguidance`.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from tutti.serve.constraints import expansion
from tutti.serve.constraints.trial import compiled
from tutti.serve.values import JsonValue, Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

LARGEST = 1 << 17  # characters; the time to compile grows with their square
CACHE_BYTES = 256 << 20  # bytes of compiled constraints
LEAST = 64 << 10  # bytes that a compiled constraint counts for at least
REFUSALS = 1024  # constraints whose refusal is remembered

Key = tuple[str, bytes]


class Constraint:
    """What one sequence has matched so far. The matcher is copied when it first changes.

    own: whether no other constraint has the matcher.
    """

    def __init__(self, matcher: LLMatcher, size: int, own: bool = True):
        self.matcher, self.size, self.own = matcher, size, own

    def allowed(self) -> Tensor:
        """The tokens that may follow: a bool mask of the vocabulary, (size,)."""
        import llguidance.torch as guide

        self._copy()
        bits = guide.allocate_token_bitmask(1, self.size)
        guide.fill_next_token_bitmask(self.matcher, bits)
        each = (bits[0, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
        return each.flatten()[: self.size].bool()

    def take(self, token: int) -> bool:
        """Note the chosen token. Whether the output is complete."""
        self._copy()
        self.matcher.consume_token(token)
        if self.matcher.is_error():
            raise ValueError(f"no token was allowed that continues the grammar: {self.matcher.get_error()}")
        return self.matcher.is_stopped()

    def fork(self) -> Constraint:
        """A copy for a second sequence."""
        return Constraint(self.matcher.deep_copy() if self.own else self.matcher, self.size, self.own)

    def _copy(self) -> None:
        if not self.own:
            self.matcher, self.own = self.matcher.deep_copy(), True


class Constraints:
    """Makes constraints for a tokenizer. size: size of the model's vocabulary. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer, size: int, ends: list[int]):
        self.tokenizer, self.size, self.ends = tokenizer, size, ends
        self.lock = threading.Lock()
        self.cache: OrderedDict[Key, tuple[Constraint, int]] = OrderedDict()  # with their bytes, least recent first
        self.used: WeakValueDictionary[Key, Constraint] = WeakValueDictionary()
        self.refusals: OrderedDict[Key, str] = OrderedDict()
        self.bytes = self.compilations = 0

    @cached_property
    def vocabulary(self) -> LLTokenizer:
        """The tokenizer, as `llguidance` has it."""
        try:
            import llguidance.hf
            import llguidance.torch  # here, because the first import takes half a second
        except ImportError as error:
            raise ValueError("constrained decoding needs llguidance: pip install 'tutti[serve]'") from error
        if self.tokenizer is None:
            raise ValueError("constrained decoding needs the model's tokenizer")
        return llguidance.hf.from_tokenizer(self.tokenizer, n_vocab=self.size, eos_token=self.ends or None)

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token, which may be a part of a character."""
        try:
            return self.vocabulary.decode_bytes([token])
        except ValueError:  # a tokenizer that llguidance does not know
            return self.tokenizer.decode([token]).encode()

    def make(self, kind: str, what: JsonValue, size: int = LEAST) -> Constraint:
        """A constraint of a kind ("schema", "regex", "grammar"), compiled unless it is cached. size: its bytes.

        Raises ValueError if it is malformed or large.
        """
        text = text_of(kind, what)
        key = key_of(kind, text)
        return self.cached(key) or self.compile(kind, text, key, size)

    def compile(self, kind: str, text: str, key: Key, size: int) -> Constraint:
        """A constraint from its text, which is kept for later requests."""
        vocabulary, size = self.vocabulary, max(size, LEAST)
        constraint = Constraint(compiled(vocabulary, kind, text), self.size, own=False)
        with self.lock:
            self.compilations += 1
            self.bytes += size - (self.cache[key][1] if key in self.cache else 0)
            self.cache[key], self.used[key] = (constraint, size), constraint
            while self.bytes > CACHE_BYTES:
                self.bytes -= self.cache.popitem(last=False)[1][1]
        return constraint

    def cached(self, key: Key) -> Constraint | None:
        """A constraint that is compiled, if it is. Raises ValueError if it was refused."""
        with self.lock:
            if refusal := self.refusals.get(key):
                raise ValueError(refusal)
            if key in self.cache:
                self.cache.move_to_end(key)
            return self.used.get(key)

    def refuse(self, key: Key, why: str) -> None:
        """Remember that a constraint cannot be compiled."""
        with self.lock:
            self.refusals[key] = why
            if len(self.refusals) > REFUSALS:
                self.refusals.popitem(last=False)


def text_of(kind: str, what: JsonValue) -> str:
    """The text of a constraint. Raises ValueError for what is too large to be tried."""
    if kind == "schema":
        expansion.check(what)
        what = json.dumps(what)
    if len(what) > LARGEST:
        raise ValueError(f"this {kind} has {len(what)} characters; at most {LARGEST} can be compiled")
    return what


def key_of(kind: str, text: str) -> Key:
    """What identifies a constraint."""
    return kind, hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
