"""Name the extra to install where an optional package is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Imports within the block that miss a package raise ModuleNotFoundError with `pip install 'tutti[name]'`."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "tutti").partition(".")[0]
        if package == "tutti" or "pip install" in str(error):
            raise
        raise ModuleNotFoundError(f"there is no package {package}; pip install 'tutti[{name}]'", name=package) from None
