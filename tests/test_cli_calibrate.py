"""`tutti calibrate` as a command: starts its processes, saves and is found again."""

import pytest

from tutti import cli
from tutti.hardware import Cluster, calibrate, machine
from tutti.hardware.calibrate import Effort

LITTLE = Effort(0.0, (1, 64), 1e9, ("float32",), (1 << 12, 1 << 14), (1 << 12,), 0.0, 1, (1 << 10, 1 << 12))


@pytest.mark.starts
def test_a_calibration_is_saved_shown_and_parsed(tmp_path, capsys, monkeypatch):
    real = calibrate.calibrate
    monkeypatch.setattr("tutti.cli.calibrate.calibrate", lambda *a, **k: real(*a, **k, effort=LITTLE))
    file = tmp_path / "here.json"
    assert cli.main(["calibrate", "--devices", "2", "--threads", "1", "--kind", "cpu", "--save", str(file)]) == 0
    out = capsys.readouterr().out
    cluster = Cluster.parse(str(file))
    assert cluster.size == 2 and cluster.device.source == machine.CALIBRATED + machine.key("cpu", 2, 1)
    assert f"saved {file}" in out.replace("\n", "") and "2 members" in out and "softmax" in out
    assert {kind for kind, _, _ in cluster.levels[0][1].measured} == {
        "all_gather", "all_reduce", "reduce_scatter", "all_to_all", "ppermute"
    }  # fmt: skip


def test_a_file_that_would_not_be_found(capsys, tmp_path):
    assert cli.main(["calibrate", "--save", str(tmp_path / "here.txt")]) == 2
    assert "cluster files are found by that suffix" in capsys.readouterr().err
