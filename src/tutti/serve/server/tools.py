"""Tool calls: how a chat makes the model call functions, and how calls are found in its answer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from tutti.serve.server.errors import Refused
from tutti.serve.server.protocol import Tool

# How models write calls: Hermes and Qwen in tags, Mistral after a marker, Llama as plain JSON.
TAGGED = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
MARKED = re.compile(r"\[TOOL_CALLS\]\s*(\[.*\])", re.DOTALL)


def forced(tools: Sequence[Tool], choice: str | dict[str, Any] | None) -> dict[str, Any] | None:
    """The JSON schema of an answer that must call a tool; None if it need not. Raises Refused for unknown tools."""
    if choice in (None, "auto", "none"):
        return None
    allowed = list(tools)
    if isinstance(choice, dict):
        name = choice.get("function", {}).get("name")
        allowed = [x for x in tools if x.function.name == name]
        if not allowed:
            raise Refused(400, f"tool_choice names {name!r}, which is not among the tools", "tool_choice")
    elif choice != "required":
        raise Refused(400, f"tool_choice {choice!r}: expected auto, none, required or a function", "tool_choice")
    if not allowed:
        raise Refused(400, "tool_choice needs tools", "tool_choice")
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": x.function.name},
                "arguments": x.function.parameters or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for x in allowed
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def calls_in(text: str, tools: Sequence[Tool]) -> tuple[str, list[dict[str, Any]]]:
    """The answer without its calls, and the calls as the OpenAI API writes them."""
    names = {x.function.name for x in tools}
    if found := TAGGED.findall(text):
        rest, written = TAGGED.sub("", text).strip(), [_loaded(x) for x in found]
    elif match := MARKED.search(text):
        rest, written = text[: match.start()].strip(), _loaded(match[1]) or []
    else:
        rest, one = "", _loaded(text.strip())
        written = one if isinstance(one, list) else [one]
    calls = [x for x in written if isinstance(x, dict) and x.get("name") in names]
    if not calls or len(calls) != len(written):
        return text, []
    return rest, [_call(x) for x in calls]


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _call(found: dict[str, Any]) -> dict[str, Any]:
    arguments = found.get("arguments", found.get("parameters", {}))
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function",
            "function": {"name": found["name"], "arguments": written}}  # fmt: skip
