import pytest

from tutti.hardware import Cluster


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
        ("h100:64x16x8", [8, 16, 64]),
        ("h100:1x4x8", [8, 4]),
        ("b200:12x8", [8, 12]),
        ("ascend-910:8", [4, 2]),
        ("ascend-910:7x2x8", [4, 2, 2, 7]),
        ("ascend-910:2", [2]),
    ],
)
def test_parse(text, levels):
    assert [size for size, _ in Cluster.parse(text).levels] == levels


def test_short_name_round_trip():
    for text in ("cpu:4", "h100:16x8", "a100-40:2x8", "h100:64/3x16x8", "h100:2/1.5x8"):
        assert str(Cluster.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h10:8", "unknown device 'h10'; nearest is 'h100', known are cpu, v100-32"),
        ("H100:8", "unknown device 'H100'; nearest is 'h100'"),
        ("a100:8", "unknown device 'a100'; nearest is 'a100-40'"),
        ("tpu:4", "unknown device 'tpu'; nearest is 'cpu'"),
        ("h100:12", "12 devices do not fill nodes of 8; nearest are h100:1x8 and h100:2x8"),
        ("h100:4x16", "a node has 8 h100; write h100:4x8"),
        ("h100:0", "has no devices"),
        ("h100:2x2x2x2", "no cluster 'h100:2x2x2x2'; write name:devices, name:nodesxdevices or"),
        ("h100:2x8/2", "only the links between nodes or pods can be"),
        ("h100:2/0.5x8", "only the links between nodes or pods can be oversubscribed, by 1 or more"),
        ("ascend-910:6", "6 ascend-910 in a node do not fill its groups of 4; nearest is 4"),
        ("", "no cluster ''"),
    ],
)
def test_errors_name_the_nearest(text, message):
    with pytest.raises(ValueError, match=message):
        Cluster.parse(text)


def test_pods_are_joined_by_a_spine():
    cluster = Cluster.parse("h100:64/3x16x8")
    (_, _), (_, rail), (_, spine) = cluster.levels
    assert (rail.oversubscription, spine.oversubscription) == (1, 3)
    assert spine.latency == 2 * rail.latency and spine.bandwidth == rail.bandwidth
    assert cluster.size == 64 * 16 * 8
