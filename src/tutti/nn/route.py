"""Routes of tokens to parts of the experts: part p has the experts `p own` to `(p + 1) own - 1`.

    index (T, k) int64 -> slot (T, k) int64, counts (parts,) int64

Each token goes once to each part that has any of its experts. `counts` says how many tokens go to each part. `slot` is
the place of a token's row among all that are sent, those for part 0 first and tokens in order within a part; -1 for a
choice whose part an earlier choice of the token has named. With `slot`, `dispatch` and `combine` of `tutti.nn.slots`
write the rows and add those that come back.
"""

from __future__ import annotations

from math import comb

import torch
from torch import Tensor

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define("route(Tensor index, int own, int parts) -> (Tensor, Tensor)")


def _route(index: Tensor, own: int, parts: int) -> tuple[Tensor, Tensor]:
    part = index.div(own, rounding_mode="floor")
    if index.device.type == "cpu" and index.numel() and not 0 <= int(part.min()) <= int(part.max()) < parts:
        raise IndexError(f"experts: index {int(index.max())} is out of range; there are {own * parts} experts")
    same = part.unsqueeze(2) == part.unsqueeze(1)
    named = torch.tril(same, -1).any(2)
    keys, order = torch.where(named, parts, part).flatten().sort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=index.device))
    ends = torch.searchsorted(keys, torch.arange(parts, device=index.device), right=True)
    return torch.where(named, -1, place.view_as(index)), ends.diff(prepend=ends.new_zeros(1))


def most_sent(tokens: int, choices: int, parts: int) -> int:
    """The most rows that a rank sends: each of its tokens to as many parts as it has choices."""
    return tokens * min(choices, parts)


def expected_sent(tokens: int, choices: int, own: int, parts: int) -> int:
    """The rows that a rank sends to others on average, if each token's choices are distinct and equally likely.

    A token misses a part of `own` of E experts with probability C(E - own, k) / C(E, k).
    """
    total = own * parts
    hit = 1 - comb(total - own, choices) / comb(total, choices) if choices <= total else 1.0
    return round((parts - 1) * tokens * hit)


for _device in ("CPU", "CUDA"):
    _library.impl("route", _route, _device)
torch.library.register_fake(
    "tutti::route", lambda index, own, parts: (torch.empty_like(index).contiguous(), index.new_empty(parts))
)
