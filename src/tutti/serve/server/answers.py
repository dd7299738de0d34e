"""Answers of completions and chats, whole and in pieces."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from uuid import uuid4

from tutti.serve.engine.request import Completion, Output, TokenLogprobs
from tutti.serve.engine.text import Text
from tutti.serve.server.protocol import Tool
from tutti.serve.server.tools import TAG, Calls
from tutti.serve.values import Json, Tokenizer

REASONS = {"stop": "stop", "length": "length", "deadline": "length", "cancelled": "stop", "error": "stop"}
CALLS, JSON = (TAG, "[TOOL_CALLS]"), "{["  # how tool calls begin, anywhere, and an answer that is one


def usage(outputs: Sequence[Output]) -> Json:
    """Numbers of tokens."""
    prompt = sum(len(x.prompt) + x.source for x in outputs)
    completion = sum(len(c.tokens) for x in outputs for c in x.completions)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(x.cached for x in outputs)}}  # fmt: skip


@dataclass
class Answer:
    """The answer to one body. spell: the bytes of a token. n: number of completions of each prompt. numbers: whether a
    token is shown as its number. ids, prompts: whether the tokens, and the logprobs of prompts, are part of the answer.
    """

    model: str
    tokenizer: Tokenizer
    spell: Callable[[int], bytes]
    n: int
    kind: str
    id: str = ""
    numbers: bool = False
    ids: bool = False
    prompts: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = self.id or f"{'chatcmpl' if self.kind.startswith('chat') else 'cmpl'}-{uuid4().hex}"

    def frame(self, choices: list[Json], kind: str = "") -> Json:
        """The object around choices."""
        return {"id": self.id, "object": kind or self.kind, "created": self.created, "model": self.model,
                "choices": choices}  # fmt: skip

    def token(self, token: int) -> str:
        """The text of a token, or hexadecimal digits of one that is part of a character."""
        if self.numbers:
            return f"token_id:{token}"
        spelling = self.spell(token)
        try:
            return spelling.decode()
        except UnicodeDecodeError:
            return "".join(f"\\x{x:02x}" for x in spelling)

    def prompt_logprobs(self, output: Output) -> Json:
        """The log-probabilities of a prompt's tokens, if they are part of the answer: none of the first."""
        if not self.prompts:
            return {}

        def shown(x: TokenLogprobs) -> Json:
            ranks = {token: (rank, logprob) for rank, (token, logprob) in enumerate(x.top, 1)}
            ranks.setdefault(x.token, (x.rank, x.logprob))
            return {str(token): {"logprob": logprob, "rank": rank, "decoded_token": self.token(token)}
                    for token, (rank, logprob) in ranks.items()}  # fmt: skip

        return {"prompt_logprobs": [None, *map(shown, output.prompt_logprobs)]}


