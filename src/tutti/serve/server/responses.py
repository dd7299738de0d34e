"""Answers of `/v1/responses`, whole and in pieces."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from uuid import uuid4

from tutti.serve.engine.request import Output
from tutti.serve.server import messages as chats
from tutti.serve.server.answers import event
from tutti.serve.server.errors import Refused, body_of
from tutti.serve.server.prompts import GONE
from tutti.serve.server.protocol import ResponseBody
from tutti.serve.values import Json

CUT = "incomplete"  # status of a response that has reached its length


def turns(body: ResponseBody) -> list[Json]:
    """The messages of a chat that a body stands for. Raises Refused for input that is no message."""
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    if isinstance(items, list):
        for i, x in enumerate(items):
            if isinstance(x, dict) and x.get("type") not in (None, "message"):
                raise Refused(400, f"input[{i}].type is {x['type']!r}; responses read messages only", "input")
        items = [{**x, "role": x.get("role") or "user"} if isinstance(x, dict) else x for x in items]
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    return [*system, *({key: x[key] for key in ("role", "content")} for x in chats.shaped(items, "input"))]


@dataclass
class ResponseAnswer:
    """The answer to a body. model: the name of the model."""

    body: ResponseBody
    model: str
    id: str = field(default_factory=lambda: f"resp_{uuid4().hex}")
    message: str = field(default_factory=lambda: f"msg_{uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, output: Output) -> Json:
        """The complete answer."""
        return self._shown(_status(output), output)

    async def events(self, first: Output, changes: AsyncIterator[dict[int, Output]]) -> AsyncIterator[str]:
        """Yield the events of a stream: the beginnings of the response, its message and the part of the message, what
        is new in its text, and then their ends, inside out. first: the first output. changes: those that follow."""
        numbers = count()

        def sent(kind: str, **fields: Any) -> str:
            return event({"type": kind, "sequence_number": next(numbers), **fields}, kind)

        text, output = "", first
        place = {"item_id": self.message, "output_index": 0, "content_index": 0}
        begun = self._shown("in_progress")
        yield sent("response.created", response=begun)
        yield sent("response.in_progress", response=begun)
        yield sent("response.output_item.added", output_index=0, item=self._message("in_progress", []))
        yield sent("response.content_part.added", **place, part=_part(""))
        try:
            while True:
                if len(output.text) > len(text):
                    delta, text = output.text[len(text) :], output.text
                    yield sent("response.output_text.delta", **place, delta=delta, logprobs=[])
                if output.finished:
                    break
                output = (await anext(changes))[0]
        except Exception as error:
            if not (isinstance(error, Refused) and error.status == GONE):
                reason = body_of(error)[1]["error"]
                shown = {"message": reason["message"], "param": reason["param"], "code": reason["type"]}
                yield sent("error", **shown)
                failure = {"code": "server_error", "message": reason["message"]}
                yield sent("response.failed", response={**begun, "status": "failed", "error": failure})
            return
        status, part = _status(output), _part(text)
        yield sent("response.output_text.done", **place, text=text, logprobs=[])
        yield sent("response.content_part.done", **place, part=part)
        yield sent("response.output_item.done", output_index=0, item=self._message(status, [part]))
        yield sent(f"response.{status}", response=self._shown(status, output))

    def _message(self, status: str, content: list[Json]) -> Json:
        return {"type": "message", "id": self.message, "role": "assistant", "status": status, "content": content}

    def _shown(self, status: str, output: Output | None = None) -> Json:
        body, counts = self.body, None
        if output:
            counts = {"input_tokens": len(output.prompt), "output_tokens": len(output.tokens),
                      "total_tokens": len(output.prompt) + len(output.tokens),
                      "input_tokens_details": {"cached_tokens": output.cached},
                      "output_tokens_details": {"reasoning_tokens": 0}}  # fmt: skip
        return {"id": self.id, "object": "response", "created_at": self.created, "status": status,
                "model": self.model, "output": [self._message(status, [_part(output.text)])] if output else [],
                "usage": counts, "parallel_tool_calls": False, "tool_choice": "auto", "tools": [],
                "metadata": body.metadata or {}, "error": None, "instructions": body.instructions,
                "temperature": body.temperature, "top_p": body.top_p,
                "incomplete_details": {"reason": "max_output_tokens"} if status == CUT else None}  # fmt: skip


def _part(text: str) -> Json:
    """The part of a message that is its text."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(output: Output) -> str:
    """The state of a finished response."""
    return CUT if output.completions[0].finish == "length" else "completed"
