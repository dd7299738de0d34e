"""Routes of tokens to parts of the experts: part p has the experts `begin + p own` to `begin + (p + 1) own - 1`.

    index (T, k) int64 -> slot (T, k) int64, counts (parts,) int64

Each token goes once to each part that has any of its experts. `counts` says how many tokens go to each part. `slot` is
the place of a token's row among all that are sent, those for part 0 first and tokens in order within a part; -1 for a
choice whose part an earlier choice of the token has named, and for experts of no part. `begin` -1 says that the parts
have all experts: others are an error on a CPU.

| operator | | |
|---|---|---|
| route | index, own, parts, begin -> slot, counts | |
| send_rows | x (T, H), slot, size -> rows (size, H) | rows[slot[t, j]] = x[t]; undefined behind the last |
| add_rows | rows (S, H), slot -> y (T, H) | y[t] = sum_j rows[slot[t, j]], in float32 or wider |

`filled`: the rows that `slot` names on average, for predictions.
"""

from __future__ import annotations

from math import comb

import torch
from torch import Tensor

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define("route(Tensor index, int own, int parts, int begin) -> (Tensor, Tensor)")
_library.define("send_rows(Tensor x, Tensor slot, int size, int filled) -> Tensor")
_library.define("add_rows(Tensor rows, Tensor slot, int filled) -> Tensor")


def _route(index: Tensor, own: int, parts: int, begin: int) -> tuple[Tensor, Tensor]:
    part = (index - max(begin, 0)).div(own, rounding_mode="floor")
    checked = begin < 0 and index.device.type == "cpu" and index.numel()
    if checked and not 0 <= int(part.min()) <= int(part.max()) < parts:
        raise IndexError(f"experts: index {int(index.max())} is out of range; there are {own * parts} experts")
    same = part.unsqueeze(2) == part.unsqueeze(1)
    named = torch.tril(same, -1).any(2) | (part < 0) | (part >= parts)
    keys, order = torch.where(named, parts, part).flatten().sort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=index.device))
    ends = torch.searchsorted(keys, torch.arange(parts, device=index.device), right=True)
    return torch.where(named, -1, place.view_as(index)), ends.diff(prepend=ends.new_zeros(1))


def _send_rows(x: Tensor, slot: Tensor, size: int, filled: int) -> Tensor:
    slot, choices = slot.flatten(), slot.shape[1]
    choice = (slot >= 0).nonzero().squeeze(1)
    source = torch.empty_like(choice).scatter_(0, slot[choice], choice.div(choices, rounding_mode="floor"))
    rows = x.new_empty((size, x.shape[1]))
    torch.index_select(x, 0, source, out=rows[: len(source)])
    return rows


def _add_rows(rows: Tensor, slot: Tensor, filled: int) -> Tensor:
    y = rows.new_zeros((slot.shape[0], rows.shape[1]), dtype=torch.promote_types(rows.dtype, torch.float32))
    for place in slot.unbind(1):  # a token once, so that sums have one order
        token = (place >= 0).nonzero().squeeze(1)
        y.index_add_(0, token, rows.index_select(0, place[token]).to(y.dtype))
    return y.to(rows.dtype)


def most_sent(tokens: int, choices: int, parts: int) -> int:
    """The most rows that a rank sends: each of its tokens to as many parts as it has choices."""
    return tokens * min(choices, parts)


def expected_rows(tokens: int, choices: int, own: int, parts: int, routing: tuple[int, int] | None = None) -> int:
    """The rows that `slot` names on average, if each token's choices are distinct and equally likely.

    routing: groups of experts, and how many of them (equally likely) the choices of a token are in.

    A token misses a part of `own` of E experts with probability C(E - own, k) / C(E, k). Of L of G groups, j are in the
    part with probability C(g, j) C(G - g, L - j) / C(G, L) if g groups are, and E L / G experts can be chosen.
    """
    total = own * parts
    groups, limit = routing or (1, 1)
    if total % groups or ((own * groups) % total and total % (own * groups)):
        groups = limit = 1  # parts and groups do not nest
    size, possible = total // groups, total // groups * limit
    if choices > possible:
        return parts * tokens
    inside = max(1, own // size)  # groups of a part, or the group that has it
    missed = sum(
        comb(inside, j) * comb(groups - inside, limit - j) / comb(groups, limit)
        * comb(possible - j * min(own, size), choices) / comb(possible, choices)
        for j in range(min(inside, limit) + 1) if groups - inside >= limit - j
    )  # fmt: skip
    return round(parts * tokens * (1 - missed))


for _device in ("CPU", "CUDA"):
    _library.impl("route", _route, _device)
    _library.impl("send_rows", _send_rows, _device)
    _library.impl("add_rows", _add_rows, _device)
torch.library.register_fake(
    "tutti::route", lambda index, own, parts, begin: (torch.empty_like(index).contiguous(), index.new_empty(parts))
)
torch.library.register_fake("tutti::send_rows", lambda x, slot, size, filled: x.new_empty((size, x.shape[1])))
torch.library.register_fake("tutti::add_rows", lambda rows, slot, filled: rows.new_empty((len(slot), rows.shape[1])))
