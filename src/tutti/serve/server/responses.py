"""Answers of `/v1/responses`, whole and in pieces."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from tutti.serve.request import Output
from tutti.serve.server import messages as chats
from tutti.serve.server.answers import event
from tutti.serve.server.errors import Refused, body_of
from tutti.serve.server.prompts import GONE
from tutti.serve.server.protocol import ResponseBody

CUT = "incomplete"  # status of a response that has reached its length


def turns(body: ResponseBody) -> list[dict[str, Any]]:
    """The messages of a chat that a body stands for. Raises Refused for input that is no message."""
    given = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    if isinstance(given, list):
        for i, x in enumerate(given):
            if isinstance(x, dict) and x.get("type") not in (None, "message"):
                raise Refused(400, f"input[{i}].type is {x['type']!r}; responses read messages only", "input")
        given = [{**x, "role": x.get("role") or "user"} if isinstance(x, dict) else x for x in given]
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    return [*system, *({key: x[key] for key in ("role", "content")} for x in chats.shaped(given, "input"))]


@dataclass
class ResponseAnswer:
    """The answer to a body. model: the name of the model."""

    body: ResponseBody
    model: str
    id: str = field(default_factory=lambda: f"resp_{uuid4().hex}")
    message: str = field(default_factory=lambda: f"msg_{uuid4().hex}")

    def whole(self, output: Output) -> dict[str, Any]:
        """The complete answer."""
        return self._shown(output.text, _status(output), output)

    async def events(self, first: Output, changes: AsyncIterator[dict[int, Output]]) -> AsyncIterator[str]:
        """The events of a stream. first: the first output. changes: those that follow."""
        number, text, output = 0, "", first
        begun = self._shown("", "in_progress", None)
        yield event({"type": "response.created", "sequence_number": 0, "response": begun}, "response.created")
        try:
            while True:
                if len(output.text) > len(text):
                    number += 1
                    delta = {"type": "response.output_text.delta", "sequence_number": number, "item_id": self.message,
                             "output_index": 0, "content_index": 0, "delta": output.text[len(text) :]}  # fmt: skip
                    text = output.text
                    yield event(delta, "response.output_text.delta")
                if output.finished:
                    break
                output = (await anext(changes))[0]
        except Exception as error:
            if not (isinstance(error, Refused) and error.status == GONE):
                yield event({"type": "error", "sequence_number": number + 1, **body_of(error)[1]["error"]}, "error")
            return
        kind = f"response.{_status(output)}"
        done = {"type": kind, "sequence_number": number + 1, "response": self._shown(text, _status(output), output)}
        yield event(done, kind)

    def _shown(self, text: str, status: str, output: Output | None) -> dict[str, Any]:
        body, content = self.body, [{"type": "output_text", "text": text, "annotations": []}]
        message = {"type": "message", "id": self.message, "role": "assistant", "status": status, "content": content}
        counts = output and {"input_tokens": len(output.prompt), "output_tokens": len(output.tokens),
                             "total_tokens": len(output.prompt) + len(output.tokens),
                             "input_tokens_details": {"cached_tokens": output.cached},
                             "output_tokens_details": {"reasoning_tokens": 0}}  # fmt: skip
        return {"id": self.id, "object": "response", "created_at": int(time.time()), "status": status,
                "model": self.model, "output": [message] if output else [], "usage": counts or None,
                "parallel_tool_calls": False, "tool_choice": "auto", "tools": [],
                "metadata": body.metadata or {}, "error": None, "instructions": body.instructions,
                "temperature": body.temperature, "top_p": body.top_p,
                "incomplete_details": {"reason": "max_output_tokens"} if status == CUT else None}  # fmt: skip


def _status(output: Output) -> str:
    """The state of a finished response."""
    return CUT if output.completions[0].finish == "length" else "completed"
