"""What is done to a step's graph before it is planned: its sequence in chunks, its batch in copies, operators computed
again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    """slices: chunks of the sequence (`lower.unroll`). again: labels of forward nodes that the backward pass computes
    again (`lower.recompute`), as they are with the sequence in those chunks. copies: into which the batch is cut, so
    that one computes while another communicates (`lower.unroll`)."""

    slices: int = 1
    again: tuple[str, ...] = ()
    copies: int = 1


PLAIN = Variant()
LAYERS = "layers"  # in the place of labels: all of layers that others do not read
