import re

import pytest

from tutti.cluster import PRESETS, Cluster


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("cpu:4", [4]),
        ("h100:8", [8]),
        ("h100", [1]),
        ("h100:16x8", [8, 16]),
        ("h100:128", [8, 16]),
        ("a100-80:2x4", [4, 2]),
        ("h200:1x8", [8]),
        (" h200:3 ", [3]),
    ],
)
def test_parse(text, levels):
    assert [size for size, _ in Cluster.parse(text).levels] == levels


def test_short_name_round_trip():
    for text in ("cpu:4", "h100:16x8", "a100-40:2x8"):
        assert str(Cluster.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h10:8", "no device 'h10'; nearest is 'h100', known are cpu, a100-40"),
        ("H100:8", "no device 'H100'; nearest is 'h100'"),
        ("a100:8", "no device 'a100'; nearest is 'a100-40'"),
        ("tpu:4", "no device 'tpu'; nearest is 'cpu'"),
        ("h100:12", "12 devices do not fill nodes of 8; nearest are h100:1x8 and h100:2x8"),
        ("h100:4x16", "a node has 8 h100; write h100:4x8"),
        ("h100:0", "has no devices"),
        ("h100:2x2x2", "no cluster 'h100:2x2x2'; write name:devices or name:nodesxdevices"),
        ("", "no cluster ''"),
    ],
)
def test_errors_name_the_nearest(text, message):
    with pytest.raises(ValueError, match=message):
        Cluster.parse(text)


@pytest.mark.parametrize("name", PRESETS)
def test_every_figure_has_a_source(name):
    preset = PRESETS[name]
    assert preset.device.name == name
    assert all(item.source for item in (preset.device, preset.inside, preset.between))


@pytest.mark.parametrize("name", PRESETS)
def test_figures_are_in_plausible_units(name):
    preset = PRESETS[name]
    device = preset.device
    assert device.peak_of("float64") <= device.peak_of("float32") < device.peak_of("bfloat16")
    assert all(1e10 < peak < 1e16 for peak in device.peak.values())
    assert 1e9 < device.bandwidth < 1e13 and 2**30 < device.memory < 1e12
    assert all(0 < share <= 1 for share in device.efficiency.values())
    for link in (preset.inside, preset.between):
        assert 1e8 < link.bandwidth < device.bandwidth and 1e-7 < link.latency < 1e-3


def test_drivers_names_find_one_preset_each():
    names = {
        "NVIDIA A100-SXM4-40GB": "a100-40",
        "NVIDIA A100-SXM4-80GB": "a100-80",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H200": "h200",
        "NVIDIA H200 NVL": None,
        "NVIDIA H100 PCIe": None,
    }
    for driver, expected in names.items():
        found = [name for name, preset in PRESETS.items() if preset.model and re.search(preset.model, driver)]
        assert found == ([expected] if expected else [])
