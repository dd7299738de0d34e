"""Textbook plans by name: `dp`, `tp4`, `zero3`, `dp2xtp2`, `cp4`, `ep4`, `pp4`, `pp2-zb-vxdp2`, ...

| name | axis `dp` | axis `tp` |
|---|---|---|
 dp | splits the batch, replicates parameters | |
 tp | | splits every matrix and computes with the parts, replicates the batch |
 zero1 | as dp; splits the optimizer state | |
 zero2 | as zero1; splits accumulated gradients | |
 zero3 | as zero2; splits parameters and gathers them for use | |

`cp4` splits the sequence, dim 1 of the batch, over axis `cp` and replicates parameters. Attention is a ring.

`ep4` splits the experts over axis `ep`, and everything else along the batch, as `dp` does. With a capacity, one
all-to-all sends the slots to their experts and another returns them. Dropless, tokens travel to the devices that have
their experts and the results back (`ops.experts_exchange`).

`recompute` (`zero3xrecompute`, `pp4xrecompute`) keeps the activations that a layer passes on and recomputes the others
in the backward pass (`lower.recompute`).

`splits2` (`tp8xsplits2`) cuts the batch into two copies. One computes while the other communicates (`lower.unroll`,
`analysis.overlap`). `overlap2` (`tp8xoverlap2`) cuts only the operators between two communications, along the batch or
the sequence (`lower.regions`).

`pp4` makes a pipeline of 4 devices, each of which runs the rest of the plan. A schedule may follow, by default `1f1b`:
`pp4-gpipe`, `pp4-interleaved2` (two stages per device), `pp4-seq1f1b8` (8 chunks of the sequence, `lower.unroll`). See
`plan.schedule`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod

from tutti.plan.schedule import CHUNKED, COUNTED, NO_PIPE, REGISTERED, Pipe
from tutti.plan.schedule import names as schedules
from tutti.plan.variant import LAYERS, Variant

NAMES = (
    "auto, dp, tp, zero1, zero2, zero3, dp2xtp2, tp2xzero3, cp4, ep4, pp4, pp2-zb-vxdp2, zero3xrecompute, "
    "zero3xoffload2, tp8xsplits2, tp8xoverlap2, ..."
)
WORDS = ("auto", "dp", "tp", "cp", "ep", "pp", "zero", "recompute", "offload", "splits", "overlap", "single")
STEMS = {**{word: word for word in WORDS}, "fsdp": "zero3"}


@dataclass(frozen=True)
class Textbook:
    """A textbook plan.

    dp, tp, ep, cp: sizes of the axes.
    zero: ZeRO stage (0 to 3) of the data-parallel axis.
    pipe: the pipeline.
    recompute: whether the backward pass recomputes activations inside layers.
    offload: what is offloaded (`plan.tier`).
    batch_splits, overlap_chunks: as in `Plan`.
    """

    dp: int = 1
    tp: int = 1
    zero: int = 0
    ep: int = 1
    cp: int = 1
    pipe: Pipe = NO_PIPE
    recompute: bool = False
    offload: int = 0
    batch_splits: int = 1
    overlap_chunks: int = 1

    def __str__(self) -> str:
        parts = [str(self.pipe)] if self.pipe.devices > 1 else []
        parts += [f"dp{self.dp}"] if self.dp > 1 else []
        parts += [f"cp{self.cp}"] if self.cp > 1 else []
        parts += [f"ep{self.ep}"] if self.ep > 1 else []
        parts += [f"tp{self.tp}"] if self.tp > 1 else []
        parts += [f"zero{self.zero}"] if self.zero else []
        parts += ["recompute"] if self.recompute else []
        parts += [f"offload{self.offload if self.offload > 1 else ''}"] if self.offload else []
        parts += [f"splits{self.batch_splits}"] if self.batch_splits > 1 else []
        parts += [f"overlap{self.overlap_chunks}"] if self.overlap_chunks > 1 else []
        return "x".join(parts) or "single"

    @property
    def variant(self) -> Variant:
        """The variant of the step that the plan requires."""
        return Variant(self.pipe.sequence_chunks, (LAYERS,) if self.recompute else (), self.batch_splits)

    @property
    def mesh(self) -> dict[str, int]:
        """The mesh of a pipeline device. Tensor parallelism is the innermost axis, which has the fastest links."""
        axes = (("dp", self.dp), ("cp", self.cp), ("ep", self.ep), ("tp", self.tp))
        return {axis: n for axis, n in axes if n > 1} or {"dp": 1}


def textbook_of(name: str, mesh: Mapping[str, int]) -> Textbook | None:
    """The textbook plan with this name, or None if there is none or its mesh differs."""
    try:
        book = parse_name(name, prod(mesh.values()))
    except ValueError:
        return None
    return book if list(book.mesh.items()) == list(mesh.items()) else None


def parse_name(name: str, devices: int) -> Textbook:
    """The textbook plan of a name on this number of devices. An axis without a size takes the remaining devices.

    Raises ValueError if the name is unknown, or if the sizes do not multiply to the number of devices.
    """
    sizes: dict[str, int] = {}
    zero, schedule, chunks, sequence_chunks, recompute, offload, batch_splits, overlap_chunks = (
        0,
        "1f1b",
        1,
        1,
        False,
        0,
        1,
        1,
    )
    pattern = (
        r"(dp|tp|cp|ep|pp)(\d*)(?:-(.+))?|zero([123])|(recompute)|(offload)([123]?)|splits(\d+)|overlap(\d+)|single"
    )
    for part in name.split("x"):
        match = re.fullmatch(pattern, part)
        if not match:
            near = _nearest(name)
            hint = f"did you mean {near!r}? W" if near and near != name else "w"
            raise ValueError(f"no plan {name!r}: {hint}rite {NAMES}, or the path of a saved plan, *.json")
        if match[4]:
            zero = int(match[4])
        elif match[5]:
            recompute = True
        elif match[6]:
            offload = int(match[7] or 1)
        elif match[8]:
            batch_splits = int(match[8])
            if batch_splits < 2:
                raise ValueError(f"plan {name!r}: splits needs at least 2 copies of the batch")
        elif match[9]:
            overlap_chunks = int(match[9])
            if overlap_chunks < 2:
                raise ValueError(f"plan {name!r}: overlap needs at least 2 parts of a region")
        elif match[1]:
            if match[1] in sizes:
                raise ValueError(f"plan {name!r} names {match[1]} twice")
            if match[2] and not int(match[2]):
                raise ValueError(f"plan {name!r}: an axis has at least one device")
            sizes[match[1]] = int(match[2] or 0)
            if match[3]:
                schedule, chunks, sequence_chunks = _schedule(name, match[1], match[3])
    if zero:
        sizes.setdefault("dp", 0)
    open_axes = [axis for axis, size in sizes.items() if size == 0]
    given = 1
    for size in sizes.values():
        given *= size or 1
    if len(open_axes) > 1:
        raise ValueError(f"plan {name!r} leaves the sizes of {' and '.join(open_axes)} open: give all but one")
    if devices % given or (not open_axes and given != devices):
        several = "device" if given == 1 else "devices"
        hint = f": say how they are used, as in 'dpx{name}'" if not sizes and name != "single" else ""
        raise ValueError(
            f"plan {name!r} needs {'a multiple of ' if open_axes else ''}{given} {several}, not {devices}{hint}"
        )
    if open_axes:
        sizes[open_axes[0]] = devices // given
    dp, tp, cp, ep, pp = (sizes.get(axis, 1) for axis in ("dp", "tp", "cp", "ep", "pp"))
    if sequence_chunks > 1 and batch_splits > 1:
        raise ValueError(f"plan {name!r}: the sequence is cut into chunks or the batch into copies, not both")
    if overlap_chunks > 1 and (pp > 1 or batch_splits > 1 or offload):
        other = "a pipeline" if pp > 1 else "copies" if batch_splits > 1 else "offload"
        raise ValueError(f"plan {name!r}: overlap cannot be combined with {other}; leave one of them out")
    if sequence_chunks > 1 and pp < 2:
        raise ValueError(f"plan {name!r}: chunks of the sequence need a pipeline of at least 2 devices")
    pipe = Pipe(pp, schedule, chunks, sequence_chunks)
    return Textbook(dp, tp, zero if dp > 1 else 0, ep, cp, pipe, recompute, offload, batch_splits, overlap_chunks)


def _schedule(name: str, axis: str, said: str) -> tuple[str, int, int]:
    """The schedule of a pipeline, its stages per device, and its chunks of the sequence."""
    found = re.fullmatch(rf"({'|'.join(schedules())})(\d*)", said)
    if axis != "pp":
        raise ValueError(f"plan {name!r}: {axis} has no schedule; pp has")
    if not found:
        raise ValueError(f"plan {name!r}: no schedule {said!r} of pp; pp has {', '.join(schedules())}")
    schedule, number = found[1], int(found[2] or 1)
    counted, needed = schedule in COUNTED, schedule in (CHUNKED, "interleaved")
    if (found[2] and not counted) or (needed and not found[2]) or number < (2 if schedule == CHUNKED else 1):
        raise ValueError(
            f"plan {name!r}: interleaved and auto go with a number of stages on each device, pp4-interleaved2, "
            f"{CHUNKED} with one of chunks of the sequence, pp4-{CHUNKED}4, others with none"
        )
    if schedule == CHUNKED:
        return schedule, 1, number
    if schedule in REGISTERED:
        return schedule, REGISTERED[schedule].chunks, 1
    return schedule, 2 if schedule == "zb-v" else number, 1


def _nearest(name: str) -> str | None:
    """The known name whose words are most similar to this one's; None if any word resembles no known word."""
    words = []
    for word, size in re.findall(r"([a-wyz]+)(\d*)", name.lower()):
        near = get_close_matches(word, STEMS, 1)
        if not near:
            return None
        stem = STEMS[near[0]]
        words.append(f"zero{size if size in ('1', '2', '3') else 3}" if stem == "zero" else stem + size)
    return "x".join(words) or None
