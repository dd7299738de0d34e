"""Settings with which each algorithm reaches a return on an environment: what `tutti rl` and the proofs run."""

from __future__ import annotations

from difflib import get_close_matches

from tutti.rl.presets import (
    continuous,
    crossq,
    exploration,
    memory,
    model_based,
    multi_agent,
    offline,
    policy_gradient,
    value,
)
from tutti.rl.presets.preset import Preset as Preset

FAMILIES = value, policy_gradient, continuous, crossq, memory, exploration, multi_agent, model_based, offline
PRESETS: dict[str, Preset] = {name: row for family in FAMILIES for name, row in family.PRESETS.items()}


def preset(name: str) -> Preset:
    """A preset by name, such as "ppo-cartpole". Raises ValueError with the nearest names."""
    if name not in PRESETS:
        near = " or ".join(get_close_matches(name, PRESETS, 3, 0.0))
        raise ValueError(f"there is no preset {name!r}; near are {near} (`tutti rl list` shows all; configs are "
                         ".toml files)")  # fmt: skip
    return PRESETS[name]
