"""The clock against closed forms, and what must hold whatever is simulated."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.plan.layouts.layout import devices
from tutti.sim.clock import Clock
from tutti.sim.tasks import COMPUTE, Task

SECONDS = st.floats(0.0, 10.0)
ON_NODE, BETWEEN = frozenset({0}), frozenset({1})


def compute(seconds: float, *waits: int) -> Task:
    return Task(COMPUTE, "work", "forward", seconds, waits=waits)


def reduce(seconds: float, axis: str = "dp", levels: frozenset[int] = ON_NODE, waits: tuple[int, ...] = ()) -> Task:
    return Task(axis, "sum", "backward", seconds, "all_reduce", levels, waits)


def blocking(tasks: list[Task]) -> list[Task]:
    """As of a Program that waits for collectives where they stand."""
    return [replace(task, blocks=task.stream != COMPUTE) for task in tasks]


@given(SECONDS, SECONDS, SECONDS, SECONDS)
def test_a_collective_hides_behind_what_does_not_need_it(before, sent, meanwhile, after):
    tasks = [compute(before), reduce(sent), compute(meanwhile), compute(after, 1)]
    waiting, overlapping = (Clock({0: todo}, {"dp": 1}).run() for todo in (blocking(tasks), tasks))
    assert waiting == pytest.approx(before + sent + meanwhile + after)
    assert overlapping == pytest.approx(before + max(sent, meanwhile) + after)
    assert waiting - overlapping == pytest.approx(min(sent, meanwhile))


def test_nothing_is_over_before_its_collectives_are():
    assert Clock({0: [compute(1.0), reduce(5.0), compute(2.0)]}, {"dp": 1}).run() == 6.0


def test_ranks_of_unlike_speed_wait_for_each_other():
    tasks = blocking([compute(1.0), reduce(0.5), compute(1.0)])
    clock = Clock({0: tasks, 1: tasks}, {"dp": 2}, slower={1: 3.0})
    assert clock.run() == 3.0 + 0.5 + 3.0
    stalls = {s.rank: s.end - s.begin for s in clock.stalls}
    assert stalls == {0: 2.5, 1: 0.5}
    assert {s.end for s in clock.spans if s.rank == 0} == {1.0, 3.5, 4.5}


def test_ranks_of_other_groups_are_not_waited_for():
    tasks = blocking([compute(1.0), reduce(1.0, "tp")])
    clock = Clock(dict.fromkeys(range(4), tasks), {"dp": 2, "tp": 2}, slower={3: 5.0})
    assert clock.run() == 6.0
    assert {s.rank: s.end for s in clock.spans if s.number == 1} == {0: 2.0, 1: 2.0, 2: 6.0, 3: 6.0}


@pytest.mark.parametrize(("levels", "expected"), [(ON_NODE, 2.0), (BETWEEN, 1.0)])
def test_collectives_of_two_axes_share_the_links_that_both_use(levels, expected):
    tasks = [reduce(1.0, "dp", ON_NODE), reduce(1.0, "tp", levels)]
    assert Clock({0: tasks}, {"dp": 1, "tp": 1}).run() == pytest.approx(expected)


def test_a_shared_link_is_whole_again_when_one_is_over():
    tasks = [reduce(1.0, "dp"), reduce(3.0, "tp")]
    clock = Clock({0: tasks}, {"dp": 1, "tp": 1})
    assert clock.run() == pytest.approx(4.0)
    assert [s.end for s in clock.spans] == [pytest.approx(2.0), pytest.approx(4.0)]


def test_collectives_of_one_axis_come_one_after_the_other():
    clock = Clock({0: [reduce(1.0), reduce(2.0)]}, {"dp": 1})
    assert clock.run() == 3.0
    assert [(s.begin, s.end) for s in clock.spans] == [(0.0, 1.0), (1.0, 3.0)]


def test_a_shift_over_several_axes_joins_all_their_ranks():
    shift = Task("dp tp", "ppermute", "forward", 1.0, "ppermute", ON_NODE, blocks=True)
    tasks = (compute(1.0), shift)
    clock = Clock(dict.fromkeys(range(4), tasks), {"dp": 2, "tp": 2}, slower={2: 2.0})
    assert clock.run() == 3.0
    assert {s.begin for s in clock.spans if s.number == 1} == {2.0}


def test_a_collective_that_others_do_not_issue():
    with pytest.raises(AssertionError, match=r"ranks \[0\] wait"):
        Clock({0: [reduce(1.0)], 1: []}, {"dp": 2}).run()


TASKS = st.lists(
    st.tuples(SECONDS, st.sampled_from([COMPUTE, COMPUTE, "dp", "tp"]), st.sets(st.integers(0, 9), max_size=2)),
    max_size=10,
)


@settings(deadline=None)
@given(TASKS, st.booleans(), st.lists(st.floats(1.0, 3.0), min_size=4, max_size=4))
def test_busy_and_idle_make_up_the_time_of_every_stream(drawn, overlaps, slower):
    mesh = {"dp": 2, "tp": 2}
    tasks = []
    for i, (seconds, stream, waits) in enumerate(drawn):
        read = tuple(sorted(w for w in waits if w < i and tasks[w].stream != COMPUTE))
        tasks.append(Task(stream, "", "", seconds, "" if stream == COMPUTE else "all_reduce", ON_NODE, read))
    clock = Clock(dict.fromkeys(range(4), tasks if overlaps else blocking(tasks)), mesh, dict(enumerate(slower)))
    total = clock.run()
    assert len(clock.spans) == len(tasks) * devices(mesh)
    streams = defaultdict(list)
    for span in clock.spans:
        streams[span.rank, tasks[span.number].stream].append((span.begin, span.end))
        seconds = tasks[span.number].seconds
        assert span.end - span.begin >= seconds - 1e-9  # never faster than alone
        for wait in tasks[span.number].waits:
            done = next(s.end for s in clock.spans if s.rank == span.rank and s.number == wait)
            assert span.begin >= done - 1e-9
    for (rank, stream), times in streams.items():
        times.sort()
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(times))  # one thing at a time
        busy = sum(end - begin for begin, end in times)
        if stream == COMPUTE:  # what is not busy is a stall, up to the rank's own end
            stalled = sum(s.end - s.begin for s in clock.stalls if s.rank == rank)
            ends = [s.end for s in clock.spans if s.rank == rank]
            assert busy + stalled == pytest.approx(max(ends))
        assert busy <= total + 1e-9


def test_computation_yields_to_collectives_in_flight():
    """Half a second of collective beside one of computation, which runs at four fifths of its speed meanwhile."""
    assert Clock({0: [reduce(0.5), compute(1.0)]}, {"dp": 1}, yields=0.2).run() == pytest.approx(1.1)
    assert Clock({0: [reduce(5.0), compute(1.0), compute(1.0)]}, {"dp": 1}, yields=0.2).run() == 5.0
    assert Clock({0: [compute(1.0), reduce(0.5)]}, {"dp": 1}, yields=0.2).run() == 1.5
