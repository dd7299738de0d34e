"""What is done to a step's graph before it is planned: its sequence in chunks, its batch in copies, operators computed
again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    """sequence_chunks: number of chunks of the sequence (`lower.unroll`). recompute: labels of forward nodes that the
    backward pass recomputes (`lower.recompute`), as they are with the sequence in those chunks. batch_splits: number of
    parts of the batch, one of which computes while another communicates (`lower.unroll`)."""

    sequence_chunks: int = 1
    recompute: tuple[str, ...] = ()
    batch_splits: int = 1


PLAIN = Variant()
LAYERS = "layers"  # in the place of labels: all of layers that others do not read
