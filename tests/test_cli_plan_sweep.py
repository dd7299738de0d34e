"""`tutti plan --sweep`: how a model scales over sizes of a cluster."""

import json
import re

import pytest

from tutti import cli
from tutti.cli.plan.sweep import names_of, priced


def test_ranges_and_lists_of_clusters():
    assert names_of("h100:1x8..4x8") == ["h100:1x8", "h100:2x8", "h100:4x8"]
    assert names_of("h100:8") == ["h100:8"]
    assert names_of("h100:3x8..7x8") == ["h100:3x8", "h100:6x8"]
    several = priced(["h100:8", " cpu:1..4"], (2.0, 0.1))
    assert [(str(cluster), price) for cluster, price in several] == [
        ("h100:8", 2.0), ("cpu:1", 0.1), ("cpu:2", 0.1), ("cpu:4", 0.1)]  # fmt: skip
    assert [price for _, price in priced(["cpu:1..2", "h100:8"], (3.0,))] == [3.0] * 3
    assert [price for _, price in priced(["cpu:1", "h100:8"], ())] == [0.0] * 2
    for wrong in ("h100:1x8..2x4", "h100:4x8..1x8", "h100:1x8..8", "h100..8", "h100:1x8..1x8", "cpu:0..4", "cpu:1..x"):
        with pytest.raises(ValueError, match="is no range of clusters"):
            names_of(wrong)


def test_a_sweep_is_a_table_a_picture_and_points(model, tmp_path, capsys):
    picture, save = tmp_path / "scaling.svg", tmp_path / "points.json"
    code = cli.main(["plan", "--sweep", "h100:1..4,h100:3", "--model", str(model), "--batch", "8", "--seqs", "16", "32",
                     "--tokens", "1e9", "--price", "2", "--level", "O0", "--picture", str(picture),
                     "--save", str(save)])  # fmt: skip
    out, err = capsys.readouterr()
    assert code == 0, err
    points = json.loads(save.read_text())
    clusters = ("h100:1", "h100:2", "h100:4", "h100:3")
    assert [(x["cluster"], x["seq"]) for x in points] == [(c, n) for n in (16, 32) for c in clusters]
    rows = [line.split() for line in out.splitlines() if re.match(r" ?h100:\d +\d", line)]
    for row, point in zip(rows, points, strict=True):
        assert row[:3] == [point["cluster"], str(point["seq"]), point["plan"]["name"]] and point["fits"] == "yes"
        hours = 1e9 / 3600 / point["tokens per second"] * point["devices"]
        assert float(row[-2].replace(",", "")) == pytest.approx(2 * hours, abs=1)
        assert float(row[-1].replace(",", "")) == pytest.approx(700 * hours / 1e6, rel=0.01)
        assert point["bill"]["energy"] == pytest.approx(700 * hours / 1e6)
    assert rows[0][7] == "100" and "<svg" in picture.read_text()
    assert all(f"{x['cluster']}, {x['seq']} tokens: {x['plan']['name']}" in err for x in points)


def test_a_cluster_on_which_nothing_fits_is_a_line_of_its_own(model, capsys):
    code = cli.main(["plan", "--sweep", "h100:1..2", "--model", str(model), "--batch", "4", "--seq", "16",
                     "--what-if", "memory=0.0001GiB", "--level", "O0", "--budget", "1"])  # fmt: skip
    out, err = capsys.readouterr()
    assert code == 0, err
    assert out.count("no plan fits into") == 2
    assert len(re.findall(r"^ ?h100:\d +needs about h100:[34]x8 ", out, re.MULTILINE)) == 2
    assert len(re.findall("it needs about h100:[34]x8: there ", out)) == 2, "also after the budget is spent"


@pytest.mark.parametrize("change, message", [
    (["--picture", "x.bmp"], "cannot write a picture"), (["--budget", "0"], "--budget 0"),
    (["--what-if", "x=2"], "no figure 'x'"),
])  # fmt: skip
def test_mistakes_are_one_line(model, capsys, change, message):
    code = cli.main(["plan", "--sweep", "cpu:1..2", "--model", str(model), *change])
    assert code == 2 and message in capsys.readouterr().err
