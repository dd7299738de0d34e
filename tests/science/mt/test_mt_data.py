"""Observations: errors, masks, static shift, files; and EDI files."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tutti.science.em.mt.mesh import Mesh2D
from tutti.science.em.mt.response.forward import MT2D
from tutti.science.em.mt.surveys.data import Data
from tutti.science.em.mt.surveys.edi import OHM, Edi, profile, read_edi, survey

FREQUENCIES, SITES = (10.0, 1.0), (0.0, 400.0, 1000.0)

# In the layout of the SEG standard: options, a count, free spacing, an empty value, degrees:minutes:seconds.
FILE = """>HEAD
  DATAID="KAP103"
  LAT=-23:30:36.0
  LONG=18:06:00
  ELEV=1250.5
  EMPTY=1.0E+32

>INFO  MAXINFO=500
  LAT=99 is free text here

>=DEFINEMEAS
  REFLAT=-23:30:36.0
  UNITS=M
>HMEAS ID=1001.001 CHTYPE=HX X=0.0 Y=0.0 AZM=0.0
>EMEAS ID=1004.001 CHTYPE=EX X=-50.0 Y=0.0 X2=50.0 Y2=0.0

>=MTSECT
  SECTID=KAP103
  NFREQ=3
>!****FREQUENCIES****!
>FREQ NFREQ=3 ORDER=DEC // 3
  1.000E+01 1.000E+00
  1.000E-01
>ZROT // 3
 3.0E+01 3.0E+01 3.0E+01
>ZXXR ROT=ZROT // 3
 0.0 1.0E+00 2.0
>ZXXI ROT=ZROT // 3
 0.0 1.0 2.0
>ZXX.VAR ROT=ZROT // 3
 1.0 1.0 1.0
>ZXYR ROT=ZROT // 3
 5.0E+01 1.6E+01 5.0D+00
>ZXYI ROT=ZROT // 3
 5.0E+01 1.6E+01 1.0E+32
>ZXY.VAR ROT=ZROT // 3
 1.0 0.25 0.01
>ZYXR ROT=ZROT // 3
-5.0E+01 -1.6E+01 -5.0E+00
>ZYXI ROT=ZROT // 3
-5.0E+01 -1.6E+01 -5.0E+00
>ZYX.VAR ROT=ZROT // 3
 1.0 0.25 0.01
>ZYYR ROT=ZROT // 3
 0.0 -1.0 -2.0
>ZYYI ROT=ZROT // 3
 0.0 -1.0 -2.0
>ZYY.VAR ROT=ZROT // 3
 1.0 1.0 1.0
>TROT // 3
 3.0E+01 3.0E+01 3.0E+01
>TXR.EXP ROT=TROT // 3
 0.1 0.2 0.3
>TXI.EXP ROT=TROT // 3
 0.0 0.0 0.0
>TXVAR.EXP ROT=TROT // 3
 1.0E-04 1.0E-04 1.0E-04
>TYR.EXP ROT=TROT // 3
 -0.1 -0.2 -0.3
>TYI.EXP ROT=TROT // 3
 0.05 0.05 0.05
>TYVAR.EXP ROT=TROT // 3
 1.0E-04 1.0E-04 1.0E-04
