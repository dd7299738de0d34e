"""Optimizers beyond `torch.optim`, and what surrounds an update: averaged weights, groups by pattern, freezing.

    groups = tutti.optim.groups(model, {"*.bias": {"weight_decay": 0.0}}, lr=1e-4)
    optimizer = tutti.optim.with_ema(tutti.optim.Lion(groups, weight_decay=1.0), decay=0.999)

Each optimizer is one file. Its pure update is in `tutti.tracing.optimizers`; `step()` calls what a captured step
contains.
"""

from tutti.optim.adam_8bit import Adam8bit as Adam8bit
from tutti.optim.adam_8bit import AdamW8bit as AdamW8bit
from tutti.optim.centralize import centralize_gradients as centralize_gradients
from tutti.optim.ema import averaged as averaged
from tutti.optim.ema import ema_state_dict as ema_state_dict
from tutti.optim.ema import with_ema as with_ema
from tutti.optim.groups import freeze as freeze
from tutti.optim.groups import groups as groups
from tutti.optim.lamb import Lamb as Lamb
from tutti.optim.lion import Lion as Lion
from tutti.optim.muon import Muon as Muon
