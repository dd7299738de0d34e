"""Whether all ranks were given the same job: compared before they exchange tensors, and told in one line if not."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from tutti.exec.runtime import gathered

Facts = Mapping[str, Mapping[str, Any]]  # by section, such as "the optimizer": what rank 0 says of each name
WHAT = "whether all ranks have the same job"
WIDTH = 80  # of a value in a message


def check_same_job(facts: Facts) -> None:
    """Raise ValueError on every rank, with the first difference, unless all ranks give equal facts.

    Values are compared as text. Only checksums travel if they are equal.
    """
    own = {section: {name: str(x) for name, x in named.items()} for section, named in facts.items()}
    checksums = {section: hashlib.sha256(repr(sorted(named.items())).encode()).hexdigest()
                 for section, named in own.items()}  # fmt: skip
    everywhere = gathered(checksums, WHAT)
    different = next((x for x in own if len({theirs.get(x) for theirs in everywhere}) > 1), None)
    if different is None:
        return
    sections = gathered(own[different], WHAT)
    rank, theirs = next((i, x) for i, x in enumerate(sections) if x != sections[0])
    ours = sections[0]
    name = min(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    first, other = _shown(ours.get(name)), _shown(theirs.get(name))
    raise ValueError(f"ranks 0 and {rank} were given different jobs: in {different}, {name} is {first} on rank 0 and "
                     f"{other} on rank {rank}. All ranks run the same script with the same settings")  # fmt: skip


def described(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Shape and dtype of each tensor, as text."""
    return {name: f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}" for name, x in tensors.items()}


def plain(x: Any) -> Any:
    """A value whose text is equal on all ranks where the value is: numbers of a tensor, not its device; and all of
    their digits."""
    if isinstance(x, torch.Tensor):
        return x.tolist()
    return tuple(map(plain, x)) if isinstance(x, tuple) else x


def _shown(text: str | None) -> str:
    if text is None:
        return "missing"
    return text if len(text) <= WIDTH else text[:WIDTH] + "..."