@dataclass
class TextAnswer(Answer):
    """The answer of `/v1/completions`. echo: the prompts with which answers begin, as they were given; empty if they do
    not.
    logprobs: whether tokens are reported with their log-probabilities."""

    kind: str = "text_completion"
    logprobs: bool = False
    echo: Sequence[str | Sequence[int]] = ()

    def whole(self, outputs: Sequence[Output]) -> Json:
        """The complete answer."""
        choices = [{**self._choice(i * self.n + j, output, c, Sent()), **self.prompt_logprobs(output)}
                   for i, output in enumerate(outputs) for j, c in enumerate(output.completions)]  # fmt: skip
        return {**self.frame(choices), "usage": usage(outputs)}

    def piece(self, number: int, output: Output, completion: Completion, sent: Sent) -> Iterator[Json]:
        """What is new in a completion."""
        if len(completion.text) > len(sent.text) or completion.finish:
            yield self.frame([self._choice(number, output, completion, sent)])

    def _choice(self, number: int, output: Output, completion: Completion, sent: Sent) -> Json:
        """What the client does not have yet."""
        prompt = self.echo[number // self.n] if self.echo else None
        text, growing = "", sent.growing
        if growing is None:
            before = () if self.echo else output.prompt
            growing = sent.growing = Text(self.tokenizer, before, (), skip=prompt is None or isinstance(prompt, str))
        if prompt is not None and not sent.begun:
            text = prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt, skip_special_tokens=False)
        new = completion.logprobs[sent.tokens :]
        reported: list[tuple[int, TokenLogprobs | None]] = [(x.token, x) for x in new]
        if prompt is not None and not sent.begun and self.logprobs:  # the first has none
            reported = [(output.prompt[0], None), *((x.token, x) for x in output.prompt_logprobs), *reported]
        ids = {}
        if self.ids:
            ids = {
                "token_ids": completion.tokens[sent.ids :],
                "prompt_token_ids": None if sent.begun else output.prompt,
            }
        text += completion.text[len(sent.text) :]
        sent.text, sent.tokens, sent.ids = completion.text, len(completion.logprobs), len(completion.tokens)
        return {"index": number, "text": text, "logprobs": self._logprobs(reported, growing), **ids,
                "finish_reason": REASONS.get(completion.finish)}  # fmt: skip

    def _logprobs(self, reported: Sequence[tuple[int, TokenLogprobs | None]], growing: Text) -> Json | None:
        """known: about each token. growing: the text before them, to which they are appended.

        The most likely tokens are followed by the token itself where it is not among them, as the APIs of OpenAI and
        vLLM have it: up to one more than was asked for.
        """
        if not reported:
            return None
        offsets = []
        for token, _ in reported:
            offsets.append(len(growing.text))
            growing.add([token])
        return {"tokens": [self.token(x) for x, _ in reported],
                "token_logprobs": [x and x.logprob for _, x in reported],
                "top_logprobs": [x and dict([*((self.token(t), p) for t, p in x.top),
                                             (self.token(x.token), x.logprob)]) for _, x in reported],
                "text_offset": offsets}  # fmt: skip


