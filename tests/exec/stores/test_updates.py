"""Numbers of updates, by parameter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tutti.exec.stores.updates import Updates


def graph(updated: list[str], **counts: list[str]) -> Any:
    """What is asked of a captured graph."""
    return SimpleNamespace(updated=updated, counts=counts)


def test_a_step_may_leave_out_parameters():
    updates = Updates({"a": 0, "b": 0})
    updates.add(["a", "b"])
    updates.add(["a"])
    assert updates == {"a": 2, "b": 1} and updates.done == 2 and updates.behind() == {"b": 1}


def test_a_function_may_update_several_times():
    updates = Updates({"a": 0, "b": 0})
    updates.add({"a": 2})
    assert updates == {"a": 2, "b": 0} and updates.done == 1


def test_steps_begin_after_the_largest_number_if_all_are_set():
    updates = Updates({"a": 3, "b": 3})
    updates.done = 3
    updates.recount({"b": 1})
    assert updates.done == 3 and updates.behind() == {"b": 2}
    updates.recount({"a": 7, "b": 5})
    assert updates.done == 7 and updates.behind() == {"b": 2}


def test_whether_a_graph_still_has_the_right_inputs():
    updates = Updates({"a": 2, "b": 1, "c": 1})
    updates.done = 2
    apart = graph(["a", "b", "c"], late=["b", "c"])
    assert updates.alike(apart) and updates.punctual(apart)
    updates.add(["b"])
    assert not updates.alike(apart) and not updates.punctual(graph(["a"])) and updates.punctual(graph([]))
