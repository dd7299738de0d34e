"""Functions of tensors that a compiler makes out of graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from tutti import compat
from tutti.run.position import HERE


class Compiled:
    """The function of a functional ATen graph whose shapes and dtypes are known. It is compiled when it is first
    called, and again where its arguments lie otherwise in memory; torch keeps the result in its cache on disk."""

    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self.made: dict[tuple, Callable] = {}

    def __call__(self, *args: torch.Tensor):
        how = tuple([(x.stride(), x.get_device()) for x in args])
        function = self.made.get(how)
        if function is None:
            HERE.compiles(True)
            try:
                function = self.made[how] = compat.compile_graph(self.graph, args)
            finally:
                HERE.compiles(False)
        return function(*args)
