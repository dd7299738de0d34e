"""The algorithms by name, and the levels that combine them.

No level has a reliable gain on a CPU: a target is reached 0.9 to 1.15 times as fast as by plain training, not counting
captures (docs/guide/boost.md). Residual CNNs gain what their inner batch norms cost, and a language model a little;
a small Transformer on images is slower. O1 to O3 differ in how long `layer_skip` leaves out layers; `less_bn` is the
same in each. A model with neither residual batch norms nor three layers in a list has nothing to gain from a level.
grad_freeze, adasum and dim_reduce, which MindSpore has, are no part of them, since they cost more than they save.
"""

from __future__ import annotations

from tutti.train.boost.adasum import AdaSum
from tutti.train.boost.algorithm import Algorithm
from tutti.train.boost.dim_reduce import DimReduce
from tutti.train.boost.grad_freeze import GradFreeze
from tutti.train.boost.layer_skip import LayerSkip
from tutti.train.boost.less_bn import LessBN
from tutti.train.boost.loss_scale_group import LossScaleGroup
from tutti.train.values import NamedValues

ALGORITHMS: dict[str, type[Algorithm]] = {
    "less_bn": LessBN,
    "grad_freeze": GradFreeze,
    "adasum": AdaSum,
    "layer_skip": LayerSkip,
    "loss_scale_group": LossScaleGroup,
    "dim_reduce": DimReduce,
}

LEVELS: dict[str, dict[str, NamedValues]] = {
    "O0": {},
    "O1": {"less_bn": {}, "layer_skip": {"until": 0.3}},
    "O2": {"less_bn": {}, "layer_skip": {"until": 0.4}},
    "O3": {"less_bn": {}, "layer_skip": {"until": 0.5}},
}
