"""The code blocks of the documents run, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("page", ["functions.md", "extend-optimizer.md"])
def test_code_runs(page):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert blocks
    scope: dict = {"__name__": "docs"}
    for block in blocks:
        exec(compile(block, page, "exec"), scope)
