import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from tutti.hardware import Cluster, Device, Link, local, machine
from tutti.hardware.presets import RING_ONLY
from tutti.whole_files import write_text

module = import_module("tutti.hardware.local")

FIGURES = {
    "peak": {"float32": 2e11, "bfloat16": 1e12, "float64": 1e11, "float16": 2e11},
    "bandwidth": 2e10,
    "overhead": 2e-6,
}
GLOO = {"link_bandwidth": 1e9, "link_latency": 5e-5}


@pytest.fixture
def measured(monkeypatch):
    """Eight cores with known figures; the list records what was measured."""
    calls = []
    monkeypatch.setattr(module, "measure", lambda device, threads, cores: calls.append(threads) or FIGURES)
    monkeypatch.setattr(module, "measure_gloo", lambda: calls.append("gloo") or GLOO)
    monkeypatch.setattr(machine, "cores", lambda: 8)
    monkeypatch.setattr(machine, "memory", lambda device: 64 * 2**30)
    return calls


@pytest.mark.parametrize(("n", "threads"), [(1, 8), (3, 2), (4, 2), (16, 1)])
def test_cores_memory_and_bandwidth_are_shared(measured, n, threads):
    cluster = local(n, "cpu", cache=None)
    assert measured == [threads, "gloo"]
    assert cluster.size == n and str(cluster) == f"cpu:{n}"
    assert cluster.device.peak_of(torch.bfloat16) == 1e12
    assert cluster.device.memory == 64 * 2**30 / n
    assert cluster.device.bandwidth == 2e10 * threads / 8
    assert cluster.link(1, n) == Link(1e9, 5e-5, source="measured: Gloo", ways=RING_ONLY)


def test_measured_once(measured, tmp_path):
    cache = tmp_path / "new" / "devices.json"
    first = local(4, "cpu", cache)
    assert local(4, "cpu", cache) == first
    assert measured == [2, "gloo"]
    local(2, "cpu", cache)
    assert measured == [2, "gloo", 4, "gloo"]
    assert len(json.loads(cache.read_text())) == 4
    assert [path.name for path in cache.parent.iterdir()] == ["devices.json"]


@pytest.mark.parametrize("content", ["", "{half", "[]", "null"])
def test_a_broken_cache_is_measured_again(measured, tmp_path, content):
    cache = tmp_path / "devices.json"
    cache.write_text(content)
    local(4, "cpu", cache)
    assert measured == [2, "gloo"]
    assert len(json.loads(cache.read_text())) == 2


def test_a_cache_that_cannot_be_written_is_said(measured, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.warns(UserWarning, match="could not keep the measurement of this machine"):
        cluster = local(4, "cpu", blocked / "devices.json")
    assert cluster.size == 4


def test_bad_arguments():
    with pytest.raises(ValueError, match="a cluster needs at least 1 process, not 0"):
        local(0)
    with pytest.raises(ValueError, match="unknown kind of device 'tpu'; expected cpu or cuda"):
        local(1, "tpu")


def test_measurement_counts_what_it_times(monkeypatch):
    """With every run taking a millisecond, the figures are the formulas' own."""
    monkeypatch.setattr(module, "_best", lambda run, device: run() is not None and 1e-3)
    threads = torch.get_num_threads()
    figures = module.measure(torch.device("cpu"), 1)
    flops = 2 * 2048 * 512 * 2048
    assert figures["peak"]["float32"] == figures["peak"]["bfloat16"] == pytest.approx(flops / 1e-3)
    assert figures["bandwidth"] == pytest.approx(2 * module._COPY / 1e-3)
    assert figures["overhead"] == pytest.approx(1e-3 / 8)
    assert torch.get_num_threads() == threads


def test_gloo_is_reached():
    figures = module.measure_gloo()
    assert 0 < figures["link_latency"] < 1
    assert figures["link_bandwidth"] > 1e6


CALIBRATED = Cluster(Device("cpu", {"float32": 3e11}, 1e9, 1e10), ((4, Link(1e9, 1e-5)),))


def keep(folder, key: str) -> Path:
    file = machine.calibration("cpu", 4, 2, folder)
    source = machine.CALIBRATED + key
    write_text(file, replace(CALIBRATED, device=replace(CALIBRATED.device, source=source)).to_json())
    return file


def test_a_calibration_of_this_machine_is_taken(measured, tmp_path):
    keep(tmp_path, machine.key("cpu", 4, 2))
    cluster = local(4, "cpu", tmp_path / "devices.json")
    assert measured == [] and cluster.device.peak_of("float32") == 3e11
    local(2, "cpu", tmp_path / "devices.json")  # was not calibrated
    assert measured == [4, "gloo"]
    assert local(4, "cpu", cache=None).device.peak_of("float32") == 2e11


@pytest.mark.parametrize("key", ["another machine", None])
def test_a_calibration_of_another_machine_or_release_is_not(measured, tmp_path, key):
    file = keep(tmp_path, key or machine.key("cpu", 4, 2))
    if key is None:
        file.write_text(file.read_text().replace("bandwidth", "width"))
    assert local(4, "cpu", tmp_path / "devices.json").device.peak_of("float32") == 2e11
    assert measured == [2, "gloo"]
