"""Answers of completions and chats, whole and in pieces."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any
from uuid import uuid4

from tutti.serve.request import Completion, Output, TokenLogprobs
from tutti.serve.server.protocol import Tool
from tutti.serve.server.tools import calls_in

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
    """The answer to one body. n: number of completions of each prompt."""

    model: str
    tokenizer: Any
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
        """The text of a token."""
        return self.tokenizer.decode([token])


@dataclass
class TextAnswer(Answer):
    """Of `/v1/completions`. echo: whether the answer begins with the prompt."""

    kind: str = "text_completion"
    echo: bool = False

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """The complete answer."""
        choices = [self._choice(i * self.n + j, output, c, 0, 0)
                   for i, output in enumerate(outputs) for j, c in enumerate(output.completions)]  # fmt: skip
        return {**self.frame(choices), "usage": usage(outputs)}

    def piece(self, number: int, output: Output, completion: Completion, sent: Sent) -> Iterator[dict[str, Any]]:
        """What is new in a completion."""
        if len(completion.text) > len(sent.text) or completion.finish:
            made = self.frame([self._choice(number, output, completion, len(sent.text), sent.tokens)])
            sent.seen(completion)
            yield made

    def _choice(self, number: int, output: Output, completion: Completion, text: int, tokens: int) -> dict[str, Any]:
        echoed = self.tokenizer.decode(output.prompt, skip_special_tokens=True) if self.echo and not text else ""
        told: list[TokenLogprobs | int] = list(completion.logprobs[tokens:])
        if self.echo and not text and told:
            told = [output.prompt[0], *output.prompt_logprobs, *told]
        return {"index": number, "text": echoed + completion.text[text:], "logprobs": self._logprobs(told),
                "finish_reason": REASONS.get(completion.finish)}  # fmt: skip

    def _logprobs(self, told: Sequence[TokenLogprobs | int]) -> dict[str, Any] | None:
        """told: a number is the first token of a prompt, about which nothing is known."""
        if not told:
            return None
        names = [self.token(x if isinstance(x, int) else x.token) for x in told]
        known = [None if isinstance(x, int) else x for x in told]
        offsets = list(accumulate(map(len, names[:-1]), initial=0))
        return {"tokens": names, "token_logprobs": [x and x.logprob for x in known],
                "top_logprobs": [x and {self.token(t): p for t, p in x.top} for x in known],
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
        if completion.finish:
            yield self._delta(number, {}, None, "tool_calls" if calls else REASONS[completion.finish])

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
            text = self.token(token)
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        return {"content": [{**one(x.token, x.logprob), "top_logprobs": [one(*y) for y in x.top]} for x in told]}


@dataclass
class Sent:
    """What a client has of a completion."""

    text: str = ""
    tokens: int = 0
    begun: bool = False
    done: bool = False

    def seen(self, completion: Completion) -> None:
        """The client has all of it now."""
        self.text, self.tokens = completion.text, len(completion.logprobs)


def event(data: dict[str, Any] | str, name: str = "") -> str:
    """A server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"{f'event: {name}' + chr(10) if name else ''}data: {text}\n\n"
