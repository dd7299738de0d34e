"""Schedules in letters: as many as there is time for, each where it is on the clock."""

import pytest

from tutti.plan.pipeline.draw import WIDE, drawn
from tutti.plan.plan import Plan


def plan(schedule, devices, stages, microbatches, durations=()):
    names = {f"layers.{i}": i for i in range(stages)}
    return Plan({"pp": devices}, accumulate=microbatches, stages=names, schedule=schedule, durations=durations)


def test_a_pipeline_of_two_stages():
    """1F1B, with a backward pass that takes as long as two forward passes: 12 moments in all."""
    *lines, legend = drawn(plan("1f1b", 2, 2, 3))
    first, second = (line.removeprefix(f"device {d}   ") for d, line in enumerate(lines))
    assert len(first) == len(second) == WIDE and legend.startswith("digits: forward passes")

    def shares(line):
        return {letter: 12 * line.count(letter) / WIDE for letter in set(line)}

    expected = {".": 3.0, "0": 1.0, "1": 1.0, "2": 1.0, "a": 2.0, "b": 2.0, "c": 2.0}
    assert shares(first) == pytest.approx(expected, abs=0.13) and shares(second) == pytest.approx(expected, abs=0.13)
    assert first.startswith("0") and first.endswith("c") and second.startswith(".") and second.endswith(".")


def test_durations_and_many_microbatches_and_devices():
    unequal = ((1.0, 1.0, 1.0, 0.0), (3.0, 3.0, 3.0, 0.0))
    first, second, legend = drawn(plan("auto", 2, 2, 40, unequal))
    assert second.count(".") < first.count(".") and "+" in second
    assert legend.startswith("the first 6 of 40 microbatches; ")
    lines = drawn(plan("gpipe", 32, 32, 4))
    assert lines[8] == "..." and lines[9].startswith("device 24 ") and len(lines) == 18
