from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tutti.hardware import Device, Link
from tutti.hardware.curve import Curve, Grid, Ramp
from tutti.hardware.device import FAMILIES, FILL, quantized_flops

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


def test_links_that_cannot_be():
    with pytest.raises(ValueError, match="no kind of link 'star'; known are switch, ring, mesh"):
        Link(1e9, 1e-6, kind="star")
    with pytest.raises(ValueError, match=r"oversubscribed 0.5 times, with 0 ports: .* oversubscription at least 1"):
        Link(1e9, 1e-6, oversubscription=0.5)


def test_a_product_is_as_slow_as_arithmetic_or_memory():
    assert DEVICE.matmul_seconds(1, 4096, 4096, 4096, "float32") == pytest.approx(2 * 4096**3 / 10e12)
    thin = 4 * (4096 * 4096 + 2 * 4096)
    assert DEVICE.matmul_seconds(1, 1, 4096, 4096, "float32") == pytest.approx(thin / 1e12)
    assert DEVICE.matmul_seconds(8, 1, 4096, 4096, torch.float32) == pytest.approx(8 * thin / 1e12)


def test_tiles_and_waves_are_whole():
    """128 units, tiles of 256 x 128: 4096 x 1024 are 128 tiles, one wave; one row more is 136 tiles and two waves."""
    even, more = quantized_flops(128, 1, 4096, 4096, 1024), quantized_flops(128, 1, 4097, 4096, 1024)
    assert even == 2 * 4096 * (4096 + FILL) * 1024
    assert 1.2 * even < more <= 2 * even
    assert quantized_flops(0, 1, 4097, 4096, 1024) == 2 * 4097 * 4096 * 1024


def test_few_tiles_are_divided_along_the_inner_dim():
    whole = quantized_flops(128, 1, 128, 8192, 128)
    assert whole == pytest.approx(
        2 * 128 * 64 * 64 * (8192 / 16 + FILL) / 0.6
    )  # 4 tiles of 64 x 64 in 16 slices: one wave
    assert quantized_flops(128, 16, 128, 8192, 128) < 16 * whole


@given(st.lists(st.integers(1, 10000), min_size=3, max_size=3), st.integers(1, 64), st.integers(0, 200))
def test_no_product_is_faster_than_the_peak(shape, batch, units):
    assert quantized_flops(units, batch, *shape) >= 2 * batch * shape[0] * shape[1] * shape[2]


def test_measured_products_and_streams_are_taken():
    grid = Grid.of((16, 64), {(m, k, n): 1e-11 * m * k * n for m in (16, 64) for k in (16, 64) for n in (16, 64)})
    streams = {
        "add float32": Curve(((0, 0.0), (100.0, 1.0), (200.0, 4.0))),
        "exp bfloat16": Curve(((0, 0.0), (1.0, 1.0))),
    }
    device = replace(DEVICE, products={"float32": grid}, streams=streams)
    assert device.matmul_seconds(3, 32, 32, 32, "float32") == pytest.approx(3e-11 * 32**3)
    assert device.matmul_seconds(1, 64, 64, 64, "bfloat16") == DEVICE.matmul_seconds(1, 64, 64, 64, "bfloat16")
    assert device.stream_seconds(50) == 0.5 and device.stream_seconds(400) == 8.0
    assert device.stream_seconds(50, "add", torch.bfloat16) == 0.5  # as float32
    assert device.stream_seconds(2.0, "exp", "bfloat16") == 2.0
    assert device.stream_seconds(1e12, "softmax") == 1.0  # not measured: bytes over bandwidth


def test_streams_of_a_preset_are_bytes_over_bandwidth():
    assert {DEVICE.stream_seconds(1e12, family) for family in FAMILIES} == {1.0}
    with pytest.raises(ValueError, match="no family of operators 'sinh'; known are add, update, "):
        DEVICE.stream_seconds(1.0, "sinh")


def test_attention_reaches_more_with_more_keys_and_heads_of_128():
    gpu = replace(DEVICE, attention={"forward": Ramp(0.5, 1000), "backward": Ramp(0.25, 1000)})
    assert gpu.attention_rate("bfloat16", "attention", 1000, 128) == pytest.approx(40e12 / 4)
    assert gpu.attention_rate("bfloat16", "attention_backward", 1000, 128) == pytest.approx(40e12 / 8)
    assert gpu.attention_rate("bfloat16", "attention", 1000, 64) == pytest.approx(0.9 * 40e12 / 4)
    assert gpu.attention_rate("bfloat16", "attention", 3000, 256) == pytest.approx(0.8 * 40e12 * 3 / 8)
    assert gpu.attention_rate("float32", "attention", 1000, 128) == DEVICE.rate("float32")


def test_kernels_reach_a_share_of_the_bandwidth():
    gpu = replace(DEVICE, efficiency={"memory": 0.5, "bfloat16": 0.5, "grouped bfloat16": 0.25})
    assert gpu.stream_seconds(1e12) == pytest.approx(2.0)
    square = (1, 4096, 4096, 4096, "bfloat16")
    assert gpu.matmul_seconds(*square, kind="grouped") == pytest.approx(2 * gpu.matmul_seconds(*square))


def test_the_slowest_of_more_devices_is_slower():
    gpu = replace(DEVICE, varies=0.01)
    assert gpu.slowest(1) == DEVICE.slowest(512) == 1.0
    assert 1.02 < gpu.slowest(8) < gpu.slowest(512) < 1.04
