"""Answers of completions and chats, whole and in pieces."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from tutti.serve.request import Completion, Output, TokenLogprobs
from tutti.serve.server.protocol import Tool
from tutti.serve.server.tools import calls_in
from tutti.serve.text import Text

REASONS = {"stop": "stop", "length": "length", "deadline": "length", "cancelled": "stop", "error": "stop"}
CALLS, JSON = ("<tool_call>", "[TOOL_CALLS]"), "{["  # how tool calls begin, anywhere, and an answer that is one


def usage(outputs: Sequence[Output]) -> dict[str, Any]:
    """Numbers of tokens."""
    prompt = sum(len(x.prompt) + x.source for x in outputs)
    made = sum(len(c.tokens) for x in outputs for c in x.completions)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": sum(x.cached for x in outputs)}}  # fmt: skip


@dataclass
class Answer:
    """The answer to one body. spell: the bytes of a token. n: number of completions of each prompt."""

    model: str
    tokenizer: Any
    spell: Callable[[int], bytes]
    n: int
    kind: str
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = self.id or f"{'chatcmpl' if self.kind.startswith('chat') else 'cmpl'}-{uuid4().hex}"

    def frame(self, choices: list[dict[str, Any]], kind: str = "") -> dict[str, Any]:
        """The object around choices."""
        return {"id": self.id, "object": kind or self.kind, "created": self.created, "model": self.model,
                "choices": choices}  # fmt: skip

    def token(self, token: int) -> str:
        """The text of a token, or hexadecimal digits of one that is part of a character."""
        found = self.spell(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "".join(f"\\x{x:02x}" for x in found)


@dataclass
class TextAnswer(Answer):
    """Of `/v1/completions`. echo: whether the answer begins with the prompt."""

    kind: str = "text_completion"
    echo: bool = False

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """The complete answer."""
        choices = [self._choice(i * self.n + j, output, c, Sent())
                   for i, output in enumerate(outputs) for j, c in enumerate(output.completions)]  # fmt: skip
        return {**self.frame(choices), "usage": usage(outputs)}

    def piece(self, number: int, output: Output, completion: Completion, sent: Sent) -> Iterator[dict[str, Any]]:
        """What is new in a completion."""
        if len(completion.text) > len(sent.text) or completion.finish:
            yield self.frame([self._choice(number, output, completion, sent)])

    def _choice(self, number: int, output: Output, completion: Completion, sent: Sent) -> dict[str, Any]:
        """What the client does not have yet."""
        echoes = self.echo and not sent.begun
        text = self.tokenizer.decode(output.prompt, skip_special_tokens=True) if echoes else ""
        text, told = text + completion.text[len(sent.text) :], completion.logprobs[sent.tokens :]
        known: list[tuple[int, TokenLogprobs | None]] = [(x.token, x) for x in told]
        if echoes and (told or output.prompt_logprobs):  # nothing is known about the first token
            known = [(output.prompt[0], None), *((x.token, x) for x in output.prompt_logprobs), *known]
        if sent.growing is None:
            sent.growing = Text(self.tokenizer, () if self.echo else output.prompt, ())
        sent.text, sent.tokens = completion.text, len(completion.logprobs)
        return {"index": number, "text": text, "logprobs": self._logprobs(known, sent.growing),
                "finish_reason": REASONS.get(completion.finish)}  # fmt: skip

    def _logprobs(self, known: Sequence[tuple[int, TokenLogprobs | None]], growing: Text) -> dict[str, Any] | None:
        """known: about each token. growing: the text before them, to which they are appended."""
        if not known:
            return None
        offsets = []
        for token, _ in known:
            offsets.append(len(growing.text))
            growing.add([token])
        return {"tokens": [self.token(x) for x, _ in known], "token_logprobs": [x and x.logprob for _, x in known],
                "top_logprobs": [x and {self.token(t): p for t, p in x.top} for _, x in known],
                "text_offset": offsets}  # fmt: skip


@dataclass
class ChatAnswer(Answer):
    """Of `/v1/chat/completions`. tools: those that the answer may call."""

    kind: str = "chat.completion"
    tools: Sequence[Tool] = ()

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """The complete answer."""
        choices = [self._choice(j, c) for output in outputs for j, c in enumerate(output.completions)]
        return {**self.frame(choices), "usage": usage(outputs)}

    def _choice(self, number: int, completion: Completion) -> dict[str, Any]:
        text, calls = calls_in(completion.text, self.tools) if self.tools else (completion.text, [])
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
        if calls:
            message["tool_calls"] = calls
        told = self._logprobs(completion.logprobs)
        reason = "tool_calls" if calls else REASONS.get(completion.finish)
        return {"index": number, "message": message, "logprobs": told, "finish_reason": reason}

    def piece(self, number: int, output: Output, completion: Completion, sent: Sent) -> Iterator[dict[str, Any]]:
        """What is new in a completion."""
        if not sent.begun:
            yield self._delta(number, {"role": "assistant", "content": ""})
        text, calls = completion.text, []
        if self.tools and completion.finish:
            text, calls = calls_in(completion.text, self.tools)
        elif self.tools:
            text = text[: self._call_begins(text)]
        if len(text) > len(sent.text):
            told = self._logprobs(completion.logprobs[sent.tokens :])
            delta = {"content": text[len(sent.text) :]}
            sent.text, sent.tokens = text, len(completion.logprobs)
            yield self._delta(number, delta, told)
        if calls:
            yield self._delta(number, {"tool_calls": [{"index": i, **x} for i, x in enumerate(calls)]})
        if completion.finish:  # an end token has no text, and is reported here
            told, sent.tokens = self._logprobs(completion.logprobs[sent.tokens :]), len(completion.logprobs)
            yield self._delta(number, {}, told, "tool_calls" if calls else REASONS[completion.finish])

    def _call_begins(self, text: str) -> int:
        """Where a tool call may begin in an answer that is not complete: its text from there on is held back."""
        if not text.strip() or text.lstrip()[0] in JSON:
            return 0
        whole = [at for x in CALLS if (at := text.find(x)) >= 0]
        begun = [len(text) - n for x in CALLS for n in range(1, len(x)) if text.endswith(x[:n])]
        return len(text[: min([*whole, *begun], default=len(text))].rstrip())

    def _delta(self, number: int, delta: dict[str, Any], told: Any = None, reason: str | None = None) -> dict[str, Any]:
        choice = {"index": number, "delta": delta, "logprobs": told, "finish_reason": reason}
        return self.frame([choice], "chat.completion.chunk")

    def _logprobs(self, told: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not told:
            return None

        def one(token: int, logprob: float) -> dict[str, Any]:
            return {"token": self.token(token), "logprob": logprob, "bytes": list(self.spell(token))}

        return {"content": [{**one(x.token, x.logprob), "top_logprobs": [one(*y) for y in x.top]} for x in told]}


@dataclass
class Sent:
    """What a client has of a completion."""

    text: str = ""
    tokens: int = 0
    growing: Text | None = None  # that of the reported tokens
    begun: bool = False
    done: bool = False


def event(data: dict[str, Any] | str, name: str = "") -> str:
    """A server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"{f'event: {name}' + chr(10) if name else ''}data: {text}\n\n"
