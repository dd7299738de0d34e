"""Write the generated pages: references, the list of proofs, and the results of benchmarks.

    python docs/generate.py

`tests/test_docs.py` checks that the pages are current.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))

from generating import (  # noqa: E402
    api,
    benchmarks,
    command_line,
    configs,
    gallery,
    packages,
    proofs,
    published_runs,
    server_fields,
    supported_models,
)
from generating.packages import arrows  # noqa: E402, F401  (tests/test_house.py reads them)
from generating.page import NOTE  # noqa: E402, F401  (tests/test_docs.py reads it)

from tutti import cli  # noqa: E402

PAGES: dict[str, Callable[[], str]] = {
    "design.md": packages.packages,
    "reference/cli.md": command_line.index,
    **{f"reference/cli/{name}.md": partial(command_line.page, name) for name in cli.VERBS},
    "../src/tutti/cli/help.json": lambda: json.dumps(command_line.helps(), indent=1) + "\n",
    "reference/api.md": api.index,
    **{f"reference/api/{name}.md": partial(api.page, name) for name in api.PAGES},
    "reference/configs.md": configs.page,
    "reference/supported-models.md": supported_models.models_page,
    "reference/server-fields.md": server_fields.fields_page,
    "published.md": published_runs.page,
    "gallery.md": gallery.page,
    "proofs/files.md": proofs.proofs,
    "proofs/benchmarks.md": benchmarks.index,
    **{f"proofs/benchmarks/{name}.md": partial(benchmarks.page, name) for name in benchmarks.results()},
}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (DOCS / name).parent.mkdir(parents=True, exist_ok=True)
        (DOCS / name).write_text(make())
        print(f"wrote docs/{name}")
