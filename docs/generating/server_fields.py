"""Every field of the server's requests: what it means, or why it is ignored or refused."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

from generating.page import NOTE, escaped, table


def fields_page() -> str:
    from tutti.serve.server import fields, meanings, protocol
    from tutti.serve.server.messages import IMAGES, ROLES

    ignored = ", ".join(f"`{name}`" for name in sorted(fields.IGNORED))
    return "".join(
        [
            f"{NOTE}\n# Server fields\n\n[The server](../guide/server.md) reads the fields of the OpenAI API and of "
            "vLLM. A null means the default, for every field. A field that is not on this page is an error (400) that "
            "names the nearest known one.\n",
            *(f"\n## `{path}`\n\n{own(kind)}" for path, kind in bodies().items()),
            "\n## `/v1/audio/transcriptions`\n\nA form.\n\n"
            + table(("field", "meaning"), [(f"`{name}`", text) for name, text in meanings.TRANSCRIPTION.items()]),
            "\n## Completions and chats\n\nFields of both.\n\n" + rows(protocol.Common),
            "\n## Objects in fields\n",
            *(f"\n### {name}\n\n{rows(kind)}" for name, kind in objects().items()),
            f"\n### Messages\n\nRoles are {', '.join(f'`{role}`' for role in ROLES)}. Contents are texts, or lists of "
            f"parts: of the type `text`, or of {' or '.join(f'`{kind}`' for kind in IMAGES)} with a `data:` URL.\n",
            f"\n## Ignored\n\nThese change no answer. The first request with each is logged as a warning: {ignored}.\n"
            "\nThese are part of an object above, or of a route, and change no answer either:\n\n"
            + table(("field", "why"), without_effect()),
            "\n## Refused\n\nAn answer would differ from what was asked for, so these are errors (400), unless they "
            "have the value that changes nothing.\n\n" + refused(fields.REFUSED),
            "\nOf `/v1/responses`, these too:\n\n" + refused(fields.RESPONSES),
        ]
    )


def bodies() -> dict[str, Any]:
    """The bodies of requests, by path."""
    from tutti.serve.server import protocol

    return {
        "/v1/completions": protocol.CompletionBody,
        "/v1/chat/completions": protocol.ChatBody,
        "/v1/responses": protocol.ResponseBody,
        "/v1/embeddings": protocol.EmbeddingBody,
        "/tokenize": protocol.TokenizeBody,
        "/detokenize": protocol.DetokenizeBody,
    }


def objects() -> dict[str, Any]:
    """The objects in fields of bodies, by the field."""
    tables: dict[str, Any] = {}

    def walk(kind: Any) -> None:
        for name, inner in inside(kind):
            if inner not in tables.values():
                tables[f"`{name}`"] = inner
                walk(inner)

    for kind in bodies().values():
        walk(kind)
    return tables


def inside(kind: Any) -> Iterator[tuple[str, Any]]:
    """Fields of a body that hold objects, and the kind of object."""
    from tutti.serve.server.protocol import Body

    def kinds(annotation: Any) -> Iterator[Any]:
        if isinstance(annotation, type) and issubclass(annotation, Body):
            yield annotation
        for part in typing.get_args(annotation):
            yield from kinds(part)

    for name, field in kind.model_fields.items():
        yield from ((field.alias or name, inner) for inner in kinds(field.annotation))


def own(kind: Any) -> str:
    """The fields of a body; of completions and chats, those that they do not share."""
    from tutti.serve.server.protocol import Common

    if not issubclass(kind, Common):
        return rows(kind)
    text = "The fields of [both](#completions-and-chats), and:\n\n"
    return text + rows(kind, [name for name in kind.model_fields if name in kind.__annotations__])


def rows(kind: Any, names: list[str] | None = None) -> str:
    """A table of fields with their meaning and default."""
    from tutti.serve.server.meanings import meaning

    listed = []
    for name in names or kind.model_fields:
        field = kind.model_fields[name]
        shown = field.alias or name
        if (text := meaning(kind, shown)) is not None:
            listed.append((f"`{shown}`", text, default(field)))
    return table(("field", "meaning", "default"), listed)


def default(field: Any) -> str:
    from tutti.serve.server.protocol import Body

    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "" if value is None or value == "" or isinstance(value, Body) else f"`{value!r}`"


def without_effect() -> list[tuple[str, str]]:
    from tutti.serve.server.meanings import WITHOUT_EFFECT

    names = {kind.__name__: name.strip("`") for name, kind in objects().items()}
    names |= {kind.__name__: path for path, kind in bodies().items()}
    return [
        (f"`{names[kind]}`: `{field}`", why) for kind, fields in WITHOUT_EFFECT.items() for field, why in fields.items()
    ]


def refused(fields: Any) -> str:
    listed = [
        (f"`{name}`", escaped(remedy), "" if nothing is None else f"`{nothing!r}`")
        for name, (nothing, remedy) in fields.items()
    ]
    return table(("field", "instead", "changes nothing"), listed)
