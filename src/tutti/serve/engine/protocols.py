"""What serves requests, as its callers see it: an engine, or several behind the same methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from tutti.serve.constraints.constrain import Constraints
from tutti.serve.engine.request import Output, Request

if TYPE_CHECKING:
    from tutti.serve.engine.engine import Engine


class Stepping(Protocol):
    """Takes requests, and goes on with all of them in each step."""

    def add(self, request: Request) -> Output:
        """Start a request. Its output grows in place."""
        ...

    def step(self) -> list[Output]:
        """Compute some tokens. Returns the outputs that have changed."""
        ...


class Serving(Stepping, Protocol):
    """What a server serves. engines: those that compute; they have the same model."""

    constraints: Constraints

    @property
    def engines(self) -> Sequence[Engine]: ...
    @property
    def busy(self) -> bool:
        """Whether a request is unfinished."""
        ...

    def cancel(self, id: str, reason: str = "cancelled") -> Output | None:
        """End a request. Returns its output if it was unfinished."""
        ...

    def fail(self, why: str) -> list[Output]:
        """End all requests with an error."""
        ...
