"""Boost: algorithms that make training steps cheaper, or fewer. One file per algorithm.

| name | idea | file |
|---|---|---|
| less_bn | fewer batch norms in residual networks, and a normalized head | less_bn.py |
| grad_freeze | some steps train the last layers only | grad_freeze.py |
| adasum | gradients of parts of a batch are added where they are orthogonal | adasum.py |
| layer_skip | early steps leave out some layers, stage by stage fewer | layer_skip.py |
| loss_scale_group | each group of layers has its own loss scale | loss_scale_group.py |
| dim_reduce | quasi-Newton steps in the subspace of past weights | dim_reduce.py |

Level O0 is none; O1, O2 and O3 are less_bn and a layer_skip that leaves out more layers from level to level. `boost.py`
has the object that a training loop calls.
"""

from tutti.train.boost.algorithm import Training
from tutti.train.boost.boost import Boost
from tutti.train.boost.levels import ALGORITHMS, LEVELS

__all__ = ["ALGORITHMS", "LEVELS", "Boost", "Training"]
