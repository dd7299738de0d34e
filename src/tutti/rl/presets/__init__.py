"""Settings with which each algorithm reaches a return on an environment: what `tutti rl` and the proofs run."""

from __future__ import annotations

from difflib import get_close_matches

from tutti.rl.presets import continuous, model_based, offline, policy_gradient, value
from tutti.rl.presets.preset import Preset as Preset

PRESETS: dict[str, Preset] = {**value.PRESETS, **policy_gradient.PRESETS, **continuous.PRESETS, **model_based.PRESETS,
                              **offline.PRESETS}  # fmt: skip


def preset(name: str) -> Preset:
    """A preset by name, such as "ppo-cartpole". Raises ValueError with the nearest names."""
    if name not in PRESETS:
        near = get_close_matches(name, PRESETS, 3, 0.4)
        raise ValueError(f"there is no preset {name!r}{f'; near are {chr(44).join(near)}' if near else ''}. "
                         f"There are {', '.join(PRESETS)}")  # fmt: skip
    return PRESETS[name]
