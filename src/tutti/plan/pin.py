"""Pins: parts of a plan that a person fixes by hand; the rest is searched."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from tutti.graph.labels import covers
from tutti.graph.step_graph import StepGraph
from tutti.plan.layout import Split


@dataclass(frozen=True)
class Pin:
    """Parameters whose names match `pattern` are split at `dim` over the mesh axis `axis`."""

    pattern: str
    dim: int
    axis: str
    outer: int = 1


def pin(pattern: str, *, dim: int, axis: str, outer: int = 1) -> Pin:
    """Fix how parameters are stored: `pins=[tutti.pin("model.layers.*.mlp.up_proj.weight", dim=0, axis="tp")]`.

    pattern: of parameter names, with `*` and `?`, or as plans call layers of a kind (`h.1-11.weight`).
    outer: blocks outside a strided split (3 for a fused qkv).
    """
    return Pin(pattern, dim, axis, outer)


def resolve(pins: Iterable[Pin], step: StepGraph) -> dict[str, dict[str, Split]]:
    """Label of a parameter -> axis -> split.

    Raises ValueError for a pattern that matches nothing, or only some of the layers that share a label.
    """
    names = step.names("param")
    sharing: dict[str, list[str]] = {}
    for name in names:
        sharing.setdefault(step.inputs[f"param:{name}"].meta["label"], []).append(name)
    resolved: dict[str, dict[str, Split]] = {}
    for p in pins:
        matched = {name for name in names if fnmatchcase(name, p.pattern) or covers(p.pattern, name)}
        if not matched:
            near = get_close_matches(p.pattern, [label.removeprefix("param:") for label in sharing], 1, 0.3)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ValueError(f"the pin {p.pattern!r} matches no parameter{hint}")
        for label, same in sharing.items():
            hit = matched & set(same)
            if not hit:
                continue
            if len(hit) < len(same):
                missing = sorted(set(same) - hit)[0]
                raise ValueError(
                    f"the pin {p.pattern!r} matches {sorted(hit)[0]!r} but not {missing!r}, which is planned with it; "
                    f"write {label.removeprefix('param:')!r}"
                )
            rank = len(step.spec(f"param:{same[0]}").shape)
            if not 0 <= p.dim < rank:
                raise ValueError(f"the pin {p.pattern!r} names dim {p.dim} of {same[0]!r}, which has {rank} dims")
            other = resolved.setdefault(label, {}).setdefault(p.axis, Split(p.dim, p.outer))
            if other != Split(p.dim, p.outer):
                raise ValueError(f"two pins contradict each other on {same[0]!r} along {p.axis!r}: {other} and "
                                 f"{Split(p.dim, p.outer)}")  # fmt: skip
    return resolved
