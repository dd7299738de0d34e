"""Samples of every operator that has a rule, one file per family.

    @samples(aten.mm.default)
    def mm(d):
        m, k, n = d.sizes(3)
        return (d.floats(m, k), d.floats(k, n)), {}

A function of a `Draw` returns (args, kwargs) of one call; hypothesis draws what `d` returns. Draw whatever the rule
depends on: sizes, dims, flags, absent operands. A function with two parameters also gets the operator.
"""

from importlib import import_module
from pkgutil import walk_packages

import tutti.ops  # noqa: F401  (registers the project's operators)
from tutti.check.samples.sample import Draw, samples

for _module in walk_packages(__path__, f"{__name__}."):
    import_module(_module.name)

__all__ = ["Draw", "samples"]
