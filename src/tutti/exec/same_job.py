"""Whether all ranks were given the same job: compared before they exchange tensors, and told in one line if not."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from tutti.launch.heartbeat import HEARTBEAT

Facts = Mapping[str, Mapping[str, Any]]  # by section, such as "the optimizer": what rank 0 says of each name
WIDTH = 80  # of a value in a message


def check_same_job(facts: Facts) -> None:
    """Raise ValueError on every rank, with the first difference, unless all ranks give equal facts.

    Values are compared as text. Only checksums travel if they are equal.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    own = {section: {name: str(x) for name, x in named.items()} for section, named in facts.items()}
    checksums = {section: hashlib.sha256(repr(sorted(named.items())).encode()).hexdigest()
                 for section, named in own.items()}  # fmt: skip
    with HEARTBEAT.within("all_gather", "whether all ranks have the same job"):
        everywhere = _gathered(checksums)
        different = next((x for x in own if len({theirs.get(x) for theirs in everywhere}) > 1), None)
        if different is None:
            return
        told = _gathered(own[different])
    rank = next(i for i, theirs in enumerate(told) if theirs != told[0])
    name = min(name for name in told[0].keys() | told[rank].keys() if told[0].get(name) != told[rank].get(name))
    first, other = (_shown(theirs.get(name)) for theirs in (told[0], told[rank]))
    raise ValueError(f"ranks 0 and {rank} were given different jobs: in {different}, {name} is {first} on rank 0 and "
                     f"{other} on rank {rank}. All ranks run the same script with the same settings")  # fmt: skip


def described(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Shape and dtype of each tensor, as text."""
    return {name: f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}" for name, x in tensors.items()}


def _gathered(value: dict[str, str]) -> list[dict[str, str]]:
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, value)
    return everywhere


def _shown(text: str | None) -> str:
    if text is None:
        return "missing"
    return text if len(text) <= WIDTH else text[:WIDTH] + "..."
