"""Surrogates: curves and bounds on a line's stub with a closed form, samples on disk, and what is refused."""

import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event

import pytest
import torch

from tutti.launch.progress import told_by
from tutti.science.em.surrogate import Geometry, Parameter, Samples, Space, Surrogate, Training, collect, relative_error
from tutti.science.em.surrogate import samples as samples_on_disk
from tutti.science.em.surrogate.active import active, chosen
from tutti.science.em.surrogate.curves import Basis, passive
from tutti.science.em.surrogate.geometry import check_s
from tutti.science.em.surrogate.posts import POSTS, WIDTH, permittivity, scattered, simulation
from tutti.science.em.surrogate.stub import STUB

HOW = Training(members=4, width=64, blocks=1, steps=500, batch=64)


@pytest.fixture(scope="module")
def samples():
    return collect(STUB, STUB.space.sobol(160, 1))


@pytest.fixture(scope="module")
def surrogate(samples):
    return Surrogate.fit(STUB, samples, HOW)


def test_error_and_coverage_on_held_out_points(surrogate):
    points = STUB.space.random(200, 2)
    prediction, truth = surrogate.predict(points), STUB(points)
    error = relative_error(prediction.s, truth)
    assert error.mean() < 0.05
    assert 0.8 <= float((error <= prediction.bound).double().mean()) <= 1.0
    assert prediction.s.abs().square().sum(1).max() < 1 + 1e-9


def test_points_that_are_not_trusted_are_solved(surrogate):
    outside = {"length": 9e-3, "impedance": 60.0, "eps_r": 2.5}
    prediction = surrogate.predict(outside)
    assert math.isinf(prediction.bound) and not prediction.trusted
    solved = surrogate.solve(outside)
    assert bool(solved.solved) and torch.equal(solved.s[0], STUB.solve(outside).to(torch.complex128))
    assert float(solved.bound) == 0
    inside = {**outside, "length": 6e-3}
    surrogate.tolerance = 1.0
    assert not surrogate.solve(inside).solved and torch.equal(surrogate.solve(inside).s, surrogate.predict(inside).s)
    surrogate.tolerance = 0.0
    assert bool(surrogate.solve(inside).solved)


def test_saved_and_loaded(surrogate, tmp_path):
    surrogate.save(tmp_path / "stub.pt")
    again = Surrogate.load(tmp_path / "stub.pt", STUB)
    points = STUB.space.random(3, 5)
    for one, two in ((again.predict(points), surrogate.predict(points)),):
        assert torch.equal(one.s, two.s) and torch.equal(one.bound, two.bound)
    wide = Space(tuple(replace(x, high=1.2 * x.high) for x in STUB.space.parameters))
    for other, what in ((POSTS, "geometry"), (replace(STUB, space=wide), "high"),
                        (replace(STUB, traces=("a", "b")), "traces"),
                        (replace(STUB, frequencies=2 * STUB.frequencies), "frequencies"),
                        (replace(STUB, representation="phases"), "representation")):  # fmt: skip
        with pytest.raises(ValueError, match=f"surrogate of stub with {what} = "):
            Surrogate.load(tmp_path / "stub.pt", other)


@pytest.mark.parametrize("content", [b"hello", b"", {"weight": torch.ones(2)}, torch.ones(2), torch.nn.Linear(1, 1)],
                         ids=["text", "empty", "state", "tensor", "network"])  # fmt: skip
def test_files_that_are_no_surrogate(content, tmp_path):
    path = tmp_path / "other.pt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(ValueError, match=r"other\.pt is no surrogate that `Surrogate\.save` wrote"):
        Surrogate.load(path, STUB)
    if isinstance(content, bytes):
        with pytest.raises(ValueError, match=r"wrote: .*other\.pt is damaged, or no file of torch\.save"):
            Surrogate.load(path, STUB)
    with pytest.raises(ValueError, match=r"geometry: the one that .*other\.pt is a surrogate of, not 'stub'"):
        Surrogate.load(path, "stub")


def test_training_tells_how_far_it_is(samples):
    shown, steps = [], []
    with told_by(shown.append):
        Surrogate.fit(STUB, samples, replace(HOW, members=2, width=8, steps=40, batch=16),
                      after=lambda step, loss: steps.append((step, loss > 0)))  # fmt: skip
    assert [x for x, _ in steps] == list(range(2, 41, 2)) and all(positive for _, positive in steps)
    assert any(x.startswith("training a surrogate of stub: 20 of 40, loss ") for x in shown)


