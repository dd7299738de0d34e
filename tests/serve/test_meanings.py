"""Every field of every body has a meaning, or a reason why it has no effect; and those without one change no answer."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tutti.serve.server import fields, protocol
from tutti.serve.server.meanings import MEANINGS, WITHOUT_EFFECT, meaning

USER = {"role": "user", "content": "hi"}


def kinds(kind: Any = protocol.Body) -> list[Any]:
    """All kinds of bodies and of objects in them."""
    return [x for sub in kind.__subclasses__() for x in (sub, *kinds(sub))]


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_each_field_has_one_meaning(kind):
    for name, field in kind.model_fields.items():
        shown = field.alias or name
        meanings = [meaning(kind, shown, table) for table in (MEANINGS, WITHOUT_EFFECT)]
        assert sum(text is not None for text in meanings) == 1, f"{kind.__name__}.{shown}"
        assert shown not in fields.IGNORED or shown in ("metadata",), "ignored, and read"


def test_tables_name_fields_that_there_are():
    names = {kind.__name__: {x.alias or key for key, x in kind.model_fields.items()} for kind in kinds()}
    for table in (MEANINGS, WITHOUT_EFFECT):
        assert all(about.keys() <= names[kind] for kind, about in table.items())


def test_the_routes_describe_their_fields(running):
    schemas = httpx.get(running.url + "/openapi.json").json()["components"]["schemas"]
    assert (
        schemas["ChatBody"]["properties"]["max_completion_tokens"]["description"] == "as max_tokens, which it replaces"
    )
    assert schemas["ChatBody"]["properties"]["seed"]["description"] == MEANINGS["Common"]["seed"]
    about = schemas["StructuredOutputs"]["properties"]
    assert about["json"]["description"] == "JSON schema, or its text"
    assert about["disable_fallback"]["description"] == WITHOUT_EFFECT["StructuredOutputs"]["disable_fallback"]


SCHEMA = {"type": "json_schema", "schema": {"enum": ["a", "b"]}}
REGEX = {"regex": "[ab]{3}"}
NO_EFFECT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # path, the body without and with the fields
    "EmbeddingBody": ("embeddings", {"input": "hi"}, {"user": "a"}),
    "ResponseBody": ("responses", {"input": "hi"}, {"parallel_tool_calls": False}),
    "StreamOptions": ("completions", {"prompt": "hi", "stream": True, "stream_options": {"include_usage": True}},
                      {"stream_options": {"include_usage": True, "include_obfuscation": True}}),
    "StructuredOutputs": ("completions", {"prompt": "hi", "structured_outputs": REGEX},
                          {"structured_outputs": REGEX | {"disable_fallback": True, "disable_any_whitespace": False}}),
    "TextFormat": ("responses", {"input": "hi", "text": {"format": SCHEMA}},
                   {"text": {"format": SCHEMA | {"name": "x", "description": "y", "strict": False}}}),
    "Reasoning": ("responses", {"input": "hi", "reasoning": {}}, {"reasoning": {"summary": "auto"}}),
}  # fmt: skip


def answered(running, path: str, body: dict[str, Any]) -> Any:
    """The answer without what differs from call to call."""
    limit = {"embeddings": {}, "responses": {"max_output_tokens": 4}}.get(path, {"max_tokens": 4})
    heat = {} if path == "embeddings" else {"temperature": 0}
    answer = running.post(f"/v1/{path}", **limit, **heat, **body)
    assert answer.status_code == 200, answer.text
    if body.get("stream"):
        events = [json.loads(x.removeprefix("data: ")) for x in answer.text.split("\n\n") if x and "[DONE]" not in x]
        fields = {key for x in events for key in x}
        return fields, "".join(choice["text"] for x in events for choice in x["choices"]), events[-1]["usage"]
    payload = answer.json()
    return payload.get("data") or payload.get("choices") or [x["content"] for x in payload["output"]]


@pytest.mark.parametrize("kind", NO_EFFECT)
def test_a_field_without_effect_changes_no_answer(running, kind):
    path, body, more = NO_EFFECT[kind]
    inner = next((x for x in more.values() if isinstance(x, dict)), more)
    body_fields = inner.get("format", inner)
    assert WITHOUT_EFFECT[kind].keys() <= body_fields.keys()
    assert answered(running, path, body) == answered(running, path, body | more)


def test_all_fields_without_effect_are_tried():
    assert NO_EFFECT.keys() == WITHOUT_EFFECT.keys()
