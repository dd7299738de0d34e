"""Transfers between tiers as operators. Their shapes are defined here; `tutti.exec.stores.transfer_engine` runs them.

| operator | result |
|---|---|
| fetch(home) | a copy on the device of a tensor on an outer tier; may still be in flight |
| arrived(x) | the fetched tensor, after the transfer has completed |
| put(x, tier) | a copy on an outer tier of a tensor on the device |
| lend(x) | a copy on the host, for an operator that runs there |
| bring(x) | a copy on the device of a result of the host |
| store(home, x) | `home`, after x has been copied into it; any tiers |
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