def test_surrogates_are_shown_in_a_line(surrogate, samples):
    assert repr(surrogate).startswith("Surrogate(stub, S: (n, 2, 46), 4 members, ")
    assert repr(samples).startswith("Samples(points=float64 (160, 3) from ")
    assert "s=complex128 (160, 2, 46) magnitudes from " in repr(samples)
    assert "s=complex128 (5, 2, 46) " in repr(surrogate.predict(STUB.space.random(5)))
    assert "frequencies=float64 (46,)" in repr(STUB) and "\n" not in repr(surrogate.basis)


@pytest.mark.parametrize("options, message", [
    ({"members": 1}, "members of the training: a whole number from 2, not 1"),
    ({"members": 0}, "members of the training"),
    ({"batch": 0}, "batch of the training: a whole number from 1, not 0"),
    ({"width": -1}, "width of the training: a whole number from 1, not -1"),
    ({"steps": 0}, "steps of the training"),
    ({"steps": 2.5}, "steps of the training: a whole number from 1, not 2.5"),
    ({"modes": 0}, "modes of the training"),
    ({"blocks": -1}, "blocks of the training: a whole number from 0"),
    ({"calibration_fraction": 1.5}, "calibration_fraction of the training: a fraction between 0 and 1, not 1.5"),
    ({"rate": math.nan}, "rate of the training: positive, not nan"),
])  # fmt: skip
def test_training_needs_numbers_that_mean_something(options, message):
    with pytest.raises(ValueError, match=message):
        Training(**options)


@pytest.mark.parametrize("options, message", [
    ({"start": 0}, "start of active sampling"),
    ({"per_round": 0}, "per_round of active sampling: a whole number from 1, not 0"),
    ({"rounds": -1}, "rounds of active sampling: a whole number from 0"),
    ({"candidates": 3}, "per_round: at most the 3 candidates, not 5"),
    ({"processes": 0}, "processes of active sampling"),
    ({"tolerance": -1}, "tolerance: the largest bound that is trusted, at least 0, not -1"),
])  # fmt: skip
def test_active_sampling_needs_numbers_that_mean_something(options, message):
    with pytest.raises(ValueError, match=message):
        active(STUB, **{"start": 30, "per_round": 5, "rounds": 1, **options})


def test_points_of_largest_spread_are_chosen_apart(surrogate):
    pool = STUB.space.random(300, 7)
    rows = chosen(surrogate, pool, 5, 160)
    assert len(set(rows.tolist())) == 5
    assert int(rows[0]) == int(surrogate.curves(pool)[1].argmax())
    twice = torch.cat([pool[rows[:1]], pool])  # the same point again has no spread left
    assert len({tuple(x) for x in twice[chosen(surrogate, twice, 2, 160)].tolist()}) == 2


def test_active_rounds_solve_no_more_than_they_say(tmp_path):
    seen = []
    how = replace(HOW, members=2, width=16, steps=20)
    trained, collected = active(STUB, start=30, per_round=5, rounds=2, training=how, folder=tmp_path, candidates=50,
                                after=lambda n, _: seen.append(n))  # fmt: skip
    assert seen == [30, 35, 40] and len(collected) == 40 == len(list(tmp_path.glob("*.npz")))
    assert trained.predict(collected.points).s.shape == (40, *STUB.shape)


def test_active_sampling_solves_nothing_for_a_coverage_that_it_cannot_calibrate():
    def solve(_):
        raise AssertionError("solved")

    with pytest.raises(ValueError, match=r"10 samples cannot calibrate .* 0\.95: hold out at least 19"):
        active(replace(STUB, solve=solve), start=30, per_round=5, rounds=2, coverage=0.95)


def test_collection_resumes(tmp_path):
    calls = []

    def solve(values):
        calls.append(values)
        return STUB.solve(values)

    geometry = replace(STUB, solve=solve)
    points = STUB.space.sobol(6)
    first = collect(geometry, points[:4], tmp_path)
    again = collect(geometry, points, tmp_path)
    assert len(calls) == 6
    assert torch.equal(again.s[:4], first.s) and torch.equal(again.s, STUB(points))
    assert torch.equal(again.seconds[:4], first.seconds)
    other = collect(replace(geometry, frequencies=2 * STUB.frequencies), points[:2], tmp_path)
    assert len(calls) == 8 == len(list(tmp_path.glob("*.npz"))) and len(other) == 2


@pytest.mark.starts
def test_collection_by_processes(tmp_path):
    points = STUB.space.sobol(4)
    assert torch.equal(collect(STUB, points, tmp_path, processes=2).s, STUB(points))


