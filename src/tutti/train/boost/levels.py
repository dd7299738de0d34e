"""The algorithms by name, and the levels that combine them."""

from __future__ import annotations

from typing import Any

from tutti.train.boost.adasum import AdaSum
from tutti.train.boost.algorithm import Algorithm
from tutti.train.boost.dim_reduce import DimReduce
from tutti.train.boost.grad_freeze import GradFreeze
from tutti.train.boost.layer_skip import LayerSkip
from tutti.train.boost.less_bn import LessBN
from tutti.train.boost.loss_scale_group import LossScaleGroup

ALGORITHMS: dict[str, type[Algorithm]] = {
    "less_bn": LessBN,
    "grad_freeze": GradFreeze,
    "adasum": AdaSum,
    "layer_skip": LayerSkip,
    "loss_scale_group": LossScaleGroup,
    "dim_reduce": DimReduce,
}

LEVELS: dict[str, dict[str, dict[str, Any]]] = {
    "O0": {},
    "O1": {"less_bn": {}, "layer_skip": {"share": 0.5, "until": 0.5}},
    "O2": {"less_bn": {}, "layer_skip": {"share": 0.5, "until": 0.75}},
    "O3": {"less_bn": {}, "layer_skip": {"share": 0.67, "until": 0.75}},
}
