"""Schedules: all work once, nobody waits in a circle, bubbles and microbatches in flight as the formulas say."""

import random

import pytest

from pipelines import bubble
from tutti.plan.pipeline.schedule import CHUNKED, IN_V, NAMES, PAIRED, forward, schedule_of
from tutti.plan.pipeline.slots import Slot, clock, in_flight, makespan

SIZES = [(2, 4), (3, 6), (4, 8), (4, 16), (8, 32)]


def stages(name, p):
    return 2 * p if name in ("interleaved", *IN_V) else p


def equal(count):
    """A backward pass takes as long as two forward passes, each of its parts as one."""
    return [(1.0, 1.0, 1.0, 0.0)] * count


@pytest.mark.parametrize("p, m", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_all_work_is_done_once_and_in_an_order_that_runs(name, p, m):
    m = max(m, 2 * p) if name == PAIRED else m
    schedule = schedule_of(name, p, stages(name, p), m, sequence_chunks=3 if name == CHUNKED else 1)
    slots = [slot for device in schedule.devices for slot in device]
    kinds, chunks = "FBW" if schedule.split else "FB", range(schedule.sequence_chunks)
    all_work = [Slot(k, s, i, c) for k in kinds for s in range(stages(name, p)) for i in range(m) for c in chunks]
    assert sorted(slots) == sorted(all_work)
    assert all(schedule.place[slot.stage] == d for d, device in enumerate(schedule.devices) for slot in device)
    assert len(clock(schedule, equal(stages(name, p)))) == len(slots)


@pytest.mark.parametrize("p, m", SIZES)
def test_bubbles_are_those_of_the_formulas(p, m):
    assert bubble(schedule_of("gpipe", p, p, m), equal(p)) == pytest.approx((p - 1) / m)
    assert bubble(schedule_of("1f1b", p, p, m), equal(p)) == pytest.approx((p - 1) / m)
    for v in (2, 3):
        assert bubble(schedule_of("interleaved", p, v * p, m), equal(v * p)) == pytest.approx((p - 1) / (v * m))


@pytest.mark.parametrize("p, m", SIZES)
def test_a_split_backward_pass_fills_most_of_the_bubble(p, m):
    """In forward passes of a stage: 1F1B waits for 3 (p - 1), ZB-H1 for p - 1 and ours for two more, the V for about p
    of half the size, which the first device needs to begin and to end anyway."""
    assert bubble(schedule_of("zb-h1", p, p, m), equal(p)) * 3 * m <= p - 1 + 2
    assert bubble(schedule_of("zb-v", p, 2 * p, m), equal(2 * p)) * 6 * m <= 2 * p - 1


@pytest.mark.parametrize("p, m", SIZES)
def test_microbatches_in_flight(p, m):
    def in_flight_by_device(name):
        return [sum(stages) for stages in in_flight(schedule_of(name, p, stages(name, p), m))]

    assert in_flight_by_device("gpipe") == [m] * p
    assert in_flight_by_device("1f1b") == [min(p - d, m) for d in range(p)]
    assert in_flight_by_device("interleaved") == [min(2 * m, 2 * (p - d - 1) + p + 1) for d in range(p)]
    assert (
        max(in_flight_by_device("zb-h1")) == max(in_flight_by_device("auto")) == p
        and max(in_flight_by_device("zb-v")) == 2 * p
    )


@pytest.mark.parametrize("p, m", [(2, 4), (3, 6), (4, 8), (4, 16), (8, 32)])
def test_pairs_of_forward_and_backward_slots(p, m):
    """The order of DeepSeek's DualPipeV: m - 2p + d + 1 rounds of two pairs on device d, then one in each of the rounds
    of the last backward passes that bring forward slots."""
    schedule = schedule_of(PAIRED, p, 2 * p, m)
    for d, paired in enumerate(schedule.pairs):
        assert len(paired) == 2 * (m - 2 * p + d + 1) + p - 1 - d
        for i in paired:
            forward_slot, backward_slot = schedule.devices[d][i : i + 2]
            assert (forward_slot.kind, backward_slot.kind) == ("F", "B")
            assert forward_slot.stage != backward_slot.stage
    durations = equal(2 * p)
    times = clock(schedule, durations)
    assert all(
        times[schedule.devices[d][i]] == times[schedule.devices[d][i + 1]]
        for d, paired in enumerate(schedule.pairs) for i in paired
    )  # fmt: skip
    assert bubble(schedule, durations) <= (2 * p - 1) / m, "of work of six slots a microbatch"
    assert max(sum(counts) for counts in in_flight(schedule)) <= 2 * p + 1


@pytest.mark.parametrize("n", [2, 4, 7])
@pytest.mark.parametrize("p, m", SIZES)
def test_chunks_of_the_sequence(p, m, n):
    """As many microbatches of a part of the size would wait; a device holds all chunks of one, and some of others."""
    schedule = schedule_of("seq1f1b", p, p, m, sequence_chunks=n)
    assert bubble(schedule, equal(p)) == pytest.approx((p - 1) / (n * m))
    assert [sum(counts) for counts in in_flight(schedule)] == pytest.approx(
        [min(m, 1 + (p - d - 1) / n) for d in range(p)]
    )
    for slots in schedule.devices:
        for i in range(m):
            assert [slot.slice for slot in slots if (slot.kind, slot.microbatch) == ("F", i)] == list(range(n))
            assert [slot.slice for slot in slots if (slot.kind, slot.microbatch) == ("B", i)] == [*reversed(range(n))]


def test_names_and_numbers_of_chunks_have_to_agree():
    with pytest.raises(ValueError, match="seq1f1b has at least two chunks"):
        schedule_of("seq1f1b", 2, 2, 4)
    with pytest.raises(ValueError, match="gpipe has no chunks"):
        schedule_of("gpipe", 2, 2, 4, sequence_chunks=2)


@pytest.mark.parametrize("seed", range(8))
def test_a_found_schedule_of_unequal_stages_ends_no_later_than_those_by_name(seed):
    draw = random.Random(seed)
    p, m = draw.choice([2, 3, 4]), draw.choice([4, 6, 8])
    durations = [(*(draw.uniform(0.2, 2.0) for _ in range(3)), draw.choice([0.0, 0.5])) for _ in range(p)]
    finish = makespan(schedule_of("auto", p, p, m, durations), durations)
    assert finish <= makespan(schedule_of("zb-h1", p, p, m), durations) * (1 + 1e-9)
    assert finish <= makespan(schedule_of("1f1b", p, p, m), durations) * 1.02
    work = [m * sum(stage[:3]) for stage in durations]
    ends = [sum(durations[s][0] + durations[s][3] for s in range(d)) + work[d] for d in range(p)]
    assert max(ends) <= finish * (1 + 1e-9), "nobody begins before the stages before it have"


def test_what_is_sent_is_on_its_way():
    schedule = schedule_of("1f1b", 2, 2, 1)
    assert makespan(schedule, [(1.0, 2.0, 3.0, 0.25), (1.0, 2.0, 3.0, 7.0)]) == 12 + 2 * 0.25, (
        "nobody comes after the last"
    )


def test_forward_passes_alone():
    schedule = forward((0, 1, 1, 0), 2)
    assert schedule.devices[1] == (Slot("F", 1, 0), Slot("F", 2, 0), Slot("F", 1, 1), Slot("F", 2, 1))


def test_what_waits_in_a_circle_is_an_error():
    schedule = schedule_of("1f1b", 2, 2, 2)
    turned = type(schedule)("turned", (schedule.devices[0][::-1], schedule.devices[1]), schedule.place)
    with pytest.raises(ValueError, match="wait for one another"):
        clock(turned, equal(2))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("2f2b", 2, 2, 4), "no schedule '2f2b'; there are gpipe, 1f1b"),
        (("1f1b", 4, 6, 4), "6 stages do not divide over 4 devices"),
        (("1f1b", 2, 4, 4), "one stage on each device"),
        (("zb-v", 2, 2, 4), "zb-v has 2 stages on each device, which makes 4, not 2"),
        (("dualpipev", 4, 8, 7), "dualpipev on 4 devices takes at least 8 microbatches, not 7"),
        (("auto", 2, 6, 4), "auto has 1 or 2 stages on each device, which makes 2 or 4, not 6"),
        (("auto", 2, 2, 4, [(1.0, 1.0, 1.0, 0.0)]), "1 durations are given for 2 stages"),
        (("interleaved", 4, 8, 6), "a multiple of 4 microbatches, not 6"),
    ],
)
def test_numbers_that_do_not_go_together(arguments, message):
    with pytest.raises(ValueError, match=message):
        schedule_of(*arguments)
