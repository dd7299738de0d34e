"""Pins: parts of a plan that the user fixes; the rest is searched."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from tutti.ir.kind import Kind, path_of
from tutti.ir.labels import covers
from tutti.ir.step_graph import StepGraph
from tutti.plan.layouts.layout import R, Replicate, Split, parse_placement


@dataclass(frozen=True)
class Pin:
    """Fixes the placement along the mesh axis `axis` of parameters whose names match `pattern`."""

    pattern: str
    axis: str
    placement: Split | Replicate

    def __str__(self) -> str:
        return f"{self.pattern}={self.axis}:{self.placement}"


def pin(pattern: str, *, dim: int | None, axis: str, outer: int = 1) -> Pin:
    """Fix the layout of parameters: `pins=[tutti.pin("model.layers.*.mlp.up_proj.weight", dim=0, axis="tp")]`.

    pattern: pattern of parameter names, with `*` and `?`, or the name of a kind of layer as in plans (`h.1-11.weight`).
    dim: the dim that the axis splits; None keeps the parameter whole along the axis.
    axis: the mesh axis.
    outer: number of blocks inside each of which the dim is split (3 for a fused qkv).
    """
    return Pin(pattern, axis, R if dim is None else Split(dim, outer))


def parse_pin(text: str) -> Pin:
    """The pin for a text such as "model.layers.*.mlp.up_proj.weight=tp:S0" (R instead of S0: not split).

    Raises ValueError if the text is not a pin.
    """
    pattern, _, place = text.partition("=")
    axis, _, placement = place.partition(":")
    try:
        where = parse_placement(placement)
    except ValueError:
        where = None
    if not pattern or not axis or not isinstance(where, Split | Replicate):
        raise ValueError(f"no pin {text!r}: write PATTERN=AXIS:S<dim> or PATTERN=AXIS:R, as in "
                         "model.layers.*.mlp.up_proj.weight=tp:S0")  # fmt: skip
    return Pin(pattern, axis, where)


def covering(pattern: str, step: StepGraph) -> dict[str, str]:
    """The labels of the parameters that a pattern matches, each with the name of one of its parameters.

    Raises ValueError if the pattern matches nothing, or only some of the layers that share a label.
    """
    sharing: dict[str, list[str]] = {}
    for name in step.names("param"):
        sharing.setdefault(step.inputs[Kind.PARAM.at(name)].meta["label"], []).append(name)
    matched = {}
    for label, same in sharing.items():
        hit = [name for name in same if fnmatchcase(name, pattern) or covers(pattern, name)]
        if hit and len(hit) < len(same):
            missing = min(set(same) - set(hit))
            raise ValueError(f"{pattern!r} matches {min(hit)!r} but not {missing!r}, which is planned with it; "
                             f"write {path_of(label)!r}")  # fmt: skip
        if hit:
            matched[label] = same[0]
    if not matched:
        near = get_close_matches(pattern, [path_of(label) for label in sharing], 1, 0.3)
        hint = f"; the nearest is {near[0]!r}" if near else ""
        raise ValueError(f"{pattern!r} matches no parameter{hint}")
    return matched


def resolve(pins: Iterable[Pin], step: StepGraph) -> dict[str, dict[str, Split | Replicate]]:
    """Label of a parameter -> axis -> placement.

    Raises ValueError as `covering` does, and if a pin names a dim that does not exist or contradicts another pin.
    """
    resolved: dict[str, dict[str, Pin]] = {}
    for p in pins:
        for label, name in covering(p.pattern, step).items():
            rank = len(step.spec(Kind.PARAM.at(name)).shape)
            if isinstance(p.placement, Split) and not 0 <= p.placement.dim < rank:
                raise ValueError(f"the pin {p} names dim {p.placement.dim} of {name!r}, which has {rank} dims")
            other = resolved.setdefault(label, {}).setdefault(p.axis, p)
            if other.placement != p.placement:
                raise ValueError(f"two pins contradict each other on {name!r}: {other} and {p}")
    return {label: {axis: p.placement for axis, p in axes.items()} for label, axes in resolved.items()}
