"""Tool calls: how a chat makes the model call functions, and how calls are found in its answer as it grows."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import uuid4

from tutti.serve.server.errors import Refused
from tutti.serve.server.protocol import Tool
from tutti.serve.values import Json, JsonValue

# How models write calls: Hermes and Qwen in tags, Mistral after a marker, Llama as plain JSON.
TAG = "<tool_call>"
TAGGED = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
MARKED = re.compile(r"\[TOOL_CALLS\]\s*(\[.*\])", re.DOTALL)
NAME = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")')
HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
VALUES = {"const", "enum", "default", "examples", "example"}  # keywords of JSON schemas whose values are no schemas
NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}  # names, then schemas


def chosen(tools: Sequence[Tool], choice: JsonValue) -> tuple[list[Tool], bool]:
    """The tools that an answer may call, and whether it must call one. Raises Refused for unknown tools."""
    if choice in (None, "auto"):
        return list(tools), False
    if choice == "none":
        return [], False
    must, names = True, None
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        listed = allowed.get("tools") if isinstance(allowed, dict) else None
        if not isinstance(listed, list) or allowed.get("mode", "auto") not in ("auto", "required"):
            raise Refused(400, "tool_choice.allowed_tools needs tools and a mode, auto or required", "tool_choice")
        must, names = allowed.get("mode") == "required", [_name(x) for x in listed]
    elif isinstance(choice, dict):
        names = [_name(choice)]
    elif choice != "required":
        raise Refused(400, f"tool_choice {choice!r}: expected auto, none, required or a function", "tool_choice")
    available = [x.function.name for x in tools]
    if unknown := [x for x in names or () if x not in available]:
        raise Refused(400, f"tool_choice names {unknown[0]!r}, which is not among the tools", "tool_choice")
    allowed = [x for x in tools if names is None or x.function.name in names]
    if must and not allowed:
        raise Refused(400, "tool_choice needs tools", "tool_choice")
    return allowed, must


def _name(choice: JsonValue) -> JsonValue:
    """The name of a function that a choice names, in the words of chats or of responses."""
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def forced(tools: Sequence[Tool]) -> Json:
    """The JSON schema of an answer that must call one of the tools."""
    calls = []
    for i, tool in enumerate(tools):
        place = "#/properties/arguments" if len(tools) == 1 else f"#/anyOf/{i}/properties/arguments"
        arguments = _moved(tool.function.parameters or {"type": "object"}, place)
        calls.append({"type": "object", "required": ["name", "arguments"], "additionalProperties": False,
                      "properties": {"name": {"const": tool.function.name}, "arguments": arguments}})  # fmt: skip
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _moved(schema: JsonValue, place: str, names: bool = False) -> JsonValue:
    """A schema as a part of another, at a place: its references to itself begin there. names: whether the keys are
    names of schemas, and no keywords."""
    if isinstance(schema, list):
        return [_moved(x, place) for x in schema]
    if not isinstance(schema, dict):
        return schema
    if names:
        return {key: _moved(x, place) for key, x in schema.items()}
    moved = {}
    for key, x in schema.items():
        if key == "$ref" and isinstance(x, str) and (x == "#" or x.startswith("#/")):
            moved[key] = place + x[1:]
        else:
            moved[key] = x if key in VALUES else _moved(x, place, key in NAMED)
    return moved


@dataclass
class ToolCall:
    """A call in an answer. arguments: their JSON as far as it is written. complete: whether that is all."""

    name: str
    arguments: str = ""
    complete: bool = False
    id: str = field(default_factory=lambda: f"call_{uuid4().hex[:24]}")

    def shown(self) -> Json:
        """The call as the OpenAI API writes it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class Calls:
    """Finds the calls of an answer as it grows.

    tools: those that may be called. must: whether the answer is a call and nothing else. parallel: whether it may have
    more than one.
    """

    def __init__(self, tools: Sequence[Tool], must: bool = False, parallel: bool = True):
        self.names, self.must, self.parallel = [x.function.name for x in tools], must, parallel
        self.calls: list[ToolCall] = []
        self.at = self.depth = 0  # what is read, and open braces of the call that is being written
        self.quoted = self.escaped = False

    def read(self, text: str, last: bool) -> str | None:
        """Read the answer so far; the text that is none of its calls when it is complete. last: whether it is."""
        while self._open(text) and self._close(text):
            pass
        if not last:
            return None
        content, calls = _written(text, self.names)
        if calls and len(calls) >= len(self.calls):
            for i, call in enumerate(calls):  # what was streamed stays as it is
                if i == len(self.calls):
                    self.calls.append(call)
        elif self.calls:
            content = text[: text.find(TAG)].rstrip() if TAG in text else ""
        elif self.must and (name := self._named(text)):
            content, self.calls = "", [ToolCall(name)]
        if not self.parallel:
            del self.calls[1:]
        return content

    def _named(self, text: str) -> str:
        """The name of a call that was cut before its arguments; an empty text if it is not known."""
        match = NAME.match(text)
        return self.names[0] if len(self.names) == 1 else _loaded(match[1]) if match else ""

    def _open(self, text: str) -> bool:
        """Whether a call is being written."""
        if self.calls and not self.calls[-1].complete:
            return True
        if self.calls and (self.must or not self.parallel):
            return False
        start = 0
        if self.calls or not text.lstrip().startswith("{"):
            if (start := text.find(TAG, self.at)) < 0:
                return False
            start += len(TAG)
        match = HEADER.match(text, start)
        if not match or (name := _loaded(match[1])) not in self.names:
            return False
        self.calls.append(ToolCall(name))
        self.at, self.depth = match.end(), 0
        return True

    def _close(self, text: str) -> bool:
        """Read the arguments of the call that is being written. Whether they are complete."""
        call, start = self.calls[-1], self.at
        for i in range(start, len(text)):
            x = text[i]
            if self.escaped:
                self.escaped = False
            elif self.quoted:
                self.quoted, self.escaped = x != '"', x == "\\"
            elif x == '"':
                self.quoted = True
            elif x in "{[":
                self.depth += 1
            elif x in "}]":
                self.depth -= 1
                if not self.depth:
                    self.at, call.complete = i + 1, True
                    call.arguments += text[start : i + 1]
                    return True
        self.at = len(text)
        call.arguments += text[start:]
        return False


def _written(text: str, names: Sequence[str]) -> tuple[str, list[ToolCall]]:
    """A complete answer without its calls, and the calls; the whole answer if they are not well-formed."""
    if tagged := TAGGED.findall(text):
        rest, written = TAGGED.sub("", text).rstrip(), [_loaded(x) for x in tagged]
    elif match := MARKED.search(text):
        rest, written = text[: match.start()].rstrip(), _loaded(match[1]) or []
    else:
        rest, one = "", _loaded(text.strip())
        written = one if isinstance(one, list) else [one]
    calls = [x for x in written if isinstance(x, dict) and x.get("name") in names]
    if not calls or len(calls) != len(written):
        return text, []
    return rest, [_call(x) for x in calls]


def _loaded(text: str) -> JsonValue:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call(call: Json) -> ToolCall:
    arguments = call.get("arguments", call.get("parameters", {}))
    return ToolCall(call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments), True)
