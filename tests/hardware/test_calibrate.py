"""Calibration, with as little effort as possible, on the shared pool of processes."""

from inspect import getclosurevars
from itertools import product

import pytest
import torch
import torch.distributed as dist

from tutti.hardware import Cluster, calibrate, compute, exchange, machine
from tutti.hardware.calibrate import Effort, calibrate_here, line
from tutti.hardware.collectives import MESSAGES
from tutti.hardware.timing import times

LITTLE = Effort(
    window=0.0,
    products=(1, 16),
    add=(1 << 12, 1 << 14),
    families=(1 << 12,),
    collective_window=0.0,
    rounds=1,
    buffers=(1 << 10, 1 << 14),
)


def measured() -> tuple[str, int]:
    _join()
    threads = torch.get_num_threads()
    cluster = calibrate_here(1, "cpu", LITTLE)
    assert torch.get_num_threads() == threads
    return cluster.to_json(), dist.get_rank()


def _join() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


@pytest.fixture(scope="module")
def cluster(pool) -> Cluster:
    return Cluster.from_json(pool.run(measured)[0][0])


def test_every_figure_is_measured(cluster):
    assert str(cluster) == "cpu:4"
    device = cluster.device
    assert device.source == machine.CALIBRATED + machine.key("cpu", 4, 1)
    assert device.memory == machine.memory(torch.device("cpu")) / 4
    assert set(device.products) == set(device.transposed) == set(compute.DTYPES)
    assert min(device.transposed.values()) >= 1
    assert set(device.streams) == {f"{family} {dtype}" for family, dtype in product(compute.FAMILIES, compute.DTYPES)}
    assert {len(device.streams[f"add {d}"].points) for d in compute.DTYPES} == {3}
    assert set(device.efficiency) == {f"{name} {dtype}" for name, dtype in product(compute.OTHERS, compute.DTYPES)}
    assert device.rate("float32", "attention") == device.peak_of("float32") * device.efficiency["attention float32"]
    assert 0 < device.overhead < 1e-3


def test_collectives_are_measured_in_the_whole_group_and_in_pairs(cluster):
    link = cluster.link(1, 4)
    assert sorted((kind, k) for kind, k, _ in link.measured) == sorted(product(MESSAGES, (2, 4)))
    curves = {kind: curve for kind, k, curve in link.measured if k == 4}
    assert [x for x, _ in curves["all_reduce"].points] == [0, 1.5 * 1024, 1.5 * 16384]
    assert [x for x, _ in curves["all_gather"].points] == [0, 0.75 * 1024, 0.75 * 16384]
    assert [x for x, _ in curves["ppermute"].points] == [0, 1024, 16384]
    assert cluster.time("all_to_all", 0.75 * 16384, 1, 4) == curves["all_to_all"].points[-1][1]
    assert [line.name for line in cluster.lines("all_reduce", 1, 4)] == ["ring"]


def test_a_device_without_measurements_of_a_kind_uses_its_matrix_products(cluster):
    assert Cluster.parse("h100").device.rate("bfloat16", "attention") == Cluster.parse("h100").device.rate("bfloat16")


def grouped(levels) -> list[list[list[int]]]:
    _join()
    return [[dist.get_process_group_ranks(g) for g in groups] for groups in calibrate._groups(levels)]


def test_groups_of_a_level(pool):
    assert pool.run(grouped, [4])[3] == [[[0, 1, 2, 3], [2, 3]]]
    assert pool.run(grouped, [2, 2])[1] == [[[0, 1]], [[1, 3]]]


def exchanged() -> dict[str, list[float]]:
    _join()
    sent = {}
    for kind in MESSAGES:
        exchange.collective(kind, 64, dist.group.WORLD, torch.device("cpu"))()
        sent[kind] = exchange.sent(kind, 64, 4)
    return sent


@pytest.mark.parametrize(
    ("hosts", "levels"), [("aaaa", [4]), ("aabb", [2, 2]), ("aaab", [4]), ("abcabc", [2, 3]), ("a", [1])]
)
def test_levels_are_machines_with_equally_many_processes(monkeypatch, hosts, levels):
    monkeypatch.setattr(calibrate.dist, "get_world_size", lambda: len(hosts))
    monkeypatch.setattr(calibrate.dist, "all_gather_object", lambda into, own: into.__setitem__(slice(None), hosts))
    assert calibrate._levels() == levels


def test_bytes_that_are_sent(pool):
    expected = {"all_reduce": 96, "all_gather": 48, "reduce_scatter": 48, "all_to_all": 48, "ppermute": 64}
    assert pool.run(exchanged) == [expected] * 4


