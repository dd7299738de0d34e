"""Messages of a chat: what is malformed in them, and how templates read them."""

from __future__ import annotations

import json

from tutti.serve import media
from tutti.serve.server.errors import Refused
from tutti.serve.values import Json, JsonValue, JsonView

IMAGES = "image_url", "input_image"
ROLES = "system", "developer", "user", "assistant", "tool", "function"


def shaped(messages: JsonValue, name: str = "messages") -> list[Json]:
    """Messages as templates read them: contents are texts, or lists of parts where there are images; arguments of calls
    are objects; nulls are left out.

    Raises Refused with the place of what is malformed. name: name of the field.
    """
    if not isinstance(messages, list) or not messages:
        raise Refused(400, f"{name} is {'empty' if messages == [] else 'not a list'}; give at least one message", name)
    return [_message(x, f"{name}[{i}]") for i, x in enumerate(messages)]


def characters(messages: list[Json]) -> int:
    """Number of characters of the texts of messages."""
    return sum(len(text) for x in messages for text in texts(x))


def texts(message: JsonView) -> list[str]:
    """The texts of a shaped message."""
    content = message["content"]
    return [content] if isinstance(content, str) else [x["text"] for x in content if x["type"] == "text"]


def _message(message: JsonValue, place: str) -> Json:
    if not isinstance(message, dict):
        raise _malformed(place, message, "an object with role and content")
    fields = {key: x for key, x in message.items() if x is not None}
    if not isinstance(role := fields.get("role"), str) or not role:
        raise _malformed(f"{place}.role", role, "a text, such as user")
    if role not in ROLES:
        raise _malformed(f"{place}.role", role, f"one of {', '.join(ROLES)}")
    for key in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        if not isinstance(fields.get(key, ""), str):
            raise _malformed(f"{place}.{key}", fields[key], "a text")
    fields["content"] = _content(fields.get("content"), f"{place}.content")
    if (thought := fields.get("reasoning", fields.get("reasoning_content"))) is not None:  # templates read one or other
        fields["reasoning"] = fields["reasoning_content"] = thought
    if legacy := fields.pop("function_call", None):
        fields["tool_calls"] = [{"type": "function", "function": legacy}]
    if role == "function":
        fields["role"] = "tool"
    if "tool_calls" in fields:
        calls = fields.pop("tool_calls")
        if not isinstance(calls, list):
            raise _malformed(f"{place}.tool_calls", calls, "a list")
        if calls:
            fields["tool_calls"] = [_call(x, f"{place}.tool_calls[{i}]") for i, x in enumerate(calls)]
    return fields


def _call(call: JsonValue, place: str) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _malformed(place, call, "an object with function.name and function.arguments")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"{place}.function.arguments is not JSON: {error}", "messages") from error
    if not isinstance(arguments or {}, dict):
        raise _malformed(f"{place}.function.arguments", arguments, "an object, or its JSON text")
    return {**call, "type": "function", "function": {**function, "arguments": arguments or {}}}


def _content(content: JsonValue, place: str) -> JsonValue:
    """A text, or a list of parts if one is an image."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _malformed(place, content, "a text or a list of parts")
    parts = [_part(x, f"{place}[{i}]") for i, x in enumerate(content)]
    return parts if any(x["type"] != "text" for x in parts) else "".join(x["text"] for x in parts)


def _part(part: JsonValue, place: str) -> Json:
    if not isinstance(part, dict):
        raise _malformed(place, part, "an object with type")
    kind = part.get("type")
    if kind in media.TEXTS or kind == "refusal":
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise _malformed(f"{place}.text", text, "a text")
        return {"type": "text", "text": text}
    if kind in IMAGES:
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, dict) else image
        if not isinstance(url, str):
            raise _malformed(f"{place}.image_url.url", url, "a data: URL")
        return {"type": "image_url", "image_url": {"url": url}}
    raise _malformed(f"{place}.type", kind, "text or image_url")


def _malformed(place: str, value: JsonValue, expected: str) -> Refused:
    shown = "missing" if value is None else f"{value!r:.80}"
    return Refused(400, f"{place} is {shown}; expected {expected}", place.partition("[")[0])
