"""What proofs that start jobs share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """A folder of source code to train on."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(30):
        (folder / f"{i:02}.py").write_text("".join(f"def f_{i}_{j}(x):\n    return x * {i + j}\n\n" for j in range(12)))
    return folder