@pytest.mark.parametrize("family", compute.FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_families_read_and_write_the_bytes_that_are_said(family, dtype):
    count = 1 << 16
    run = compute.FAMILIES[family](count, dtype, torch.device("cpu"))
    out, size = run(), dtype.itemsize
    times = {"compare": size + 1, "where": (3 * size + 1) / size, "pool": 9.0}  # of the bytes of the result
    times |= dict.fromkeys(("add", "scatter", "table"), 3) | {"update": 7}
    touched = getclosurevars(run).nonlocals["x"].nbytes if family == "sum" else out.nbytes * times.get(family, 2)
    assert touched == pytest.approx(count, rel=0.2 if family == "pool" else 0.1)
    assert out.dtype == (torch.bool if family == "compare" else dtype) and out.isfinite().all()


@pytest.mark.parametrize("name", compute.OTHERS)
def test_flops_of_what_is_no_matrix_product(name):
    from torch.utils.flop_counter import FlopCounterMode

    run, flops = compute.other(name, "float32", torch.device("meta"))
    with FlopCounterMode(display=False) as counter:
        run()
    # the counter ignores the causal mask; without a fused kernel, as here, it does not compute the products anew
    ignored = {"attention": 2, "attention_backward": 2 * 4 / 5}.get(name, 1)
    assert counter.get_total_flops() == flops * ignored


def test_figures_in_turn_have_operands_of_their_own():
    operands, ran = [], []

    def make():
        operands.append(mine := len(operands) + 1)
        return lambda: ran.append(mine)

    run = compute.in_turn(make, compute.MOST / 3)
    assert len(operands) == 3 and ran == [1, 2, 3]  # each once, to warm up
    for _ in range(4):
        run()
    assert ran[3:] == [1, 2, 3, 1]
    compute.in_turn(make, 1)
    assert len(operands) == 3 + compute.TURNS
    compute.in_turn(make, 2 * compute.MOST)
    assert len(operands) == 3 + compute.TURNS + 1
    compute.in_turn(make, 1, compute.COLD)
    assert len(operands) == 3 + compute.TURNS + 1 + compute.COLD


def test_shapes_up_to_a_size():
    assert compute.shapes((1, 8), 2 * 64) == [s for s in product((1, 8), repeat=3) if s != (8, 8, 8)]


def test_the_line_nearest_by_relative_errors():
    assert line([(x, 2e-4 + 3e-9 * x) for x in (1e3, 1e5, 1e8)]) == pytest.approx((2e-4, 3e-9))
    alpha, beta = line([(1.0, 1.0), (10.0, 100.0), (100.0, 10000.0)])  # the nearest would begin before nothing
    assert alpha == 0.1 and beta > 0


def test_times_leave_the_first_run_out():
    ticks, runs = iter(range(100)), []
    measured = times(lambda: runs.append(0), torch.device("cpu"), 0.0, 3, lambda: next(ticks) ** 2)
    assert measured == [5 + 4 * i for i in (0, 1, 2)] and len(runs) == 4  # 3^2 - 2^2, 5^2 - 4^2, ...


def test_what_comes_before_a_run_is_not_counted():
    ticks, clock = [0], lambda: ticks[0]

    def passes(seconds):
        ticks[0] += seconds

    measured = times(lambda: passes(1), torch.device("cpu"), 0.0, 3, clock, lambda: passes(10))
    assert measured == [1] * 3 and ticks[0] == 44


def together(window: float) -> list[float]:
    _join()
    group = dist.group.WORLD
    return exchange.seconds(lambda: dist.barrier(group), group, torch.device("cpu"), window)


def test_ranks_agree_what_a_collective_takes(pool):
    first, *others = pool.run(together, 0.01)
    assert 1 <= len(first) <= exchange.MOST and min(first) > 0 and all(o == first for o in others)


def test_more_processes_than_cores_share_them(pool, monkeypatch):
    monkeypatch.setattr(calibrate, "_levels", lambda: [6])
    monkeypatch.setattr(machine, "cores", lambda: 4)
    assert calibrate._clock(torch.device("cpu"), 1)[1] == 1.5
    assert calibrate._clock(torch.device("cpu"), 2)[1] == 1.0


def test_calibrations_that_cannot_be():
    with pytest.raises(ValueError, match="cannot calibrate 0 processes"):
        calibrate.calibrate(0, kind="cpu")
    with pytest.raises(ValueError, match="unknown kind of device 'tpu'; expected cpu or cuda"):
        calibrate.calibrate(1, kind="tpu")
