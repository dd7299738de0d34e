import re

import pytest

from tutti.hardware import PRESETS, Cluster

PUBLISHED = {  # dtype, its TFLOP/s; GB, GB/s of memory; GB/s of the links inside a node, both ways
    "v100-32": ("float16", 125, 34.4, 900, 300),
    "a100-40": ("bfloat16", 312, 42.9, 1555, 600),
    "a100-80": ("bfloat16", 312, 85.9, 2039, 600),
    "h100": ("bfloat16", 989.4, 85.9, 3352, 900),
    "h200": ("float8_e4m3fn", 1978.9, 141, 4800, 900),
    "b200": ("bfloat16", 2250, 180, 8000, 1800),
    "h800": ("bfloat16", 989.4, 85.9, 3352, 400),
    "gb200": ("float8_e4m3fn", 5000, 186, 8000, 1800),
    "l40s": ("bfloat16", 362, 48, 864, 64),
    "rtx-4090": ("float16", 165.2, 24, 1008, 64),
    "mi300x": ("bfloat16", 1307.4, 192, 5325, 896),
    "ascend-910": ("float16", 256, 34.4, 1200, 180),
    "ascend-910b": ("bfloat16", 313, 68.7, 1600, 392),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_figures_are_the_published_ones(name):
    dtype, peak, memory, bandwidth, links = PUBLISHED[name]
    preset = PRESETS[name]
    assert preset.device.peak_of(dtype) == peak * 1e12
    assert preset.device.memory == pytest.approx(memory * 1e9, rel=2e-3)
    assert preset.device.bandwidth == bandwidth * 1e9
    assert 2 * preset.inside[0][1].bandwidth == links * 1e9


@pytest.mark.parametrize("name", PRESETS)
def test_every_figure_has_a_source(name):
    preset = PRESETS[name]
    assert preset.device.name == name
    assert all(item.source for item in (preset.device, preset.between, *(link for _, link in preset.inside)))


@pytest.mark.parametrize("name", PRESETS)
def test_figures_are_in_plausible_units(name):
    preset = PRESETS[name]
    device = preset.device
    assert device.peak.get("float64", 0) <= device.peak_of("float32") < max(device.peak.values())
    assert all(1e10 < peak < 2e16 for peak in device.peak.values())
    assert 1e9 < device.bandwidth < 1e13 and 2**30 < device.memory < 1e12
    assert all(0 < share <= 1 for share in device.efficiency.values())
    for link in (preset.between, *(link for _, link in preset.inside)):
        assert 1e8 < link.bandwidth < device.bandwidth and 1e-7 < link.latency < 1e-3


def test_drivers_names_find_one_preset_each():
    names = {
        "NVIDIA A100-SXM4-40GB": "a100-40",
        "NVIDIA A100-SXM4-80GB": "a100-80",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H200": "h200",
        "Tesla V100-SXM2-32GB": "v100-32",
        "Tesla V100-SXM3-32GB": "v100-32-sxm3",
        "NVIDIA B200": "b200",
        "NVIDIA GB200": "gb200",
        "NVIDIA H800": "h800",
        "NVIDIA L40S": "l40s",
        "NVIDIA GeForce RTX 4090": "rtx-4090",
        "NVIDIA GeForce RTX 4090 D": None,
        "AMD Instinct MI300X": "mi300x",
        "NVIDIA H200 NVL": None,
        "NVIDIA H100 PCIe": None,
    }
    for driver, expected in names.items():
        matches = [name for name, preset in PRESETS.items() if preset.model and re.search(preset.model, driver)]
        assert matches == ([expected] if expected else [])


@pytest.mark.parametrize("name", PRESETS)
def test_collectives_inside_and_between_nodes_have_times(name):
    preset = PRESETS[name]
    cluster = Cluster.parse(f"{name}:2x{preset.node}")
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ppermute"):
        inside, across = (cluster.time(kind, 1 << 28, 1, size) for size in (preset.node, cluster.size))
        assert 0 < inside <= across < 1e4, kind
