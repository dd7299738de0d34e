"""Double Q-learning (van Hasselt, Guez and Silver, 2016): the present network chooses, the target network values.

y = r + gamma Q'(s', argmax_a Q(s', a))
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tutti.rl.algorithms.value.dqn import DQN
from tutti.rl.networks.distributions import masked

Tree = dict[str, Any]


class DoubleDQN(DQN):
    """Options: `DQN.Config`."""

    def next_value(self, weights: Tensor, learner: Tree, batch: Tree) -> Tensor:
        best = masked(self.values(weights, batch["last"]), batch.get("last_mask")).argmax(-1, keepdim=True)
        return self.values(learner["target"], batch["last"]).gather(-1, best.detach()).squeeze(-1)
