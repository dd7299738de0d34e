"""`tutti plan --compare CLUSTER CLUSTER`: two clusters side by side, and where their difference comes from."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest

from tutti import cli
from tutti.cli.plan.compare import between
from tutti.hardware import Cluster

SMALL = ["--batch", "8", "--seq", "32", "--level", "O0", "--budget", "5"]


def test_steps_between_two_clusters_end_at_the_second_but_for_its_memory():
    first, second = Cluster.parse("h100:2x8"), Cluster.parse("b200:2x8")
    arithmetic, bandwidth, links = (cluster for _, cluster in between(first, second))
    assert arithmetic.device.peak == second.device.peak and arithmetic.device.bandwidth == first.device.bandwidth
    assert arithmetic.device.reached == first.device.reached and arithmetic.levels == first.levels
    assert bandwidth.device.reached == second.device.reached and bandwidth.levels == first.levels
    assert replace(links, device=second.device) == second and links.device.memory == first.device.memory


def test_more_devices_are_compared_at_the_size_of_the_first():
    assert {c.size for _, c in between(Cluster.parse("a100-80:4x8"), Cluster.parse("b200:8"))} == {32}
    assert not list(between(Cluster.parse("a100-80:9x5"), Cluster.parse("b200:8"))), "45 do not fill nodes of 8"


def test_two_clusters_side_by_side(model, capsys):
    code = cli.main(["plan", "--compare", "h100:2", "h200:2", "--model", str(model), *SMALL,
                     "--tokens", "1e9", "--price", "2", "3"])  # fmt: skip
    out, err = capsys.readouterr()
    assert code == 0, err
    rows = {line[:30].strip(): line[30:].split() for line in out.splitlines() if line[:30].strip()}
    assert "h100:2" in out and rows["fits"] == ["yes", "yes"]
    rates = [float(x.replace(",", "")) for x in rows["tokens/s"][:2]]
    assert float(rows["tokens/s"][2]) == pytest.approx(rates[1] / rates[0], abs=0.01)
    steps = re.findall(r"its ([\w ]+): (\S+ \w+) to (\S+ \w+) a step", out)
    assert [name for name, *_ in steps] == ["arithmetic", "memory bandwidth", "links", "own plan"]
    assert all(a[2] == b[1] for a, b in pairwise(steps)), "each begins where the last ended"
    assert re.search(r"1e\+09 tokens cost \d+ % more there", out)


def test_a_cluster_without_a_plan_says_so_and_what_would_do(model, capsys):
    code = cli.main(["plan", "--compare", "h100:2", "h100:1", "--model", str(model), *SMALL,
                     "--what-if", "memory=0.0001GiB"])  # fmt: skip
    out, err = capsys.readouterr()
    assert code == 0, err
    assert out.count("none fits") == 2 and out.count("no plan fits into") == 2


@pytest.mark.parametrize("arguments, message", [
    (["h100:8", "h200:8"], "there is no plan h100:8; to compare two clusters, say for which model: add --model"),
    (["h100:1..4", "h200:8", "--model", "x"], "--compare h100:1..4 h200:8: two clusters, not ranges"),
    (["h100:8", "h20:8", "--model", "x"], "unknown device 'h20'"),
    (["h100:8", "h200:8", "--model", "x", "--tokens", "1e9", "--price", "1", "2", "3"], "3 prices for h100:8, h200:8"),
    (["h100:8", "h200:8", "--model", "x", "--price", "inf"], "--price inf"),
    (["h100:8", "h200:8", "--model", "x", "--price", "2"], "--price says what --tokens cost: add them"),
])  # fmt: skip
def test_mistakes_are_one_line(capsys, arguments, message):
    assert cli.main(["plan", "--compare", *arguments]) == 2
    assert message in capsys.readouterr().err
