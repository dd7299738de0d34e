import json

import pytest

from tutti.hardware import Cluster, Device, Link
from tutti.hardware.curve import Curve, Grid
from tutti.hardware.device import Way

SHIFT = (("ppermute", 2, Curve(((0, 1.0), (1, 2.0)))),)
MEASURED = Cluster(
    Device(
        "cpu",
        {"float32": 1e11},
        1e9,
        1e10,
        overhead=1e-6,
        products={"float32": Grid((1, 2), (1e-6,) * 8)},
        streams={"add float32": Curve(((0, 0.0), (1 << 20, 1e-4)))},
    ),
    (
        (2, Link(1e9, 1e-4, ways=(Way("ring", "", 0.0, 1e-4, 1.0),), measured=SHIFT)),
        (3, Link(1e9, 1e-4, kind="ring", oversubscription=2, ports=1, source="a guess")),
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    "cluster", [MEASURED, *map(Cluster.parse, ("h100:4/2x16x8", "cpu:3", "ascend-910:8"))], ids=str
)
def test_round_trip(cluster):
    again = Cluster.from_json(cluster.to_json())
    assert again == cluster and hash(again) == hash(cluster)
    assert again.time("all_reduce", 1e6, 1, 2) == cluster.time("all_reduce", 1e6, 1, 2)


def test_what_has_its_default_is_left_out():
    plain = json.loads(Cluster(Device("toy", {"float32": 1.0}, 1, 1), ((2, Link(1, 0)),)).to_json())
    assert plain == {
        "device": {"name": "toy", "peak": {"float32": 1.0}, "memory": 1, "bandwidth": 1},
        "levels": [[2, {"bandwidth": 1, "latency": 0}]],
    }


POWER = '{"device": {"name": "x", "peak": {}, "memory": 1, "bandwidth": 1, "power": %s}, "levels": []}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"device": {}}', "not a cluster: it has no 'levels'"),
        ("[]", "not a cluster: an object with 'device' and 'levels' is needed, not list"),
        ("{half", "not a cluster: "),
        ('{"device": {"colour": 1}, "levels": []}', "not a cluster: a Device has no 'colour'; the nearest is '.*'"),
        (
            '{"device": {"name": "x", "peak": {}, "memory": 1, "bandwidth": 1},'
            ' "levels": [[2, {"bandwith": 1, "latency": 0}]]}',
            "a Link has no 'bandwith'; the nearest is 'bandwidth'",
        ),
        (
            '{"device": {"name": "x", "peak": {}, "memory": 1, "bandwidth": 1},'
            ' "levels": [[2, {"bandwidth": 1, "latency": 0, "kind": "star"}]]}',
            "no kind of link 'star'; known are switch, ring, mesh",
        ),
        *(
            (POWER % power, message)
            for power, message in (("-1", "a device of -1 W"), ("1e999", "of inf W"), ('"x"', "not a cluster"))
        ),
    ],
)
def test_json_of_something_else(text, message):
    with pytest.raises(ValueError, match=message):
        Cluster.from_json(text)


def test_a_cluster_is_parsed_from_a_file(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(MEASURED.to_json())
    assert Cluster.parse(str(file)) == MEASURED
    with pytest.raises(ValueError, match=r"no cluster '.*other.json': there is no such file"):
        Cluster.parse(str(tmp_path / "other.json"))
    file.write_text("{}")
    with pytest.raises(ValueError, match=r"mine.json: not a cluster: it has no 'levels'"):
        Cluster.parse(str(file))
