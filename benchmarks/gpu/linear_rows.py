"""Linear layers of few rows on one GPU: tiles of `tutti.nn.linear.linear_rows_triton` beside cuBLAS, for choosing its
table.

Shapes of Llama 1B, bfloat16, 1, 16 and 64 rows. Layers rotate among copies that do not fit into the cache, and run from
a CUDA graph. Microseconds of a call, and bytes of the weights a second.

    python benchmarks/gpu/linear_rows.py [--quick]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import harness

DTYPE, CACHE = torch.bfloat16, 200 << 20  # bytes of all copies of a layer, at least
LAYERS = {
    "queries, keys, values": ([2048, 512, 512], 2048), "output": ([2048], 2048), "down": ([2048], 8192),
    "head": ([128256], 2048), "gated": ([8192, 8192], 2048),
}  # fmt: skip
TILES = {
    1: [(4, 1024, 4, 1), (2, 1024, 4, 1), (1, 2048, 4, 1), (4, 512, 4, 1), (8, 512, 4, 1), (2, 2048, 4, 1)],
    16: [(16, 256, 2, 4), (32, 128, 2, 4), (64, 128, 4, 4), (16, 512, 4, 3), (32, 128, 4, 4)],
    64: [(16, 128, 4, 4), (64, 128, 4, 3), (128, 64, 4, 4), (32, 128, 4, 4), (64, 64, 4, 4)],
}
Inputs = tuple[Tensor, list[Tensor]]


def microseconds(call: Callable[[Tensor, list[Tensor]], Any], inputs: Sequence[Inputs]) -> float:
    """Microseconds of a call, from a graph of calls."""
    rounds = max(1, 24 // len(inputs))
    for each in inputs:
        call(*each)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for each in inputs:
                call(*each)
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(5):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 5 / rounds / len(inputs) * 1e3


def measure(name: str, rows: int) -> dict[str, Any]:
    from tutti.nn.linear import linear_rows_triton as kernels

    sizes, width = LAYERS[name]
    count = sum(sizes) * width * DTYPE.itemsize
    inputs = [(torch.randn(rows, width, device="cuda", dtype=DTYPE),
               [torch.randn(n, width, device="cuda", dtype=DTYPE) for n in sizes])
              for _ in range(max(1, min(24, CACHE // count)))]  # fmt: skip

    def theirs(x: Tensor, weights: list[Tensor]) -> Any:
        if name == "gated":
            return F.silu(F.linear(x, weights[0])) * F.linear(x, weights[1])
        return [F.linear(x, w) for w in weights]

    def ours(tile: kernels.Tile) -> Callable[[Tensor, list[Tensor]], Any]:
        if name == "gated":
            return lambda x, weights: kernels.gated(x, weights[0], weights[1], "silu", tile)
        return lambda x, weights: kernels.linears(x, weights, [None] * len(weights), tile)

    tiles = {str(tile): microseconds(ours(tile), inputs) for tile in TILES[rows]}
    peer, best = microseconds(theirs, inputs), min(tiles.values())
    harness.say(f"{rows} rows, {name}: cuBLAS {peer:.1f} us, best tile {best:.1f} us ({count / best / 1e6:.2f} TB/s)")
    return {"weight_bytes": count, "cublas": peer, "tiles": tiles}


def run(quick: bool) -> dict[str, Any]:
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    return {str(rows): {name: measure(name, rows) for name in LAYERS} for rows in ((1,) if quick else TILES)}


if __name__ == "__main__":
    harness.main(run, __file__)
