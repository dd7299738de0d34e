"""Optimizers beyond `torch.optim`, and what surrounds an update: averaged weights, groups by pattern, freezing.

    groups = tutti.optim.groups(model, {"*.bias": {"weight_decay": 0.0}}, lr=1e-4)
    optimizer = tutti.optim.with_ema(tutti.optim.Lion(groups, weight_decay=1.0), decay=0.999)

Each optimizer is one file. Its pure update is in `tutti.tracing.optimizers`; `step()` calls what a captured step
contains.
"""

from tutti.optim.adam_8bit import Adam8bit, AdamW8bit
from tutti.optim.centralize import centralize_gradients
from tutti.optim.ema import averaged, ema_state_dict, with_ema
from tutti.optim.groups import freeze, groups
from tutti.optim.lamb import Lamb
from tutti.optim.lion import Lion
from tutti.optim.muon import Muon

__all__ = [
    "Adam8bit",
    "AdamW8bit",
    "Lamb",
    "Lion",
    "Muon",
    "averaged",
    "centralize_gradients",
    "ema_state_dict",
    "freeze",
    "groups",
    "with_ema",
]
