"""What-if questions: clusters with other figures."""

import pytest

from tutti.hardware import Cluster
from tutti.hardware.altered import altered


def test_figures_are_multiplied_or_replaced():
    before = Cluster.parse("h100:4x8")
    after = altered(before, "memory=141GiB,network=2x, peak=1.5x,overhead=1us")
    assert after.device.memory == 141 * 2**30 and after.device.overhead == 1e-6
    assert after.device.peak["bfloat16"] == 1.5 * before.device.peak["bfloat16"]
    (_, inside), (_, between) = before.levels
    assert after.levels[0][1] == inside and after.levels[1][1].bandwidth == 2 * between.bandwidth
    assert altered(before, "node=900GB/s").levels[0][1].bandwidth == 900e9
    assert altered(before, "link=0.5x").time("all_reduce", 1 << 30, 1, 32) > before.time("all_reduce", 1 << 30, 1, 32)
    assert altered(before, "") == before


@pytest.mark.parametrize("text, message", [
    ("ram=2x", "no figure 'ram' to change; there are memory, bandwidth"), ("link=x", "link=x"),
    ("memory=2", "a factor such as 2x or an amount"), ("memory=0GiB", "memory=0GiB"), ("memory=-1GiB", "memory"),
    ("peak=2GB", "a factor such as 2x"), ("memory=1e999GiB", "memory=1e999GiB"),
])  # fmt: skip
def test_what_is_no_figure_or_amount_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        altered(Cluster.parse("h100:8"), text)


def test_power_is_an_amount_where_it_is_not_known():
    assert altered(Cluster.parse("h100:8"), "power=0.5x").device.power == 350
    assert altered(Cluster.parse("cpu:8"), "power=0.25kW").device.power == 250
    with pytest.raises(ValueError, match="the power of cpu is not known: give an amount"):
        altered(Cluster.parse("cpu:8"), "power=2x")


def test_measured_figures_stay(tmp_path):
    cluster = Cluster.parse("cpu:2")
    assert altered(cluster, "memory=2x").device.memory == 2 * cluster.device.memory


def test_attention_by_another_kernel():
    h100 = Cluster.parse("h100:8").device
    slower = altered(Cluster.parse("h100:8"), "attention=flash2").device
    for kind in ("attention", "attention_backward"):
        ratio = slower.attention_rate("bfloat16", kind, 8192, 128) / h100.attention_rate("bfloat16", kind, 8192, 128)
        assert 0.55 < ratio < 0.7, "FlashAttention-3 (arXiv 2407.08608), figures 5 and 6"
    for kernel in ("triton", "flash", "forward", ""):
        with pytest.raises(ValueError, match="h100 has rates of flash2"):
            altered(Cluster.parse("h100:8"), f"attention={kernel}")
    with pytest.raises(ValueError, match="a100-80 has rates of no other kernel"):
        altered(Cluster.parse("a100-80:8"), "attention=flash2")
