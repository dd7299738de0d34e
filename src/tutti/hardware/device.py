"""A device, and a link between devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, inf, log, sqrt

import torch

from tutti.hardware.curve import Curve, Grid, Ramp

Dtype = torch.dtype | str

# Families of memory-bound work with different seconds per byte. `add` stands for all that runs at memory speed,
# `update` for work that writes where it has read. Bytes of `pool` count once per window that covers them.
FAMILIES = ("add", "update", "sum", "compare", "where", "exp", "tanh", "erf", "gelu", "silu", "softmax", "norm",
            "index", "scatter", "table", "transpose", "pool")  # fmt: skip

# (rows, columns, share of the rate that the largest reaches) of the tiles that a GPU's library has kernels for.
# Sizes: NVIDIA, "Matrix Multiplication Background User's Guide" (sections on tile and wave quantization); the guide
# says that smaller tiles are slower, for less reuse: the shares are assumed.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 128, 0.8), (64, 64, 0.6))
SMALLEST_K = 64  # assumed: a slice of the inner dim is not divided further between units
MOST_SLICES = 16  # assumed: of the inner dim, between units (split-k)

# Steps of the inner dim that a tile's first loads and its result cost. In the tables of ai-dynamo/aiconfigurator
# (systems/data, gemm_perf, bfloat16, 8192 rows and more), products of inner dim 512 reach 0.87 (A100) and 0.88 (H100)
# of the rate of those of 16384, products of 1024 reach 0.94: as if 64 steps were added.
FILL = 64

# Heads of 64 numbers reach 0.9 of the rate of heads of 128, wider ones 0.8: FlashAttention-3 (arXiv 2407.08608),
# figures 5 to 7, FlashAttention-2 on an H100; SimuMax, configs/system, heads of 192 and 128 on an A100 and a B200.
NARROW, WIDE = 0.9, 0.8

LOW = ("float8", "mxfp8", "nvfp4")  # beginnings of names of formats of low precision
ITEM_BYTES = {"tfloat32": 4, "mxfp8": 1, "nvfp4": 0.5}  # of what is no dtype of torch


@dataclass(frozen=True)
class Outer:
    """Memory outside a device: its share of the host's memory, or of a disk.

    memory: bytes; 0 if nothing can be stored there.
    link: bytes/s in each direction between the two.
    bandwidth: bytes/s that an update reads and writes there.
    """

    memory: float
    link: float
    bandwidth: float
    source: str = ""


ANY_HOST = Outer(64 * 2**30, 12e9, 12e9, "assumed: PCI Express 3.0 x16, an eighth of two sockets of DDR4")
ANY_DISK = Outer(2**40, 1e9, 1e9, "assumed: an NVMe disk of 1 TiB")


@dataclass(frozen=True)
class Device:
    """An accelerator, or the cores of one process.

    peak: FLOP/s of dense matrix products by dtype name ("float32", "bfloat16", ...).
    memory: bytes.
    bandwidth: bytes/s of the memory, reads and writes together.
    efficiency: share of the peak that large matrix products reach, by dtype name; 1 if it is missing. Other work has
        keys such as "attention float32", which default to those of matrix products. This other work is "attention",
        "attention_backward", "convolution", "convolution_backward", and "grouped" for products in groups. "memory" is
        the share of the bandwidth that kernels reach.
    overhead: seconds to launch one operator.
    source: where the figures come from.
    units: multiprocessors that work on tiles of a matrix product (`TILES`); 0 if products are not tiled.
    products: measured seconds of matrix products by dtype name, without the overhead.
    transposed: by dtype name, the slowdown of a product whose first operand is transposed in memory, as in the
        gradient of a weight.
    streams: measured seconds over bytes (read and written), without the overhead, by "family dtype".
    attention: "forward" and "backward": the share of the peak that fused attention reaches, over the number of keys.
        If it is empty, attention runs at `rate`. Other kernels have a prefix: "flash2 forward".
    yields: share of its speed that computation loses while collectives run on the device too.
    varies: standard deviation of the time that devices of this kind take for the same work, as a share.
    beside: memory outside the device; None assumes something typical (`outside`).
    power: watts that the vendor rates the device at (TDP, or power of the board), without its host; 0 if unknown.
    overlaps: whether it computes at full speed while collectives run. None: all devices do except CPUs, whose cores
        carry the bytes themselves.
    """

    name: str
    peak: Mapping[str, float] = field(hash=False)
    memory: float
    bandwidth: float
    efficiency: Mapping[str, float] = field(default_factory=dict, hash=False)
    overhead: float = 0.0
    source: str = ""
    units: int = 0
    products: Mapping[str, Grid] = field(default_factory=dict, hash=False, repr=False)
    transposed: Mapping[str, float] = field(default_factory=dict, hash=False, repr=False)
    streams: Mapping[str, Curve] = field(default_factory=dict, hash=False, repr=False)
    attention: Mapping[str, Ramp] = field(default_factory=dict, hash=False, repr=False)
    yields: float = 0.0
    varies: float = 0.0
    beside: Outer | None = None
    power: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.power < inf:
            raise ValueError(f"a device of {self.power} W: power must be finite and not negative, 0 if it is unknown")

    @property
    def outside(self) -> Outer:
        return self.beside or (ANY_DISK if self.outer == "disk" else ANY_HOST)

    @property
    def outer(self) -> str:
        """The tier outside its memory: the disk for a CPU, whose memory is the host's, else the host."""
        return "disk" if self.name.startswith("cpu") else "host"

    overlaps: bool | None = None

    @property
    def computes_on(self) -> bool:
        """Whether it computes while collectives are in flight."""
        return not self.name.startswith("cpu") if self.overlaps is None else self.overlaps

    def peak_of(self, dtype: Dtype) -> float:
        """Peak FLOP/s in this dtype. Raises ``ValueError`` if it is unknown."""
        name = dtype_name(dtype)
        if name not in self.peak:
            raise ValueError(f"device {self.name} has no peak for {name}; known are {', '.join(self.peak)}")
        return self.peak[name]

    def dtype_with_peak(self, dtype: Dtype) -> Dtype:
        """The dtype, or float32 if the device has no figures for it."""
        return dtype if dtype_name(dtype) in self.peak else "float32"

    def rate(self, dtype: Dtype, kind: str = "") -> float:
        """FLOP/s of large matrix products in this dtype, or the measured FLOP/s of another kind ("attention",
        "convolution")."""
        name = dtype_name(dtype)
        like = "bfloat16" if name.startswith(LOW) else name  # reaches the same share, if that is not measured
        share = self.efficiency.get(name, self.efficiency.get(like, 1.0))
        return self.peak_of(dtype) * self.efficiency.get(f"{kind} {name}", self.efficiency.get(f"{kind} {like}", share))

    @property
    def reached(self) -> float:
        """Bytes/s of the memory that kernels reach."""
        return self.bandwidth * self.efficiency.get("memory", 1.0)

    def slowest(self, count: int) -> float:
        """The time that the slowest of so many devices takes for the same work, as a multiple of the usual one: the
        largest of k standard normal numbers is about sqrt(2 ln k)."""
        return 1 + self.varies * sqrt(2 * log(count))

    def attention_rate(self, dtype: Dtype, kind: str, keys: int, width: int) -> float:
        """FLOP/s of fused attention over so many keys with heads of this width. kind: "attention" or
        "attention_backward"."""
        ramp = self.attention.get("backward" if kind.endswith("_backward") else "forward")
        if not ramp or dtype_name(dtype) not in ("bfloat16", "float16"):
            return self.rate(dtype, kind)
        by_width = NARROW if width <= 64 else WIDE if width > 128 else 1.0
        return self.peak_of(dtype) * ramp.at(keys) * by_width

    def matmul_seconds(
        self, batch: int, m: int, k: int, n: int, dtype: Dtype, transposed: bool = False, kind: str = ""
    ) -> float:
        """Seconds of `batch` products (m x k) @ (k x n) in one operator, without the overhead of launching it.

        Interpolates measured products of this dtype, if there are any. Else a roofline: the slower of memory traffic
        (each operand and the result once) and of arithmetic, which with `units` comes in whole tiles and waves.
        transposed: whether the first operand is transposed in memory. kind: "grouped" for products in groups.
        """
        longer = self.transposed.get(dtype_name(dtype), 1.0) if transposed else 1.0
        return longer * _matmul_seconds(self, batch, m, k, n, dtype, kind)

    def stream_seconds(self, count: float, family: str = "add", dtype: Dtype = "float32") -> float:
        """Seconds of an operator that reads and writes `count` bytes in total, without its overhead.

        family: one of `FAMILIES`. From measured times (those of float32 if the dtype has none), else bytes over
        bandwidth.
        """
        if family not in FAMILIES:
            raise ValueError(f"no family of operators {family!r}; known are {', '.join(FAMILIES)}")
        if not self.streams:
            return count / self.reached
        curve = self.streams.get(f"{family} {dtype_name(dtype)}") or self.streams.get(f"{family} float32")
        return curve.seconds(count) if curve else count / self.reached


