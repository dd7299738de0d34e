"""Transfers between tiers, as operators: their shapes are defined here, `tutti.exec.transfer_engine` runs them.

| operator | result |
|---|---|
| fetch(home) | a copy on the device of what lies on an outer tier; it may be on its way |
| arrived(x) | what was fetched, once it is there |
| put(x, tier) | a copy on an outer tier of what lies on the device |
| lend(x) | a copy on the host, for an operator that computes there |
| bring(x) | a copy on the device of what an operator on the host has made |
| store(home, x) | `home`, when x has been copied into it, wherever the two lie |
"""

from __future__ import annotations

import torch
from torch.fx.node import has_side_effect

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define("fetch(Tensor home) -> Tensor")
_library.define("arrived(Tensor x) -> Tensor")
_library.define("put(Tensor x, str tier) -> Tensor")
_library.define("lend(Tensor x) -> Tensor")
_library.define("bring(Tensor x) -> Tensor")
_library.define("store(Tensor home, Tensor x) -> Tensor")

fetch = torch.ops.tutti.fetch.default
arrived = torch.ops.tutti.arrived.default
put = torch.ops.tutti.put.default
lend = torch.ops.tutti.lend.default
bring = torch.ops.tutti.bring.default
store = torch.ops.tutti.store.default

TRANSFERS = {fetch: "fetch", arrived: "arrived", put: "put", lend: "lend", bring: "bring", store: "store"}
has_side_effect(store)
