"""Stored tensors move into one block of memory and keep their values."""

import torch
from torch import nn

import tutti
from tutti.exec.stores.large_pages import LINE, pack


class Cache:
    def __init__(self):
        self.keys = torch.zeros(5, 3)


def test_values_are_kept():
    torch.manual_seed(0)
    model, cache, x = nn.Linear(3, 5), Cache(), torch.randn(2, 3)
    store = tutti.Store(live=False, model=model, cache=cache)
    function = tutti.function(lambda x: model(x) + cache.keys.sum(), x, store=store, cluster="cpu:1", plan="single")
    wanted, before = function(x), {name: x.clone() for name, x in store.parts[0].items()}
    pack(store, blank="cache:cache.")
    packed = store.parts[0]
    assert packed.keys() == before.keys() and all(torch.equal(packed[name], before[name]) for name in packed)
    assert len({x.untyped_storage().data_ptr() for x in packed.values()}) == 1
    assert all(x.data_ptr() % LINE == 0 for x in packed.values())
    assert torch.equal(function(x), wanted)


def test_shared_tensors_stay():
    """Those of a live store are the model's own: packing them would part the two."""
    model, x = nn.Linear(3, 5), torch.randn(2, 3)
    store = tutti.Store(model=model)
    function = tutti.function(lambda x: model(x), x, store=store, cluster="cpu:1", plan="single")
    function(x)
    pack(store)
    assert {x.data_ptr() for x in store.parts[0].values()} == {x.data_ptr() for x in model.parameters()}
