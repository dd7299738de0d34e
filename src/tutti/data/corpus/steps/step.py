"""What all steps have in common."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, fields
from importlib import metadata
from typing import Any, ClassVar

import pyarrow as pa

from tutti.data.corpus.documents import Outcome


@dataclass(frozen=True)
class Step:
    """A pure function of a batch of documents. Its fields are its options in a config.

    Subclasses are frozen dataclasses; `kind` is their name in a config. A result may depend on the rows of the batch
    one by one only: how documents are put into batches is not part of a pipeline.
    """

    kind: ClassVar[str] = ""
    packages: ClassVar[tuple[str, ...]] = ()
    """Packages whose versions its results depend on."""

    @property
    def name(self) -> str:
        """The name in reports."""
        return self.kind or type(self).__name__.lower()

    def __call__(self, batch: pa.RecordBatch) -> Outcome:
        raise NotImplementedError

    def key(self) -> dict[str, Any]:
        """What its results depend on, as JSON. Steps that read a file add the file's digest."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        versions = {package: metadata.version(package) for package in self.packages}
        return {"kind": self.name, "class": f"{type(self).__module__}.{type(self).__qualname__}", **values, **versions}


def needs(*packages: str) -> None:
    """Raise ModuleNotFoundError that names the first of these packages that is not installed, before any work."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(f"there is no package {package}; pip install 'tutti[corpus]'", name=package)


@dataclass(frozen=True)
class Function(Step):
    """A step of your own: a function from a batch to an `Outcome` or to a batch of the same rows.

    Worker processes import it by name, so it must be at the top level of a module.
    """

    function: Any = None

    @property
    def name(self) -> str:
        return self.function.__name__

    def __call__(self, batch: pa.RecordBatch) -> Outcome:
        result = self.function(batch)
        if not isinstance(result, Outcome | pa.RecordBatch):
            raise ValueError(
                f"step {self.name} returned a {type(result).__name__}; return a record batch or an Outcome"
            )
        return result if isinstance(result, Outcome) else Outcome(result)

    def key(self) -> dict[str, Any]:
        import inspect

        return {"kind": self.name, "class": self.function.__module__, "source": inspect.getsource(self.function)}
