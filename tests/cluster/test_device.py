import pytest
import torch

from tutti.cluster import Device, Link

DEVICE = Device("toy", {"float32": 10e12, "bfloat16": 40e12}, 16e9, 1e12, efficiency={"bfloat16": 0.5})


def test_peak_takes_dtypes_and_names():
    assert DEVICE.peak_of(torch.float32) == DEVICE.peak_of("float32") == 10e12


def test_rate_is_the_share_of_the_peak_that_is_reached():
    assert DEVICE.rate(torch.bfloat16) == 20e12
    assert DEVICE.rate(torch.float32) == 10e12


def test_unknown_dtype():
    with pytest.raises(ValueError, match="toy has no peak for float64; known are float32, bfloat16"):
        DEVICE.peak_of(torch.float64)


def test_devices_are_hashable_and_equal_by_value():
    again = Device("toy", {"float32": 10e12, "bfloat16": 40e12}, 16e9, 1e12, efficiency={"bfloat16": 0.5})
    assert again == DEVICE and len({again, DEVICE}) == 1


def test_link_time():
    assert Link(10e9, 2e-6).seconds(5e9, 3) == pytest.approx(0.5 + 6e-6)
    assert Link(10e9, 0.0, efficiency=0.5).seconds(5e9, 1) == pytest.approx(1.0)