@dataclass
class ChatAnswer(Answer):
    """The answer of `/v1/chat/completions`.

    tools: those that the answer may call. must: whether it must call one. parallel: whether it may have several calls.
    legacy: whether calls are shown as `function_call`. role: role of the message. prefix: text with which it begins.
    """

    kind: str = "chat.completion"
    tools: Sequence[Tool] = ()
    must: bool = False
    parallel: bool = True
    legacy: bool = False
    role: str = "assistant"
    prefix: str = ""

    def whole(self, outputs: Sequence[Output]) -> Json:
        """The complete answer."""
        choices = [self._choice(j, c) for output in outputs for j, c in enumerate(output.completions)]
        ids = {"prompt_token_ids": outputs[0].prompt} if self.ids else {}
        return {**self.frame(choices), "usage": usage(outputs), **self.prompt_logprobs(outputs[0]), **ids}

    def _choice(self, number: int, completion: Completion) -> Json:
        text, calls = completion.text, self._calls()
        if self.tools:
            text = calls.read(text, last=True) or ""
        message: Json = {"role": self.role, "content": self.prefix + text or (None if calls.calls else "")}
        if calls.calls:
            shown = [x.shown() for x in calls.calls]
            message |= {"function_call": shown[0]["function"]} if self.legacy else {"tool_calls": shown}
        logprobs = self._logprobs(completion.logprobs)
        return {"index": number, "message": message, "logprobs": logprobs, **self._ids(completion, 0),
                "finish_reason": self._reason(completion, calls)}  # fmt: skip

    def _calls(self) -> Calls:
        return Calls(self.tools, self.must, self.parallel and not self.legacy)

    def _ids(self, completion: Completion, first: int) -> Json:
        return {"token_ids": completion.tokens[first:]} if self.ids else {}

    def _reason(self, completion: Completion, calls: Calls) -> str | None:
        """Why a completion ended; a call that was cut is not complete."""
        if not calls.calls or (REASONS[completion.finish] == "length" and not calls.calls[-1].complete):
            return REASONS.get(completion.finish)
        return "function_call" if self.legacy else "tool_calls"

    def piece(self, number: int, output: Output, completion: Completion, sent: Sent) -> Iterator[Json]:
        """What is new in a completion."""
        if not sent.begun:
            first = {"prompt_token_ids": output.prompt} if self.ids else {}
            yield {**self._delta(number, {"role": self.role, "content": self.prefix}), **first}
        text, calls = completion.text, sent.calls
        if self.tools:
            calls = sent.calls = calls or self._calls()
            rest = calls.read(text, last=bool(completion.finish))
            text = text[: self._call_begins(text)] if rest is None else rest
        if len(text) > len(sent.text):
            yield self._delta(number, {"content": text[len(sent.text) :]}, completion, sent)
            sent.text = text
        for delta in self._call_deltas(calls, sent) if calls else ():
            yield self._delta(number, delta, completion, sent)
        if completion.finish:  # an end token has no text, and is reported here
            yield self._delta(number, {}, completion, sent, self._reason(completion, calls or self._calls()))

    def _call_deltas(self, calls: Calls, sent: Sent) -> Iterator[Json]:
        """What is new in the calls: the name of each, then pieces of its arguments."""
        for i, call in enumerate(calls.calls):
            new = i >= len(sent.arguments)
            if new:
                sent.arguments.append(0)
            arguments = call.arguments[sent.arguments[i] :]
            if new or arguments:
                shown = call.shown() if new else {"function": {}}
                shown["function"]["arguments"] = arguments
                sent.arguments[i] += len(arguments)
                yield {"function_call": shown["function"]} if self.legacy else {"tool_calls": [{"index": i, **shown}]}

    def _call_begins(self, text: str) -> int:
        """Where a tool call may begin in an answer that is not complete: its text from there on is held back."""
        if not text.strip() or text.lstrip()[0] in JSON:
            return 0
        whole = [at for x in CALLS if (at := text.find(x)) >= 0]
        begun = [len(text) - n for x in CALLS for n in range(1, len(x)) if text.endswith(x[:n])]
        return len(text[: min([*whole, *begun], default=len(text))].rstrip())

    def _delta(self, number: int, delta: Json, completion: Completion | None = None, sent: Sent | None = None,
               reason: str | None = None) -> Json:  # fmt: skip
        """An event. With a completion, it has the tokens of which the client has been told nothing yet."""
        logprobs, ids = None, {}
        if completion and sent:
            logprobs, ids = self._logprobs(completion.logprobs[sent.tokens :]), self._ids(completion, sent.ids)
            sent.tokens, sent.ids = len(completion.logprobs), len(completion.tokens)
        choice = {"index": number, "delta": delta, "logprobs": logprobs, **ids, "finish_reason": reason}
        return self.frame([choice], "chat.completion.chunk")

    def _logprobs(self, reported: Sequence[TokenLogprobs]) -> Json | None:
        if not reported:
            return None

        def one(token: int, logprob: float) -> Json:
            return {"token": self.token(token), "logprob": logprob, "bytes": list(self.spell(token))}

        return {"content": [{**one(x.token, x.logprob), "top_logprobs": [one(*y) for y in x.top]} for x in reported]}


@dataclass
class Sent:
    """What a client has of a completion."""

    text: str = ""
    tokens: int = 0  # that were reported with their logprobs
    ids: int = 0  # that were sent as numbers
    growing: Text | None = None  # that of the reported tokens
    calls: Calls | None = None
    arguments: list[int] = field(default_factory=list)  # characters of the arguments of each call
    begun: bool = False
    done: bool = False


def event(data: Json | str, name: str = "") -> str:
    """A server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"{f'event: {name}' + chr(10) if name else ''}data: {text}\n\n"
