"""Lines and S-parameters: what they are read from, and what they refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tutti.science.em.fdtd import Grid, LinePlane, Simulation, gaussian_up_to, s_parameters
from tutti.science.em.fdtd.simulation import Result

LINE = LinePlane("in", "y", "z", (14, 20), 30, 0, 3)
GRID, DT = Grid((40, 60, 10), 0.4e-3), 0.6e-12


def recorded(steps: int, scale: float = 1.0) -> Result:
    """A wave of 1 / scale V at the line, with currents of 50 ohm."""
    times, values = (torch.arange(steps, dtype=torch.float64) + 1) * DT, {}
    for part, factor in zip(LINE.parts, (scale, 0, 0, scale / 50, 0), strict=True):
        shape = [len(range(100)[x]) for x in part.where if isinstance(x, slice)]
        x = factor * gaussian_up_to(20e9)(times)
        values[part.name] = x.reshape(steps, *[1] * len(shape)).expand(steps, *shape).clone()
    return Result(values, [], GRID, DT)


def test_a_simulation_takes_lines_as_monitors():
    assert Simulation(GRID, monitors=[LINE]).monitors == LINE.parts
    result = Simulation(GRID, monitors=[LINE]).run(1.0, 2)
    assert [x.shape for x in LINE.voltage_and_current(result)] == [(2,), (2,)]


def test_s_parameters_of_a_run_that_has_decayed():
    assert s_parameters([LINE], recorded(600), torch.tensor([1e9, 20e9])).shape == (1, 2)


def test_a_run_that_ends_too_early_is_told():
    with pytest.warns(UserWarning, match="last twentieth of 200 steps the voltage still reaches 99.3% of the peak"):
        s_parameters([LINE], recorded(200), torch.tensor([1e9]))
    with pytest.raises(ValueError, match="lines in: no voltage in 600 steps"):
        s_parameters([LINE], recorded(600, 0.0), torch.tensor([1e9]))


@pytest.mark.parametrize("frequency, message", [
    (500e9, r"line in: its wave at 5e\+11 Hz is below 0.0001 of its peak; the source reaches from 0 to 3"),
    (1e12, r"half the rate of the steps, 8.333e\+11 Hz, not 1e\+12 Hz"),
    (-1e9, "frequencies: from 0"),
    (float("nan"), "not nan Hz"),
])  # fmt: skip
def test_frequencies_that_the_run_does_not_hold(frequency, message):
    with pytest.raises(ValueError, match=message):
        s_parameters([LINE], recorded(600), torch.tensor([frequency]))


def test_the_first_line_may_be_silent_in_other_shots():
    """Each port is driven in a shot of its own, and each S-parameter is read from that of its line."""
    driven, silent = recorded(600), recorded(600, 1e-7)
    both = {name: torch.stack([driven[name], silent[name]]) for name in driven.values}
    scattering = s_parameters([LINE], Result(both, [], GRID, DT), torch.tensor([1e9]))
    assert torch.equal(scattering[:, 0], s_parameters([LINE], driven, torch.tensor([1e9])))
    with pytest.raises(ValueError, match=r"its wave at 5e\+11 Hz"):
        s_parameters([LINE], Result(both, [], GRID, DT), torch.tensor([500e9]))


def test_the_end_of_a_run_alone_has_no_s_parameters():
    end = replace(recorded(600), steps=900)
    with pytest.raises(ValueError, match="continues another one of 300 steps"):
        s_parameters([LINE], end, torch.tensor([1e9]))


@pytest.mark.parametrize("options, message", [
    ({"along": "z"}, "two of the axes x, y and z, not along 'z' and height 'z'"),
    ({"height": "Z"}, "two of the axes"),
    ({"strip": (20, 14)}, "from its first node, at least 1, to its last one, not 20 to 14"),
    ({"strip": (0, 4)}, "at least 1, to its last one, not 0 to 4"),
    ({"ground": 3, "top": 0}, "a ground below the top, in nodes, not 3 and 0"),
    ({"place": 0}, "a place of at least 1"),
    ({"strip": 5}, "places are numbers of nodes, and of a strip two, not 5, 30, 0 and 3"),
    ({"place": 2.5}, "places are numbers of nodes"),
    ({"sign": 0}, "a sign of 1 or -1, not 30 and 0"),
])  # fmt: skip
def test_lines_that_enclose_nothing(options, message):
    usual = {"along": "y", "height": "z", "strip": (14, 20), "place": 30, "ground": 0, "top": 3}
    with pytest.raises(ValueError, match=f"line in: .*{message}"):
        LinePlane("in", **{**usual, **options})


def test_other_arguments():
    with pytest.raises(ValueError, match="impedance of a line: positive"):
        s_parameters([LINE], recorded(600), torch.tensor([1e9]), -50.0)
    with pytest.raises(ValueError, match="lines: a list of them"):
        s_parameters(LINE, recorded(600), torch.tensor([1e9]))
    with pytest.raises(ValueError, match=r"lines: a list of them, the driven one first, not .'in'"):
        s_parameters(["in"], recorded(600), torch.tensor([1e9]))
    with pytest.raises(ValueError, match="frequencies: a tensor of numbers in Hz"):
        s_parameters([LINE], recorded(600), 1e9)
    with pytest.raises(KeyError, match="no monitor 'out voltage'; there are in voltage"):
        s_parameters([LINE, LinePlane("out", "y", "z", (14, 20), 30, 0, 3)], recorded(600), torch.tensor([1e9]))