@lru_cache(maxsize=1 << 16)
def _matmul_seconds(device: Device, batch: int, m: int, k: int, n: int, dtype: Dtype, kind: str) -> float:
    name = dtype_name(dtype)
    if name in device.products:
        grid = device.products[name]
        one = grid.at(m, k, n)
        return one + (batch - 1) * max(one - grid.call, 2.0 * m * k * n / device.rate(name))
    itemsize = ITEM_BYTES.get(name) or getattr(torch, name).itemsize
    moved = batch * (m * k + k * n + m * n) * itemsize / device.reached
    return max(moved, quantized_flops(device.units, batch, m, k, n) / device.rate(dtype, kind))


def quantized_flops(units: int, batch: int, m: int, k: int, n: int) -> float:
    """FLOPs of a batch of products when `units` work in whole tiles and waves, for the best tile (and split of k).

    Each unit computes one tile at a time: ceil(tiles / units) waves of units x (rows x columns) x 2 (k + `FILL`)
    FLOPs. If there are fewer tiles than units, k is divided between units too.
    """
    if not units:
        return 2.0 * batch * m * k * n
    best = float("inf")
    for rows, columns, share in TILES:
        tiles = batch * ceil(m / rows) * ceil(n / columns)
        slices = max(1, min(units // tiles, k // SMALLEST_K, MOST_SLICES))
        waves = ceil(tiles * slices / units)
        best = min(best, 2.0 * waves * units * rows * columns * (ceil(k / slices) + FILL) / share)
    return best


@dataclass(frozen=True)
class Way:
    """How a backend sends: an algorithm ("ring", "tree" or "hierarchical") with one of its protocols.

    start: seconds before a collective starts. latency: seconds per message. share: fraction of the link's bandwidth.
    All-to-alls and ppermutes use the protocols of the ring.
    """

    algorithm: str
    protocol: str
    start: float
    latency: float
    share: float


@dataclass(frozen=True)
class Link:
    """The connection between the members of one level of a cluster.

    bandwidth: bytes/s that one device (with `ports`: one port) sends while it receives as much.
    latency: seconds per message.
    efficiency: share of the bandwidth that collectives reach.
    source: where the figures come from.
    kind: "switch": any member reaches any other at full bandwidth (NVSwitch, InfiniBand and RoCE rails, a fat tree).
        "ring": each member has links to two neighbors, which share its bandwidth; rings on adjacent levels form a
        torus. "mesh": each member has a link to each other member, which share its bandwidth.
    oversubscription: ratio of the bytes that the devices below can send to those that the level carries.
    ports: ports of each member, shared by its devices; 0 if each device has its own ("rails").
    ways: algorithms and protocols of the backend; if empty, ring, tree or hierarchy with this latency.
    measured: seconds over bytes that each rank sends, as (kind, ranks, curve); used instead of formulas for groups on
        this level alone.
    """

    bandwidth: float
    latency: float
    efficiency: float = 1.0
    source: str = ""
    kind: str = "switch"
    oversubscription: float = 1.0
    ports: int = 0
    ways: tuple[Way, ...] = ()
    measured: tuple[tuple[str, int, Curve], ...] = field(default=(), hash=False, repr=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"no kind of link {self.kind!r}; known are {', '.join(KINDS)}")
        if self.bandwidth <= 0 or self.oversubscription < 1 or self.ports < 0:
            raise ValueError(
                f"a link of {self.bandwidth} bytes/s, oversubscribed {self.oversubscription} times, with {self.ports} "
                "ports: bandwidth must be positive, oversubscription at least 1, ports not negative"
            )

    def seconds(self, sent: float, messages: int) -> float:
        """Time for one device to send this many bytes in this many messages, one after the other."""
        return messages * self.latency + sent / (self.bandwidth * self.efficiency)


KINDS = ("switch", "ring", "mesh")


def dtype_name(dtype: Dtype) -> str:
    return str(dtype).removeprefix("torch.")
