"""Text of generated tokens, as it grows, and where it must end."""

from __future__ import annotations

from collections.abc import Sequence

from tutti.serve.values import Tokenizer

UNFINISHED = "\ufffd"  # what tokenizers print for bytes that are not a character yet


class Text:
    """The text of one continuation. A token's text depends on the tokens around it, so a window of them is decoded.

    stop: texts that end it. include: whether it ends after them. skip: whether special tokens are left out.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str], include: bool = False, skip: bool = True
    ):
        self.tokenizer, self.stop, self.include, self.skip = tokenizer, stop, include, skip
        self.tokens: list[int] = list(prompt[-8:])
        self.begin, self.read = 0, len(self.tokens)  # the window, and how much of it is in `text`
        self.text = ""

    def add(self, tokens: Sequence[int]) -> bool:
        """Append tokens. Whether the text contains a stop text; it then ends before it."""
        self.tokens += tokens
        return self._grow(last=False)

    def end(self) -> bool:
        """No more tokens come: characters that are still incomplete are printed as they are."""
        return self._grow(last=True)

    def _grow(self, last: bool) -> bool:
        before_text = self._decoded(self.tokens[self.begin : self.read])
        now = self._decoded(self.tokens[self.begin :])
        if len(now) <= len(before_text) or (now.endswith(UNFINISHED) and not last):
            return False
        before, self.text = len(self.text), self.text + now[len(before_text) :]
        self.begin, self.read = self.read, len(self.tokens)
        stops = [(at, len(stop)) for stop in self.stop
                 if (at := self.text.find(stop, max(0, before - len(stop) + 1))) >= 0]  # fmt: skip
        if stops:
            at, length = min(stops)
            self.text = self.text[: at + length if self.include else at]
        return bool(stops)

    def _decoded(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=self.skip)

    @property
    def safe(self) -> str:
        """The text that no stop text can take back."""
        last = self.text[-max(map(len, self.stop), default=0) :] if self.stop else ""
        unsafe = max((n for stop in self.stop for n in range(1, len(stop)) if last.endswith(stop[:n])), default=0)
        return self.text[: len(self.text) - unsafe]
