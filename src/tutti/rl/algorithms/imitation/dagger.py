"""DAgger (Ross, Gordon and Bagnell, 2011, arXiv 1011.0686): cloning an expert where the learner goes.

The learner acts, and an expert tells for each observation what it would have done there. All that was told so far is
cloned, as in `BC`. Errors then do not add up, as the learner has seen what follows from its own. The expert itself acts
with a probability that falls linearly to 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tutti.rl.algorithms.families.off_policy import OffPolicy
from tutti.rl.algorithms.imitation.bc import Cloning
from tutti.rl.core import keys
from tutti.rl.core.agent import Number, Rate
from tutti.rl.core.env import where
from tutti.rl.experts import Expert, actions_of

Tree = dict[str, Any]


class DAgger(Cloning, OffPolicy):
    """Options: `DAgger.Config`.

    expert: see `tutti.rl.experts`. Without one an agent can act, as one that was loaded from a file, but not learn.
    """

    @dataclass(frozen=True)
    class Config(OffPolicy.Config):
        """expert_share: the probability with which the expert acts first, which falls to 0 in `expert_fraction` of
        learning. learning_starts: steps in which only the expert acts. decay: weight decay."""

        n_steps: int = 32
        n_envs: int = 4
        learning_rate: Rate = 1e-3
        activation: str = "relu"
        learning_starts: int = 0
        expert_share: Number = 1.0
        expert_fraction: float = 0.3
        decay: float = 0.0

    multi_agent = False
    unused = (*OffPolicy.unused, "hindsight", "gamma", "tau", "n_step")

    def __init__(self, *args: Any, expert: Expert | None = None, **options: Any):
        self.expert = expert
        super().__init__(*args, **options)

    def build(self) -> None:
        super().build()
        self.expert_action = None if self.expert is None else actions_of(self.expert, self)

    def act(self, policy: Tree, seen: Tree, carry: Tree, key: Tensor, explore: bool) -> tuple[Tensor, Tree, Tree]:
        if not explore or self.expert_action is None:
            return super().act(policy, seen, carry, key, explore)
        c, (of_act, of_choice) = self.config, keys.split(key)
        own, _, carry = super().act(policy, seen, carry, of_act, True)
        label = self.expert_action(self.raw(policy, seen))
        share = c.expert_share * (1 - policy["progress"] / c.expert_fraction).clamp(min=0.0)
        use_expert = keys.uniform(of_choice, own.shape[:1]) < share
        return where(use_expert, label, own), {"label": label}, carry

    def warm(self, policy: Tree, seen: Tree, carry: Tree, key: Tensor, explore: bool) -> tuple[Tensor, Tree, Tree]:
        """Act as the expert, before the first update."""
        assert self.expert_action is not None
        label = self.expert_action(self.raw(policy, seen))
        return label, {"label": label}, carry

    def raw(self, policy: Tree, seen: Tree) -> Tree:
        """Observations without the learner's normalization: experts have their own."""
        if "obs_norm" not in policy:
            return seen
        norm = policy["obs_norm"]
        return {**seen, "obs": seen["obs"] * norm["var"].sqrt() + norm["mean"]}

    def remember(self, run: Tree, chunk: Tree) -> tuple[Tree, Tree]:
        """Store the expert's action in place of the action taken."""
        return super().remember(run, {**chunk, "action": chunk["label"]})

    def step(self) -> None:
        if self.expert_action is None:
            raise ValueError("DAgger has no expert to ask; pass expert=")
        super().step()

    def update(self, learner: Tree, batch: Tree, key: Tensor) -> tuple[Tree, Tensor, Tree]:
        learner, error, metrics = super().update(learner, batch, key)
        same = self.agreement(learner["weights"], batch)
        return learner, error, {**metrics, "agreement": same.float().mean()}

    def agreement(self, weights: Tensor, batch: Tree) -> Tensor:
        """Whether the policy does what the expert said, bool (count,); of continuous actions, within a tenth."""
        action = super().act({"weights": weights}, batch, {}, keys.make(0), False)[0]
        off = (action - batch["action"]).abs()
        return off.flatten(1).amax(-1) < 0.1 if action.is_floating_point() else off == 0