>END
"""


@pytest.fixture(scope="module")
def problem() -> MT2D:
    mesh = Mesh2D.for_survey(FREQUENCIES, SITES, (10, 100), growth=1.5, width=400)
    return MT2D(mesh, FREQUENCIES, SITES, ("TE", "TM", "tipper"))


@pytest.fixture(scope="module")
def data(problem) -> Data:
    return Data.synthetic(problem, torch.full(problem.mesh.shape, 2.0), rho=0.05, phase=1.0, tipper=0.02)


def test_synthetic_data_fit_their_section(problem, data):
    response = problem(torch.full(problem.mesh.shape, 2.0))
    assert data.chi(response) == pytest.approx(1, abs=0.3)
    assert data.errors[0, 0, 0].tolist() == pytest.approx([0.05 / math.log(10), 1.0])
    assert data.misfit(torch.zeros(problem.size)) == pytest.approx(1)
    again = data.problem(problem.mesh, solver="block")
    assert data.chi(again(torch.full(problem.mesh.shape, 2.0))) == pytest.approx(data.chi(response), rel=1e-9)


@pytest.mark.parametrize("suffix", [".npz", ".csv"])
def test_files_keep_everything(data, tmp_path, suffix):
    mask = data.mask.clone()
    mask[1, 0, 2] = 0
    masked = Data(data.frequencies, data.sites, data.modes, data.values, data.errors, mask)
    masked.save(tmp_path / f"data{suffix}")
    loaded = Data.load(tmp_path / f"data{suffix}")
    assert (loaded.frequencies, loaded.sites, loaded.modes, loaded.outputs) == (
        FREQUENCIES,
        SITES,
        data.modes,
        "apparent",
    )
    for name in ("values", "errors", "mask"):
        assert torch.equal(getattr(loaded, name), getattr(masked, name)), name
    assert loaded.count == data.count - 2 and loaded.weights.count_nonzero() == loaded.count


def test_missing_values_must_be_masked(data):
    values = data.values.clone()
    values[1, 0, 2, 0] = math.nan
    with pytest.raises(ValueError, match=r"1 of 36 values, .* TM at 10 Hz, site 2 \(x = 1000 m\), are not finite"):
        Data(data.frequencies, data.sites, data.modes, values, data.errors)
    masked = Data.masked_nan(data.frequencies, data.sites, data.modes, values, data.errors)
    assert masked.count == 35 and masked.weights.isfinite().all()
    with pytest.raises(ValueError, match="error not positive and finite: set a floor or mask 0"):
        Data(data.frequencies, data.sites, data.modes, data.values, 0 * data.errors)
    with pytest.raises(ValueError, match=r"shape \(mode, frequency, site, 2\) = \(3, 2, 3, 2\); got \(35,\)"):
        Data(data.frequencies, data.sites, data.modes, data.values.flatten()[1:], data.errors)
    with pytest.raises(ValueError, match="mask must be 0 or 1"):
        Data(data.frequencies, data.sites, data.modes, data.values, data.errors, 0.5 * data.mask)
    with pytest.raises(ValueError, match=r"saved as .npz or .csv; got data.txt"):
        data.save("data.txt")


def test_apparent_resistivities_in_ohm_m_are_errors(data):
    values = data.values.clone()
    values[0, 1, 2, 0] = 602.0
    with pytest.raises(ValueError, match=r"TE at 1 Hz, site 2 .*: log10_rho = 602 is not a log10 of ohm-m"):
        dataclasses.replace(data, values=values)
    values[0, 1, 2, 0], values[0, 1, 2, 1], values[2] = 2.0, -120.0, -9.0  # phases and tippers may be any
    assert dataclasses.replace(data, values=values).count == data.count


def test_error_floors(data):
    wider = data.with_floor(rho=0.1, phase=0.5, tipper=0.03)
    expected = torch.tensor([[0.1 / math.log(10), 1.0], [0.1 / math.log(10), 1.0], [0.03, 0.03]], dtype=torch.float64)
    torch.testing.assert_close(wider.errors, expected[:, None, None].expand(data.shape))


def test_static_shift_as_correction_and_as_unknown(problem, data):
    shift = torch.tensor([[0.3, 0.0, -0.1], [0.2, 0.1, 0.0], [9.0, 9.0, 9.0]], dtype=torch.float64, requires_grad=True)
    response = problem(torch.full(problem.mesh.shape, 2.0))
    moved = data.shifted(response, shift)
    part = (moved - response).view(data.shape)
    assert part[0, :, 0].tolist() == [pytest.approx([0.3, 0]), pytest.approx([0.3, 0])]
    assert not part[2].any(), "a tipper has no static shift"
    torch.testing.assert_close(data.shift_jacobian() @ shift.detach().flatten(), (moved - response).detach())
    (gradient,) = torch.autograd.grad(moved.sum(), shift)
    assert gradient[:2].eq(len(FREQUENCIES)).all() and not gradient[2].any()
    back = Data(data.frequencies, data.sites, data.modes, data.values + part.detach(), data.errors)
    torch.testing.assert_close(back.without_shift(shift.detach()).values, data.values)
    with pytest.raises(ValueError, match=r"shift must have the shape \(mode, site\) = \(3, 3\); got \(3,\)"):
        data.without_shift(torch.zeros(3))


@pytest.fixture
def site(tmp_path) -> Edi:
    (tmp_path / "kap103.edi").write_text(FILE)
    return read_edi(tmp_path / "kap103.edi")


def test_edi_is_read_in_ohm(site):
    assert (site.station, site.elevation) == ("KAP103", 1250.5)
    assert site.latitude == pytest.approx(-23.51) and site.longitude == pytest.approx(18.1)
    assert site.frequencies.tolist() == [10, 1, 0.1] and site.azimuth.tolist() == [30] * 3
    assert site.impedance[0, 0, 1].item() == pytest.approx(OHM * (50 + 50j))
    assert math.isnan(site.impedance[2, 0, 1].imag) and not site.impedance[2, 1].isnan().any()
    assert site.tipper is not None and site.tipper[1].tolist() == [0.2, -0.2 + 0.05j]


def test_edi_is_written_as_it_is_read(site, tmp_path):
    site.write(tmp_path / "again.edi")
    again = read_edi(tmp_path / "again.edi")
    assert again.station == site.station and again.latitude == pytest.approx(site.latitude, abs=1e-8)
    for name in ("frequencies", "impedance", "variance", "azimuth", "tipper", "tipper_variance", "tipper_azimuth"):
        torch.testing.assert_close(getattr(again, name), getattr(site, name), rtol=1e-12, atol=0, equal_nan=True)


def test_rotation_to_strike(site):
    """By 90 degrees xy becomes -yx; there and back is nothing; trace and determinant stay."""
    turned = site.rotated(120)
    torch.testing.assert_close(turned.impedance[:2, 0, 1], -site.impedance[:2, 1, 0])
    torch.testing.assert_close(turned.tipper[:, 0], site.tipper[:, 1])
    torch.testing.assert_close(turned.variance[:, 0, 1], site.variance[:, 1, 0])
    other = site.rotated(-17)
    torch.testing.assert_close(other.rotated(30).impedance[:2], site.impedance[:2], rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(torch.linalg.det(other.impedance[:2]), torch.linalg.det(site.impedance[:2]))


def test_survey_across_strike(site):
    """100 km of profile along the azimuth 120: TE is xy, TM is -yx of axes at 30 degrees."""
    step = math.degrees(1e5 / 6371e3)
    lat = site.latitude + step * math.cos(math.radians(120))
    lon = site.longitude + step * math.sin(math.radians(120)) / math.cos(math.radians((lat + site.latitude) / 2))
    far = dataclasses.replace(site, latitude=lat, longitude=lon, frequencies=site.frequencies * 1.01)
    assert profile([site, far], 30) == pytest.approx([0, 1e5], rel=1e-6, abs=1e-6)
    data = survey([far, site], 30, [1.0, 0.1], tipper=True)
    assert data.sites == pytest.approx((-1e5, 0.0), rel=1e-6) and data.modes == ("TE", "TM", "tipper")
    rho = 0.2 / 1.0 * (16**2 * 2)  # 0.2 |Z|^2 / f for Z in mV/km/nT
    assert data.values[0, 0, 1].tolist() == pytest.approx([math.log10(rho), 45], rel=1e-4)
    assert data.values[1, 0, 1].tolist() == pytest.approx([math.log10(rho), 45], rel=1e-4)
    relative = 0.5 / (16 * math.sqrt(2))
    assert data.errors[0, 0, 1].tolist() == pytest.approx([2 * relative / math.log(10), math.degrees(relative)])
    assert data.values[2, 0, 1].tolist() == pytest.approx([-0.2, 0.05])
    assert data.mask[:, :, 1].flatten(1).mean(1).tolist() == [0.5, 1, 1], "Zxy is empty at 0.1 Hz"
    with pytest.raises(ValueError, match="site KAP103 has no LAT or no LONG"):
        survey([dataclasses.replace(site, latitude=math.nan)], 30)
    none = survey([site], 30, [3.0])
    assert none.count == 0, "no frequency within 2 %"


def test_profiles_without_sites_or_along_strike_are_errors(site):
    north = dataclasses.replace(site, latitude=site.latitude + 0.1)
    assert survey([site, north], 90).sites[0] == pytest.approx(-0.1 * math.radians(1) * 6371e3)
    for other in (north, site):
        with pytest.raises(ValueError, match="the profile is 0 m long: is strike the azimuth"):
            survey([site, other], 0)
    with pytest.raises(ValueError, match="one or more sites; got none"):
        survey([], 0)


@pytest.mark.parametrize(("change", "message"), [
    ({"impedance": torch.zeros(3, 2, 2)}, "site KAP103: impedance must be complex; got torch.float32"),
    ({"variance": torch.zeros(2, 2)}, r"variance must have the shape \(3, 2, 2\) for 3 frequencies; got \(2, 2\)"),
    ({"azimuth": torch.zeros(())}, r"azimuth must have the shape \(3,\)"),
    ({"tipper": torch.zeros(3, dtype=torch.complex64)}, r"tipper must have the shape \(3, 2\)"),
    ({"tipper_variance": torch.zeros(3, 2, dtype=torch.complex64)}, "tipper_variance must be real"),
])  # fmt: skip
def test_wrong_numbers_of_a_site(site, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(site, **change)


def test_a_site_without_a_place_or_an_azimuth_of_the_tipper(site, tmp_path):
    bare = dataclasses.replace(site, latitude=math.nan, tipper_azimuth=None, tipper_variance=None)
    assert bare.tipper_azimuth.equal(site.azimuth) and bare.rotated(0).tipper_variance.isnan().all()
    bare.write(tmp_path / "bare.edi")
    again = read_edi(tmp_path / "bare.edi")
    assert math.isnan(again.latitude) and again.longitude == pytest.approx(site.longitude)
    assert again.tipper_variance is not None and again.tipper_variance.isnan().all()


def test_variances_that_are_missing_or_zero(site):
    """They are left out with a warning, or get the error that is stated."""
    variance = site.variance.clone()
    variance[0, 0, 1], variance[1, 0, 1] = math.nan, 0.0
    bare = dataclasses.replace(site, variance=variance, tipper_variance=torch.zeros(3, 2).double())
    with pytest.warns(UserWarning, match="5 of 9 values have no variance and are left out, the first of site KAP103"):
        left = survey([bare], 30, tipper=True)
    assert left.mask[:, :, 0, 0].tolist() == [[0, 0, 0], [1, 1, 1], [0, 0, 0]]
    data = survey([bare], 30, tipper=True, error=0.05)
    assert data.mask[:, :, 0, 0].tolist() == [[1, 1, 0], [1, 1, 1], [1, 1, 1]]
    assert data.errors[0, 1, 0].tolist() == pytest.approx([0.1 / math.log(10), math.degrees(0.05)])
    assert data.errors[2].eq(0.05).all()
    with pytest.raises(ValueError, match="error must be finite and not negative; got -1"):
        survey([site], 30, error=-1)


@pytest.mark.parametrize(
    "old, new, message",
    [
        (">ZXYR ROT=ZROT // 3\n 5.0E+01 1.6E+01 5.0D+00\n", "", "it lacks >ZXYR, >ZYXR and has other blocks"),
        ("0.1 0.2 0.3", "0.1 0.2", ">TXR.EXP has 2 numbers, >FREQ 3"),
        ("0.1 0.2 0.3", "0.1 x 0.3", ">TXR.EXP holds what is not a number"),
        ("1.000E+01 1.000E+00\n  1.000E-01", "0 -1.0 0", "positive frequencies in Hz; got 0"),
        ("LAT=-23:30:36.0\n  LONG", "LAT=-23d30\n  LONG", "must be like -23:30:15.5 or -23.504; got '-23d30'"),
        ("ELEV=1250.5", "ELEV=high", "broken.edi: ELEV must be a number; got 'high'"),
    ],
)
def test_broken_edi_files(tmp_path, old, new, message):
    assert old in FILE
    text = FILE.replace(old, new, 1).replace(">ZYXR", ">QYXR" if "lacks" in message else ">ZYXR")
    (tmp_path / "broken.edi").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_edi(tmp_path / "broken.edi")


@pytest.mark.parametrize(("old", "new", "message", "masked"), [
    (" 1.0 0.25 0.01", " 1.0 -0.25 0.01", "site KAP103, 1 Hz: the variance of ZXY = -0.25 is no variance: masked", 1),
    (" 1.0 0.25 0.01", " 1.0 -1d0 -0.01", r"1 Hz: the variance of ZXY = -1 is no variance: masked, and 1 more", 2),
    (" 5.0E+01 1.6E+01 5.0D+00", " 5.0E+01 ****** 5.0d+00", "site KAP103, 1 Hz: ZXYR = inf is infinite: masked", 1),
    (" 5.0E+01 1.6E+01 5.0D+00", " 5.0E+01 -inf 5.0+00", "site KAP103, 1 Hz: ZXYR = -inf is infinite: masked", 1),
])  # fmt: skip
def test_one_value_that_cannot_be_used_masks_itself_alone(tmp_path, site, old, new, message, masked):
    assert old in FILE
    (tmp_path / "a.edi").write_text(FILE.replace(old, new, 1))
    with pytest.warns(UserWarning, match=message) as caught:
        one = read_edi(tmp_path / "a.edi")
    assert len(caught) == 1
    lost = one.impedance.isnan() & ~site.impedance.isnan()
    assert lost.any(0).nonzero().tolist() == [[0, 1]] and lost[1, 0, 1] and lost[:, 0, 1].sum() <= masked
    data = survey([one], 30)
    assert data.mask[:, :, 0, 0].tolist() == [[1, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize("change", [
    lambda text: text.replace("EMPTY=1.0E+32", "EMPTY=1.0D+32").replace(" 1.0E+32", " 1.0d+32"),
    lambda text: text.replace(" 1.0E+32", " NaN"),
    lambda text: text.replace(" 1.0E+32", " -1.#IND"),
    lambda text: text.replace("E+", "+").replace("E-", "-"),
    lambda text: text.replace("E+", "d+").replace("E-", "d-"),
    lambda text: text.replace(">ZXYR ROT=ZROT // 3", ">zxyr rot=ZROT"),
    lambda text: text.replace("0.1 0.2 0.3", "0.1, 0.2, 0.3"),
    lambda text: text.replace("\n", "\r\n") + "\x1a",
    lambda text: text.replace("\n", "\r"),
    lambda text: text.replace("DATAID", "x" * 100_000 + "\n  DATAID"),  # in linear time
    lambda text: text.encode("utf-8-sig"),
    lambda text: text.encode("utf-16"),
    lambda text: text.replace("free text", "M\xfcnchen").encode("latin-1"),
])  # fmt: skip
def test_the_same_numbers_written_otherwise(tmp_path, site, change):
    text = change(FILE)
    (tmp_path / "b.edi").write_bytes(text if isinstance(text, bytes) else text.encode())
    other = read_edi(tmp_path / "b.edi")
    assert (other.station, other.latitude, other.longitude) == (site.station, site.latitude, site.longitude)
    for name in ("frequencies", "impedance", "variance", "azimuth", "tipper", "tipper_variance"):
        torch.testing.assert_close(getattr(other, name), getattr(site, name), equal_nan=True, rtol=0, atol=0)


def test_components_without_a_block_are_masked(tmp_path):
    (tmp_path / "c.edi").write_text(FILE.replace(">ZXXR", ">QXXR"))
    with pytest.warns(UserWarning, match="site KAP103: ZXX missing, without >ZXXR: masked, and the site cannot be"):
        site = read_edi(tmp_path / "c.edi")
    assert site.impedance[:, 0, 0].isnan().all() and survey([site], 30).mask[1, :, 0, 0].all()
    with pytest.warns(UserWarning, match="cannot be turned from its azimuth 30 to strike 40 degrees: all its"):
        assert not survey([site], 40).count


def test_frequencies_in_any_order_and_one_that_is_none(tmp_path, site):
    (tmp_path / "d.edi").write_text(FILE.replace("1.000E-01", "0.0"))
    with pytest.warns(UserWarning, match="site KAP103: >FREQ must hold positive frequencies in Hz; got 0: 1 left out"):
        assert read_edi(tmp_path / "d.edi").frequencies.tolist() == [10.0, 1.0]
    names = ("frequencies", "impedance", "variance", "azimuth", "tipper", "tipper_variance", "tipper_azimuth")
    turned = dataclasses.replace(site, **{name: getattr(site, name).flip(0) for name in names})
    assert survey([turned], 30, [10.0, 1.0]).values.equal(survey([site], 30, [10.0, 1.0]).values)


def test_a_site_that_is_there_twice(site):
    far = dataclasses.replace(site, latitude=site.latitude + 0.1)
    with pytest.warns(UserWarning, match="sites KAP103 and KAP103 are at the same place, 0 m along the profile: both"):
        survey([site, site, far], 90)
