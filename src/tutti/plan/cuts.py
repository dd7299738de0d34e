"""Where a step is cut into stages: at the borders of layers, so that the slowest stage is as fast as can be.

With c_i the seconds of the i-th layer (its forward and backward pass, as they are priced under the plan of a stage's
own mesh), in the order in which the forward pass runs, and S(i, j) = c_i + ... + c_(j-1):

    best[1][j] = S(0, j)        best[k][j] = min over i of max(best[k-1][i], S(i, j))

which is exact for stages of one mesh. Layers are modules whose path ends in a number; what stands beside them (an
embedding, a head) is a layer of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from torch import fx

from tutti.graph.labels import layer_of
from tutti.graph.step_graph import FORWARD, UPDATE, StepGraph
from tutti.plan.stages import Reads

Seconds = Callable[[fx.Node], float]


def layers_of(step: StepGraph, seconds: Seconds) -> dict[str, float]:
    """Path -> seconds of the forward and backward pass, in the order of the forward pass."""
    paths = [layer_of(n.meta["path"]) for n in Reads(step).calls if n.meta["phase"] == FORWARD]
    around = {path[:i] for path in paths for i, letter in enumerate(path) if letter == "."}  # modules of layers
    found = {path: 0.0 for path in paths if path and path not in around}
    for node in step.calls:
        path = layer_of(node.meta["path"])
        if path in found and node.meta["phase"] != UPDATE:
            found[path] += seconds(node)
    return found


def balanced(step: StepGraph, seconds: Seconds, stages: int) -> dict[str, int]:
    """The stage of each layer. Raises ValueError where there are fewer than stages."""
    layers = layers_of(step, seconds)
    if len(layers) < stages:
        raise ValueError(f"a model of {len(layers)} layers and modules beside them cannot be cut into {stages} stages")
    starts = split(list(layers.values()), stages)
    return {path: sum(start <= i for start in starts) - 1 for i, path in enumerate(layers)}


def split(costs: Sequence[float], stages: int) -> list[int]:
    """The first layer of each of so many stages, none of them empty, so that the dearest costs least."""
    sums = [0.0, *accumulate(costs)]
    n = len(costs)
    best = [{j: (sums[j], 0) for j in range(1, n + 1)}]
    for k in range(1, stages):
        best.append({
            j: min((max(best[-1][i][0], sums[j] - sums[i]), i) for i in range(k, j)) for j in range(k + 1, n + 1)
        })  # fmt: skip
    starts, j = [], n
    for k in reversed(range(stages)):
        j = best[k][j][1]
        starts.insert(0, j)
    return starts
