"""The list of proofs: the docstrings of the files in tests/proofs."""

from __future__ import annotations

import ast
from pathlib import Path

from generating.page import NOTE, ROOT


def summary(path: Path) -> str:
    """The first paragraph of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split()).removeprefix("Claim: ")


def proofs() -> str:
    rows = [f"| `{path.name}` | {summary(path)} |\n" for path in sorted((ROOT / "tests/proofs").glob("test_*.py"))]
    return (
        f"{NOTE}\n# Proof files\n\nEach file in `tests/proofs` proves one claim. `make test` runs the quick cases, "
        "`make proofs` all of them, and `pytest tests/proofs/test_NAME.py` one file. The second column is the "
        "docstring of the file.\n\n| file | claim |\n|---|---|\n" + "".join(rows)
    )
