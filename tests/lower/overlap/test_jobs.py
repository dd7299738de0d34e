"""Orders of jobs against closed forms, and what must hold of them whatever the jobs are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.lower.overlap.jobs import Job, critical_paths, headroom, makespan, overlapped, peak, slacks


def two_copies(layers: int, compute: float, send: float) -> list[Job]:
    """Two chains of layers, each a computation and a collective on its result; the copies take turns."""
    jobs: list[Job] = []
    for layer in range(layers):
        for _ in range(2):
            before = (len(jobs) - 3,) if layer else ()
            jobs.append(Job("", compute, before))
            jobs.append(Job("tp", send, (len(jobs) - 1,)))
        jobs[-4:] = [jobs[-4], jobs[-3], jobs[-2], jobs[-1]]
    return jobs


@pytest.mark.parametrize(("compute", "send"), [(1.0, 1.0), (2.0, 1.0), (1.0, 0.25)])
def test_one_copy_computes_while_the_other_communicates(compute, send):
    layers = 10
    jobs = two_copies(layers, compute, send)
    order = overlapped(jobs, [], set())
    assert makespan(jobs, order) == pytest.approx(2 * layers * compute + send)
    assert sum(job.seconds for job in jobs) == pytest.approx(2 * layers * (compute + send))


def test_what_nobody_waits_for_covers_what_somebody_does():
    """A backward pass: of each layer a gradient that the next one needs, sent, and one that nobody needs."""
    jobs: list[Job] = []
    for layer in range(6):
        before = (len(jobs) - 2,) if layer else ()
        jobs += [Job("", 1.0, before), Job("tp", 1.0, (len(jobs),)), Job("", 1.0, before)]
    assert makespan(jobs, overlapped(jobs, [], set())) == pytest.approx(12.0)
    assert makespan(jobs, [0, 2, 1, *range(3, len(jobs))]) > 12.0


def test_gathers_come_as_early_as_memory_lets_them():
    """Each layer reads what is gathered for it; of the results two may be there at once."""
    size = 200 << 20
    jobs: list[Job] = []
    for i in range(8):
        needs = (2 * i, 2 * i - 1) if i else (0,)
        jobs += [Job("dp", 0.5, (), (i,)), Job("", 1.0, needs, (), (i,))]
    sizes = [size] * 8
    assert makespan(jobs, range(16)) == pytest.approx(12.0)
    order = overlapped(jobs, [*sizes, 20 * size], {8})
    assert makespan(jobs, order) == pytest.approx(12.0), "the second would not fit beside the first"
    roomy = [*jobs, Job("", 0.0, (), (8,)), Job("", 0.0, (16,), (), (8,))]
    order = overlapped(roomy, [*sizes, 20 * size], set())
    assert makespan(roomy, order) == pytest.approx(8.5)
    assert peak(roomy, order, [*sizes, 20 * size], set()) <= 20 * size + headroom(20 * size)


def test_critical_paths_and_slacks():
    jobs = [Job("", 1.0), Job("", 2.0, (0,)), Job("tp", 4.0, (1,)), Job("", 8.0, (0,)), Job("", 16.0, (2,))]
    assert critical_paths(jobs) == [23.0, 22.0, 20.0, 8.0, 16.0]
    assert slacks(jobs)[:2] == [3.0, 2.0] and slacks(jobs)[3] == float("inf")


@st.composite
def drawn(draw) -> tuple[list[Job], list[int], set[int]]:
    jobs = []
    for i in range(draw(st.integers(1, 14))):
        needs = tuple(sorted(draw(st.sets(st.integers(0, i - 1), max_size=3)))) if i else ()
        stream = draw(st.sampled_from(["", "", "tp", "dp"]))
        jobs.append(Job(stream, draw(st.floats(0.0, 4.0)), needs, (i,), needs))
    sizes = [draw(st.integers(0, 200 << 20)) for _ in jobs]
    return jobs, sizes, draw(st.sets(st.integers(0, len(jobs) - 1), max_size=2))


@given(drawn())
def test_an_order_keeps_what_it_must(case):
    jobs, sizes, live_out = case
    order, whole = overlapped(jobs, sizes, live_out), range(len(jobs))
    at = {i: place for place, i in enumerate(order)}
    assert sorted(order) == list(whole)
    assert all(at[j] < at[i] for i, job in enumerate(jobs) for j in job.needs)
    assert makespan(jobs, order) <= makespan(jobs, whole) + 1e-9
    assert (
        makespan(jobs, order)
        >= max(sum(job.seconds for job in jobs if not job.stream), max(critical_paths(jobs))) - 1e-9
    )
    needed = peak(jobs, whole, sizes, live_out)
    assert peak(jobs, order, sizes, live_out) <= needed + headroom(needed)
    assert order == overlapped(jobs, sizes, live_out), "every rank finds the same"


def test_no_order_is_taken_that_needs_more_than_may_be_alive():
    jobs = [Job("", 1.0, (), (0,)), Job("dp", 5.0, (0,), (1,), (0,)), Job("", 5.0, (0,), (2,), (0,)),
            Job("", 1.0, (1, 2), (), (1, 2))]  # fmt: skip
    sizes = [1 << 30] * 3
    needed = peak(jobs, range(4), sizes, set())
    assert overlapped(jobs, sizes, set(), limit=needed)
    assert overlapped(jobs, sizes, set(), room=10 * needed, limit=needed - 1) == []


def test_a_job_that_does_not_fit_lets_one_go_first_that_frees_memory():
    """A gathered weight is there early. Beside it there is no room for the result of the next job, but for the last's,
    after which weight and activation are gone."""
    size = 1 << 30
    jobs = [Job("", 2.0, (), (0,)), Job("", 1.0, (0,), (1,), (0,)), Job("dp", 1.0, (), (2,)),
            Job("", 1.0, (0, 2), (3,), (0, 2))]  # fmt: skip
    sizes = [4 * size, size, size, 0]
    order = overlapped(jobs, sizes, set())
    assert order == [2, 0, 3, 1] and makespan(jobs, order) == 4.0 < makespan(jobs, range(4)) == 5.0
    assert peak(jobs, order, sizes, set()) == peak(jobs, range(4), sizes, set()) == 5 * size


def test_recomputation_stays_beside_its_use():
    """Recomputed activations read only values of the forward pass, so list scheduling by paths runs them far ahead."""
    jobs, sizes = [Job("", 1.0, (), (0,)), Job("", 1.0, (), (1,))], [1 << 20, 1 << 20]
    for _ in range(8):  # a weight is gathered; activations are recomputed; the gradient goes on; its sum is sent
        at, v = len(jobs), len(sizes)
        jobs += [
            Job("dp", 1.2, (), (v,)),
            Job("", 1.0, (0,), (v + 1,), (0,)),
            Job("", 1.0, (at - 1, at, at + 1), (v + 2,), (v, v + 1, v - 1)),
            Job("tp", 2.0, (at + 2,), (v + 3,), (v + 2,)),
        ]
        sizes += [1 << 27, 1 << 32, 1 << 20, 1 << 20]
    needed = peak(jobs, range(len(jobs)), sizes, set())
    order = overlapped(jobs, sizes, set(), room=100 * needed)
    assert makespan(jobs, order) <= 1.05 * max(critical_paths(jobs))
    assert peak(jobs, order, sizes, set()) <= 1.2 * needed


def test_what_the_forward_pass_does_not_keep_is_not_computed_while_it_waits():
    """Each layer sends its result. The backward pass computes a function of the layer's activation again, and sums that
    nobody needs cover its collectives."""
    size, layers = 1 << 30, 12
    jobs: list[Job] = []
    sizes: list[int] = []
    for layer in range(layers):
        jobs += [Job("", 1.0, (len(jobs) - 1,) if layer else (), (layer,)), Job("tp", 1.0, (len(jobs),))]
        sizes.append(size)
    for layer in reversed(range(layers)):
        at, v = len(jobs), len(sizes)
        jobs += [
            Job("", 0.1, (2 * layer,), (v,), (layer,)),
            Job("", 1.0, (at - 2 if layer < layers - 1 else at - 1, at), (v + 1,), (v, layer)),
            Job("tp", 1.0, (at + 1,), (), (v + 1,)),
            Job("", 1.0, (at + 1,), (), (v + 1,)),
        ]
        sizes += [size, 1 << 10]
    needed = peak(jobs, range(len(jobs)), sizes, set())
    order = overlapped(jobs, sizes, set(), room=100 * needed)
    assert makespan(jobs, order) <= sum(job.seconds for job in jobs if not job.stream) + layers + 1e-9
    assert peak(jobs, order, sizes, set()) <= 1.1 * needed
