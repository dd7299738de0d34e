"""Constrained decoding: which tokens may follow, so that the output matches a schema, regex or grammar.

The grammars are those of `llguidance`.
"""

from __future__ import annotations

import json
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

LARGEST = 1 << 17  # characters; the time to compile grows with their square, to a few seconds here
KEPT = 64  # compiled constraints


class Constraint:
    """What one sequence has matched so far."""

    def __init__(self, matcher: Any, size: int):
        self.matcher, self.size = matcher, size

    def allowed(self) -> Tensor:
        """The tokens that may follow: a bool mask of the vocabulary, (size,)."""
        import llguidance.torch as guide

        bits = guide.allocate_token_bitmask(1, self.size)
        guide.fill_next_token_bitmask(self.matcher, bits)
        each = (bits[0, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
        return each.flatten()[: self.size].bool()

    def take(self, token: int) -> bool:
        """Note the chosen token. Whether the output is complete."""
        self.matcher.consume_token(token)
        if self.matcher.is_error():
            raise ValueError(f"no token was allowed that continues the grammar: {self.matcher.get_error()}")
        return self.matcher.is_stopped()

    def fork(self) -> Constraint:
        """A copy for a second sequence."""
        return Constraint(self.matcher.deep_copy(), self.size)


class Constraints:
    """Makes constraints for a tokenizer. size: of the model's vocabulary."""

    def __init__(self, tokenizer: Any, size: int, ends: list[int]):
        self.tokenizer, self.size, self.ends = tokenizer, size, ends
        self._compiled = lru_cache(KEPT)(self._compile)

    @cached_property
    def vocabulary(self) -> Any:
        """The tokenizer, as `llguidance` has it."""
        try:
            import llguidance.hf
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

    def make(self, kind: str, what: Any) -> Constraint:
        """A constraint of a kind ("schema", "regex", "grammar"). May be called by any thread: the last `KEPT` are kept,
        so that an engine need not compile what another thread has made. Raises ValueError if it is malformed or large.
        """
        return self._compiled(kind, json.dumps(what) if kind == "schema" else what).fork()

    def _compile(self, kind: str, text: str) -> Constraint:
        if len(text) > LARGEST:
            raise ValueError(f"this {kind} has {len(text)} characters; at most {LARGEST} can be compiled")
        vocabulary = self.vocabulary
        from llguidance import LLMatcher

        if kind == "schema":  # without free white space, in which small models get lost
            grammar = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": False})
        else:
            make = {"regex": LLMatcher.grammar_from_regex, "grammar": LLMatcher.grammar_from_lark}[kind]
            grammar = make(text)
        matcher = LLMatcher(vocabulary, grammar)
        if matcher.is_error():
            raise ValueError(f"this {kind} cannot be used: {matcher.get_error()}")
        return Constraint(matcher, self.size)
