"""Cache of captured steps, by the workload that they were captured from.

`~/.cache/tutti/captures/HASH` has the steps of a workload: `facts.json`, and a file for each captured number of
microbatches. The hash is of the config, the other options, the versions of the packages that build the model, and this
package's source. `TUTTI_PLANS=off` disables the cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti.hardware import machine
from tutti.ir.graph_file import from_json, to_json
from tutti.ir.portable import NotPortable
from tutti.ir.step_graph import StepGraph

if TYPE_CHECKING:
    from tutti.cli.plan.workload import Workload

MOST = 32  # workloads that are kept
BUILDERS = ("torch", "transformers", "peft")  # packages


@dataclass(frozen=True)
class CaptureCache:
    """The steps of one workload."""

    folder: Path

    @classmethod
    def of(cls, workload: Workload) -> CaptureCache | None:
        """The cache of a workload. None for a model of a function, whose code may change, and if caches are off."""
        config = Path(workload.model)
        config = config / "config.json" if config.is_dir() else config
        if os.environ.get("TUTTI_PLANS") == "off" or not config.is_file():
            return None
        parts = (machine.sources(), config.read_bytes(), replace(workload, model=""), *map(_version, BUILDERS))
        return cls(machine.FOLDER / "captures" / hashlib.sha256(repr(parts).encode()).hexdigest()[:24])

    def facts(self) -> dict[str, Any] | None:
        """What was said of the workload when it was captured, or None."""
        try:
            facts = json.loads((self.folder / "facts.json").read_text())
            self.folder.touch()  # the least recently used is removed first
        except (OSError, ValueError):
            return None
        return facts if isinstance(facts, dict) else None

    def step(self, microbatch_count: int) -> StepGraph | None:
        """The captured step of one of so many microbatches, or None if it is not there or cannot be read."""
        try:
            return from_json(self._file(microbatch_count).read_text())
        except (OSError, ValueError):
            return None

    def keep(self, facts: dict[str, Any], microbatch_count: int, step: StepGraph) -> None:
        """Write a captured step, if it can be written, and remove the least recently used of too many workloads."""
        try:
            machine.write(self._file(microbatch_count), to_json(step))
            machine.write(self.folder / "facts.json", json.dumps(facts))
            others = sorted(self.folder.parent.iterdir(), key=lambda folder: folder.stat().st_mtime, reverse=True)
            for folder in others[MOST:]:
                shutil.rmtree(folder, ignore_errors=True)
        except NotPortable:
            return
        except OSError as error:
            warnings.warn(f"the captured step is not kept: {error}", stacklevel=2)

    def _file(self, microbatch_count: int) -> Path:
        return self.folder / f"{microbatch_count}.json"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
