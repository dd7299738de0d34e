"""Samples of every operator that has a rule, one file per family.

    @samples(aten.mm.default)
    def mm(d):
        m, k, n = d.sizes(3)
        return (d.floats(m, k), d.floats(k, n)), {}

A function of a `Draw` returns (args, kwargs) of one call; hypothesis draws what `d` returns. Draw whatever the rule
depends on: sizes, dims, flags, absent operands. A function with two parameters also gets the operator.
"""

from importlib import import_module
from pkgutil import iter_modules

import tutti.ops  # noqa: F401  (registers the project's operators)
from tutti.check.samples.sample import Draw, samples

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["Draw", "samples"]
