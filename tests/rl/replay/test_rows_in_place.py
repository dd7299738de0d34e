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
    for chunk, total in zip(chunks, sums, strict=True):
        plain = ring.add(plain, dict(zip(("obs", "reward"), chunk, strict=True)))
        torch.testing.assert_close(total, plain["rows"]["obs"].sum())
    for name, x in plain["rows"].items():
        assert torch.equal(memory["rows"][name], x)
    assert int(memory["at"]) == int(plain["at"]) == 12 % 8


@pytest.mark.parametrize("level", ["O0", pytest.param("O2", marks=pytest.mark.starts)])
@pytest.mark.parametrize("first", [0, 1])
def test_a_result_is_not_overwritten_by_the_next_call(level, first):
    """first: the result is the new state, or a view of it."""
    cache = {"x": torch.arange(4.0)}

    def write(index, rows):
        cache["x"] = cache["x"].index_put((index,), rows)
        return cache["x"][first:]

    calls = [(torch.tensor([0, 1]), torch.tensor([9.0, 8.0])), (torch.tensor([2, 3]), torch.tensor([7.0, 6.0]))]
    program = tutti.function(write, *calls[0], store=tutti.Store(cache=cache), cluster="cpu:1", level=level)
    one, two = (program(*call) for call in calls)
    assert one.tolist() == [9, 8, 2, 3][first:] and two.tolist() == [9, 8, 7, 6][first:]


@pytest.mark.parametrize("level", ["O0", pytest.param("O2", marks=pytest.mark.starts)])
def test_rows_may_come_from_the_state_itself(level):
    cache = {"x": torch.arange(4)}

    def shift(index):
        x = cache["x"]
        cache["x"] = x.index_put((index,), x[1:])
        return x.sum()

    index = torch.tensor([0, 1, 2])
    store = tutti.Store(cache=cache)
    program = tutti.function(shift, index, store=store, cluster="cpu:1", level=level)
    assert [int(program(index)) for _ in range(3)] == [6, 9, 11]
    assert cache["x"].tolist() == [3, 3, 3, 3]
