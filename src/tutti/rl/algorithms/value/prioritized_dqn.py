"""Double Q-learning with prioritized replay (Schaul et al., 2016): large errors are sampled more often."""

from __future__ import annotations

from dataclasses import dataclass

from tutti.rl.algorithms.value.double_dqn import DoubleDQN
from tutti.rl.replay.priority import Prioritized


class PrioritizedDQN(DoubleDQN):
    """Options: `PrioritizedDQN.Config`."""

    @dataclass(frozen=True)
    class Config(DoubleDQN.Config):
        """alpha: how much priorities count. beta: how much the loss corrects for them."""

        alpha: float = 0.6
        beta: float = 0.4

    unused = (*DoubleDQN.unused, "hindsight")

    def make_replay(self) -> Prioritized:
        c = self.config
        return Prioritized(max(c.buffer_size // c.n_envs, 1), c.n_envs, c.n_step, c.alpha, c.beta)
