"""Captured graphs on disk, by what they were captured from.

`~/.cache/tutti/captures/HASH` has the graphs of one source: a file for each graph, and `facts.json`. The hash is of a
description of the source, of the versions of the packages that build models, and of this package's source.
`TUTTI_PLANS=off` disables the cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tutti.hardware import machine
from tutti.ir.graph_file import from_json, to_json
from tutti.ir.portable import NotPortable
from tutti.ir.step_graph import StepGraph
from tutti.whole_files import write_text

MOST = 32  # sources that are kept
BUILDERS = ("torch", "transformers", "peft")  # packages


@dataclass(frozen=True)
class SavedGraphs:
    """The graphs of one source."""

    folder: Path

    @classmethod
    def of(cls, *description: Any) -> SavedGraphs | None:
        """The graphs of the source with this description, all of which `repr` must tell apart; None if caches are
        off."""
        if os.environ.get("TUTTI_PLANS") == "off":
            return None
        parts = (machine.sources(), *description, *map(_version, BUILDERS))
        return cls(machine.FOLDER / "captures" / hashlib.sha256(repr(parts).encode()).hexdigest()[:24])

    def facts(self) -> dict[str, Any] | None:
        """What was saved with the graphs, or None."""
        try:
            facts = json.loads((self.folder / "facts.json").read_text())
            self.folder.touch()  # the least recently used is removed first
        except (OSError, ValueError):
            return None
        return facts if isinstance(facts, dict) else None

    def graph(self, name: str) -> StepGraph | None:
        """A graph, or None if it is not there or cannot be read."""
        try:
            graph = from_json((self.folder / f"{name}.json").read_text())
            self.folder.touch()
        except (OSError, ValueError):
            return None
        return graph

    def save(self, name: str, graph: StepGraph, facts: dict[str, Any] | None = None) -> None:
        """Write a graph, if JSON can express it, and remove the least recently used of too many sources."""
        try:
            write_text(self.folder / f"{name}.json", to_json(graph))
            if facts is not None:
                write_text(self.folder / "facts.json", json.dumps(facts))
            others = sorted(self.folder.parent.iterdir(), key=lambda folder: folder.stat().st_mtime, reverse=True)
            for folder in others[MOST:]:
                shutil.rmtree(folder, ignore_errors=True)
        except NotPortable:
            return
        except OSError as error:
            warnings.warn(f"the captured graph is not saved: {error}", stacklevel=2)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
