"""Valid ranges of the options of algorithms: one table for all of them.

An option that is a number must be finite and within its range; one that is a tuple must be so in each part. `Range(1)`
is [1, infinity), `Range(0, 1)` is [0, 1], and `above` leaves out the lower end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Range:
    """A range of numbers. unit: what the number counts or measures, for messages. infinite: whether infinity is in the
    range."""

    low: float = -math.inf
    high: float = math.inf
    unit: str = ""
    above: bool = False
    infinite: bool = False

    def __str__(self) -> str:
        if self.low == -math.inf:
            return "finite" if self.high == math.inf else f"at most {self.high:g}"
        if self.high < math.inf:
            first, second = ("above", "and at most") if self.above else ("from", "to")
            return f"{first} {self.low:g} {second} {self.high:g}"
        return f"above {self.low:g}" if self.above else f"at least {self.low:g}"

    def holds(self, x: float) -> bool:
        low = self.low < x if self.above else self.low <= x
        return low and x <= self.high and (math.isfinite(x) or (self.infinite and x == math.inf))


def _count(unit: str, low: int = 1) -> Range:
    return Range(low, unit=unit)


def _share(unit: str = "", above: bool = False) -> Range:
    return Range(0, 1, unit, above)


def _size(unit: str) -> Range:
    return Range(0, unit=unit, above=True)


def _weight(unit: str = "of a term of the loss") -> Range:
    return Range(0, unit=unit)


RANGES: dict[str, Range] = {
    "n_envs": _count("environments"),
    "n_steps": _count("steps of each environment"),
    "batch_size": _count("rows"),
    "n_epochs": _count("passes over a rollout"),
    "gradient_steps": Range(-1, unit="updates; -1 is one for each step"),
    "buffer_size": _count("steps"),
    "learning_starts": _count("steps", 0),
    "n_step": _count("steps of a return"),
    "hindsight": _count("goals for each true one", 0),
    "gamma": _share("discount of a step"),
    "int_gamma": _share("discount of a step"),
    "gae_lambda": _share("discount of a step"),
    "td_lambda": _share("discount of a step"),
    "lam": _share("discount of a step"),
    "learning_rate": Range(0, unit="of an update"),
    "critic_learning_rate": Range(0, unit="of an update"),
    "model_lr": Range(0, unit="of an update"),
    "disc_lr": Range(0, unit="of an update"),
    "decay": Range(0, unit="of weights, in units of the learning rate"),
    "tau": _share("of the way to the weights, in an update"),
    "momentum": _share("of a batch in running statistics", above=True),
    "max_grad_norm": Range(0, unit="norm of a gradient", above=True, infinite=True),
    "hidden": _count("units of a layer"),
    "critic_hidden": _count("units of a layer"),
    "disc_hidden": _count("units of a layer"),
    "distill_hidden": _count("units of a layer"),
    "model_hidden": _count("units of a layer"),
    "channels": _count("channels of a layer"),
    "memory": _count("units"),
    "mixing_size": _count("units"),
    "hyper_size": _count("units"),
    "deter": _count("units"),
    "width": _count("units"),
    "distilled": _count("units"),
    "groups": _count("variables"),
    "classes": _count("values of a variable"),
    "layers": _count("layers"),
    "heads": _count("heads"),
    "depth": _count("moves"),
    "vf_coef": _weight(),
    "ent_coef": _weight("of the entropy"),
    "logit_penalty": _weight(),
    "penalty": _weight(),
    "cql_alpha": _weight(),
    "obs_coef": _weight(),
    "ext_coef": _weight("of an advantage"),
    "int_coef": _weight("of an advantage"),
    "log_std": Range(-20, 2, "logarithm of a standard deviation"),
    "clip_range": _size("of the ratio of probabilities"),
    "clip_range_vf": _size("of values"),
    "target_kl": _size("nats"),
    "target_entropy": Range(unit="nats"),
    "exploration_fraction": _share("of learning", above=True),
    "expert_fraction": _share("of learning", above=True),
    "exploration_initial_eps": _share("probability"),
    "epsilon": _share("probability"),
    "exploration_final_eps": _share("probability"),
    "expert_share": _share("probability"),
    "real_ratio": _share("of a batch"),
    "noise_share": _share("of priors"),
    "expectile": _share("level"),
    "target_update_interval": _count("steps"),
    "policy_delay": _count("updates"),
    "renorm_warmup": _count("updates", 0),
    "noise": Range(0, unit="of half of the range of actions"),
    "target_policy_noise": Range(0, unit="of half of the range of actions"),
    "target_noise_clip": Range(0, unit="of half of the range of actions"),
    "temperature": _size(""),
    "max_weight": _size(""),
    "sigma": Range(0, unit="of noise, over the root of the inputs"),
    "alpha": Range(0),
    "beta": _share("of the correction"),
    "atoms": _count("values", 2),
    "v_min": Range(unit="return"),
    "v_max": Range(unit="return"),
    "n_quantiles": _count("quantiles"),
    "n_critics": _count("networks"),
    "drop": _count("quantiles of each critic", 0),
    "members": _count("networks"),
    "rho": Range(0, unit="upper bound of a ratio", above=True, infinite=True),
    "c": Range(0, unit="upper bound of a ratio", above=True, infinite=True),
    "damping": Range(0),
    "cg_steps": _count("steps"),
    "line_steps": _count("steps"),
    "value_epochs": _count("passes over a rollout"),
    "critic_epochs": _count("passes over a rollout"),
    "simulations": _count("of a search"),
    "play_simulations": _count("of a search"),
    "c_puct": Range(0),
    "noise_alpha": _size("of a Dirichlet distribution"),
    "random_moves": _count("moves", 0),
    "n_actions": _count("actions"),
    "context": _count("steps"),
    "target_return": Range(unit="return"),
    "scale": _size("return"),
    "length": _count("steps", 2),
    "horizon": _count("steps"),
    "disc_batch_size": _count("rows"),
    "model_batch_size": _count("rows"),
    "disc_steps": _count("updates"),
    "model_steps": _count("updates"),
    "rollouts": _count("rollouts"),
    "retained": _count("iterations"),
    "sequence": _count("steps"),
    "burn_in": _count("steps", 0),
}  # fmt: skip


def check(name: str, x: Any, own: Range | None = None) -> None:
    """Raise ValueError, with the option, its value and the range, for a number outside of it. Numbers may be tensors,
    tuples of numbers, or functions of the remaining progress, which are tried at 1, 1/2 and 0.

    own: the range, instead of the table's. An option without either may have any value.
    """
    own = own or RANGES.get(name)
    if own is None or x is None or isinstance(x, str | bool):
        return
    if callable(x) and not isinstance(x, Tensor):
        for left in (1.0, 0.5, 0.0):
            rate: Any = x(torch.tensor(left))
            check_one(name, own, float(rate), f" where {left:g} of the progress remains")
        return
    if isinstance(x, tuple | list):
        for each in x:
            check_one(name, own, each, f" in {list(x)}")
    elif isinstance(x, Tensor):
        for each in x.flatten().tolist():
            check_one(name, own, each)
    else:
        check_one(name, own, x)


def check_one(name: str, own: Range, x: Any, where: str = "") -> None:
    number = float(x) if hasattr(x, "__float__") and not isinstance(x, bool) else math.nan  # pyright: ignore
    if not own.holds(number):
        unit = f" ({own.unit})" if own.unit else ""
        raise ValueError(f"{name} is {x}{where}; it must be {own}{unit}")


def check_all(config: Any, names: list[str], own: dict[str, Range]) -> None:
    """Check options of a config, and those that belong together. own: ranges instead of the table's."""
    for name in names:
        check(name, getattr(config, name), own.get(name))
    both = {f.name: getattr(config, f.name) for f in fields(config)}
    for low, high, why in (("v_min", "v_max", "values lie between them"),
                           ("drop", "n_quantiles", "some quantiles must remain")):  # fmt: skip
        if low in both and high in both and not both[low] < both[high]:
            raise ValueError(f"{low} is {both[low]} and {high} is {both[high]}; {low} must be less: {why}")
