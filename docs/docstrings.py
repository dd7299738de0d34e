"""Docstrings for the API reference: examples as code, and lines `name: text` as lists."""

from __future__ import annotations

import re
from typing import Any

import griffe

ENTRY = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): (?=\S)")


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    output: list[str] = []
    inside = listed = False  # an example; a list
    for line in text.splitlines():
        if line.startswith(">>>") and not inside:
            output += ["", "```python"]
            inside = True
        elif inside and not line.strip():
            output.append("```")
            inside = False
        match = None if inside else ENTRY.match(line)
        if match and (listed or not output or not output[-1].strip() or ENTRY.match(output[-1])):
            output.append(f"- `{match[1]}`: {line[match.end() :]}")
            listed = True
            continue
        listed = listed and line.startswith(" ")
        output.append(line)
    return "\n".join([*output, "```"] if inside else output)
