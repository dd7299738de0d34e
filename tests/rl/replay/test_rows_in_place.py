"""Programs write new rows into the replay that is stored, and do not copy it."""

from __future__ import annotations

import pytest
import torch

import tutti
from tutti.rl.replay import Ring

aten = torch.ops.aten


@pytest.mark.parametrize("level", ["O0", pytest.param("O2", marks=pytest.mark.starts)])
def test_rows_are_written_in_place(level):
    ring = Ring(length=8, n=2)
    memory = ring.init({"obs": ((3,), torch.float32), "reward": ((), torch.float32)})
    store = tutti.Store(memory=memory)

    def add(obs, reward):
        new = ring.add(memory, {"obs": obs, "reward": reward})
        memory.update(new)
        return new["rows"]["obs"].sum()

    chunks = [(torch.randn(3, 2, 3), torch.randn(3, 2)) for _ in range(4)]
    program = tutti.function(add, *chunks[0], store=store, cluster="cpu:1", level=level)
    sums = [program(*chunk) for chunk in chunks]
    targets = [node.target for node in program.program.graph.nodes]
    assert targets.count(aten.index_put_.default) == 2 and aten.index_put.default not in targets

    plain = ring.init({"obs": ((3,), torch.float32), "reward": ((), torch.float32)})
    for chunk, made in zip(chunks, sums, strict=True):
        plain = ring.add(plain, dict(zip(("obs", "reward"), chunk, strict=True)))
        torch.testing.assert_close(made, plain["rows"]["obs"].sum())
    store.write_back()
    for name, x in plain["rows"].items():
        assert torch.equal(memory["rows"][name], x)
    assert int(memory["at"]) == int(plain["at"]) == 12 % 8
