"""Variants of a step's graph that are planned: chunks of the sequence, copies of the batch, and recomputation."""

from __future__ import annotations

from dataclasses import dataclass

MATMULS = {
    "fp8": "float8",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}  # words of a plan's name -> formats of `nn.linear.scaled_mm`


@dataclass(frozen=True)
class Variant:
    """A variant of a step's graph.

    sequence_chunks: number of chunks of the sequence (`lower.variants.unroll`).
    recompute: what the backward pass recomputes (`plan.search.recompute.chosen`): labels of forward nodes in the graph
        with these chunks, names of operators, `attention`, or `layers`.
    batch_splits: number of parts of the batch, one of which computes while another communicates
    (`lower.variants.unroll`).
    matmul_dtype: the format of products of layers (`nn.linear.scaled_mm`), "" for the model's own dtype.
    """

    sequence_chunks: int = 1
    recompute: tuple[str, ...] = ()
    batch_splits: int = 1
    matmul_dtype: str = ""


PLAIN = Variant()
LAYERS = "layers"  # in place of labels: all activations of layers that no other layer reads
ATTENTION = "attention"  # in place of labels: attention, from the products of queries and keys to those of values