SCRIPT = """
import torch
from tutti.science.em.surrogate import Geometry, Parameter, Space, collect

def solve(values):
    return torch.zeros(2, 20001, dtype=torch.complex128)

space = Space((Parameter("a", 0.0, 1.0),))
frequencies = torch.linspace(1e9, 2e9, 20001, dtype=torch.float64)
collect(Geometry("empty", space, frequencies, ("S11", "S21"), solve), space.sobol(8), processes=2)
"""


@pytest.mark.starts
def test_a_script_without_a_guard_fails(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.rstrip().splitlines()[-1].startswith("RuntimeError: a process that solves empty died: collect(")


def test_solvers_that_other_processes_cannot_find():
    with pytest.raises(ValueError, match="solve must be a function of a module to run in other processes"):
        collect(replace(STUB, solve=lambda values: STUB.solve(values)), STUB.space.sobol(2), processes=2)


def test_samples_are_written_as_they_are_done(tmp_path, monkeypatch):
    """The first point waits for the file of another one."""
    monkeypatch.setattr(samples_on_disk, "ProcessPoolExecutor", lambda count, *_, **__: ThreadPoolExecutor(count))
    monkeypatch.setattr(samples_on_disk, "check_processes", lambda geometry: None)
    points, written, waited = STUB.space.sobol(3), Event(), []
    monkeypatch.setattr(samples_on_disk, "write", lambda *_: written.set())

    def solve(values):
        if values["length"] == float(points[0, 0]):
            waited.append(written.wait(5))
        return STUB.solve(values)

    assert torch.equal(collect(replace(STUB, solve=solve), points, tmp_path, processes=2).s, STUB(points))
    assert waited == [True]


@pytest.mark.parametrize("representation", ["complex", "phases"])
def test_a_basis_has_the_curves_of_its_samples(samples, representation):
    s = samples.s if representation == "complex" else lossless()
    basis = Basis.of(s, representation, error=1e-9, most=200)
    assert float(relative_error(basis.decode(basis.encode(s)), s).max()) < 1e-6
    few = Basis.of(s, representation, error=1e-2)
    assert len(few.scale) < len(basis.scale)
    assert float(relative_error(few.decode(few.encode(s)), s).square().mean().sqrt()) < 0.1


def lossless():
    f = torch.linspace(0, 3, 40, dtype=torch.float64)
    shift = torch.linspace(-1, 1, 30, dtype=torch.float64)[:, None]
    even, odd = torch.exp(-1j * (2 * f + shift)), torch.exp(-1j * (f - 2 + torch.sin(shift * f)))
    return torch.stack([even + odd, even - odd], 1) / 2


def test_phases_give_lossless_curves():
    basis = Basis.of(lossless(), "phases", error=1e-2)
    s = basis.decode(torch.randn(5, len(basis.scale), generator=torch.Generator().manual_seed(0)))
    assert torch.allclose(s.abs().square().sum(1), torch.ones(5, 40, dtype=torch.float64))


def test_passive_curves_are_not_changed_and_others_scaled():
    s = torch.tensor([[0.6 + 0j, 2.0], [0.8j, 0.0]])
    assert torch.allclose(passive(s), torch.tensor([[0.6 + 0j, 1.0], [0.8j, 0.0]]))


@pytest.mark.starts
def test_a_slab_in_the_waveguide():
    """The field solver of POSTS against a slab that fills the guide: half the cells, half the error."""
    errors = []
    for cells in (24, 48):
        guide, _ = simulation(cells)
        delta, n = guide.grid.lengths[0], guide.grid.shape[0] // 2
        half = round(5e-3 / delta)
        eps = torch.ones(guide.grid.shape, dtype=torch.float64)
        eps[n - half : n + half] = 4
        k = 2 * math.pi * POSTS.frequencies / 299792458
        outside, inside = ((e * k**2 - (math.pi / WIDTH) ** 2).sqrt() for e in (1, 4))
        r, p = (outside - inside) / (outside + inside), torch.exp(-1j * inside * 2 * half * delta)
        back = torch.exp(1j * outside * 2 * half * delta) / (1 - r**2 * p**2)
        truth = torch.stack([r * (1 - p**2) * back, (1 - r**2) * p * back])
        errors.append(float(relative_error(scattered(eps, cells)[None], truth[None])))
    assert errors[1] < 0.01 and errors[1] < 0.6 * errors[0]


def test_posts_are_discs_of_their_area():
    grid = simulation(48)[0].grid
    eps = permittivity(grid, [(-15e-3, 2e-3, 5.0), (0.0, 2.5e-3, 3.0)])
    area = float((eps - 1).sum()) * grid.lengths[0] ** 2
    assert area == pytest.approx(math.pi * (4 * 2e-3**2 + 2 * 2.5e-3**2), rel=0.01)


def test_what_is_refused(samples, surrogate):
    space, s = STUB.space, samples.s
    with pytest.raises(ValueError, match=r"length = 0.02 m is out of its range, 0.004 to 0.008 m"):
        STUB(torch.tensor([0.02, 50.0, 2.5]))
    with pytest.raises(ValueError, match="impedance of point 0 is nan"):
        surrogate.predict(torch.tensor([5e-3, math.nan, 2.5]))
    with pytest.raises(ValueError, match=r"shape \(n, 3\)"):
        surrogate.predict(torch.zeros(4, 2))
    with pytest.raises(ValueError, match="parameters: length, impedance, eps_r, not length"):
        surrogate.predict({"length": 5e-3})
    with pytest.raises(ValueError, match="impedance: a number, not '5mm'"):
        surrogate.predict({"length": 5e-3, "impedance": "5mm", "eps_r": 2.5})
    with pytest.raises(ValueError, match=r"S of stub at length=0\.005, impedance=50, eps_r=2\.5: shape"):
        replace(STUB, solve=lambda values: None)(torch.tensor([5e-3, 50.0, 2.5]))
    with pytest.raises(ValueError, match="low must be below high"):
        Parameter("length", 2.0, 1.0)
    with pytest.raises(ValueError, match="different names"):
        Space((Parameter("a", 0, 1), Parameter("a", 0, 1)))
    with pytest.raises(ValueError, match="increasing"):
        Geometry("x", space, torch.tensor([2.0, 1.0]), ("S11",), STUB.solve)
    with pytest.raises(ValueError, match="complex or phases"):
        replace(STUB, representation="polar")
    with pytest.raises(ValueError, match="not finite"):
        Surrogate.fit(STUB, Samples(samples.points, s * math.nan, samples.seconds))
    with pytest.raises(ValueError, match="traces, frequencies"):
        Surrogate.fit(STUB, Samples(samples.points, s[:, :1], samples.seconds))
    with pytest.raises(ValueError, match="at most 1"):
        Surrogate.fit(STUB, Samples(samples.points, 2 * s, samples.seconds))
    with pytest.raises(ValueError, match="5 samples of stub are too few: at least 10"):
        Surrogate.fit(STUB, samples[:5])
    with pytest.raises(ValueError, match="hold out at least 9"):
        Surrogate.fit(STUB, samples[:30])
    with pytest.raises(ValueError, match="tolerance: the largest bound that is trusted, at least 0, not nan"):
        Surrogate.fit(STUB, samples, tolerance=math.nan)
    for arguments, message in ((("stub", samples), "geometry: of type Geometry, not 'stub'"),
                               ((STUB, None), "samples: of type Samples, not None"),
                               ((STUB, samples, 5), "training: of type Training, not 5")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            Surrogate.fit(*arguments)
    with pytest.raises(ValueError, match="calibration: of type Samples, not 3"):
        Surrogate.fit(STUB, samples, calibration=3)
    with pytest.raises(ValueError, match="points: a tensor or a mapping of length, impedance, eps_r, not 'a'"):
        surrogate.predict("a")
    with pytest.raises(ValueError, match="parameters: a tuple of them, not Parameter"):
        Space(Parameter("a", 0, 1))
    with pytest.raises(ValueError, match="parameters: of type Parameter, not 'a'"):
        Space(("a",))
    with pytest.raises(ValueError, match="low and high are numbers, not '0' and 1"):
        Parameter("a", "0", 1)
    with pytest.raises(ValueError, match="solve of stub: from values"):
        replace(STUB, solve=3)
    with pytest.raises(ValueError, match="count of points: a whole number from 0, not -1"):
        space.sobol(-1)
    with pytest.raises(ValueError, match="processes of a collection"):
        collect(STUB, space.sobol(1), processes=0)
    with pytest.raises(ValueError, match="some points are in both"):
        Surrogate.fit(STUB, samples, calibration=samples[:20])
    with pytest.raises(ValueError, match=r"norm 1\.414"):
        check_s(torch.ones(2, 3), (2, 3), "a splitter")
    with pytest.raises(ValueError, match="lossless symmetric"):
        Basis.of(0.5 * s, "phases")
