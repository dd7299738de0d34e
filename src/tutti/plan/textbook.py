"""Textbook plans by name: `dp`, `tp4`, `zero3`, `dp2xtp2`, `cp4`, `ep4`, `pp4`, `pp2-zb-vxdp2`, ...

| name | axis `dp` | axis `tp` |
|---|---|---|
 dp | splits the batch, replicates parameters | |
 tp | | splits every matrix and computes with the parts, replicates the batch |
 zero1 | as dp; splits the optimizer state; also over `cp` and `ep` | |
 zero2 | as zero1; splits accumulated gradients | |
 zero3 | as zero2; splits parameters and gathers them for use | |

`shard8` (`dp64xzero3xshard8`) makes ZeRO split over 8 neighbouring devices of dp; the groups of 8 replicate each other
(hybrid sharding). The mesh then has an axis `fsdp`, the part of dp that splits state.

`cp4` splits the sequence, dim 1 of the batch, over axis `cp` and replicates parameters. Attention is a ring.

`sp` (`tp8xsp`) makes `tp` split norms and the residual stream along the sequence: a reduce-scatter and an all-gather
around each block instead of all-reduces (Korthikanti et al. 2022). Without it, `tp` does so where it is cheaper. A
sequence, or its part of `cp`, that does not divide over `tp` stays whole.

`ep4` splits the experts over axis `ep`, and everything else along the batch, as `dp` does. With a capacity, one
all-to-all sends the slots to their experts and another returns them. Dropless, tokens travel to the devices that have
their experts and the results back (`ops.experts.experts_exchange`).

`experts8` (`dp4xtp2xexperts8`) spreads the experts over 8 of the devices of dp x tp, whole: an expert is not split by
tp. The mesh then has an axis `ep`, the part of dp that splits experts; ZeRO stages take all of dp for other tensors.

`recompute` (`zero3xrecompute`, `pp4xrecompute`) keeps the activations that a layer passes on and recomputes the others
in the backward pass (`lower.memory.recompute`). `recompute-attention` recomputes only attention, `recompute-silu+mul`
the operators of these names.

`fp32sums` (`dp8xfp32sums`) adds the gradients of microbatches in float32 (`lower.parts.gradient_sums`).

`fp8` (`dp8xfp8`), `mxfp8` or `nvfp4` computes the matrix products of layers in this format
(`lower.variants.low_precision`). `reround` (`dp8xfp8xreround`) rounds weights in every microbatch instead of once a
step (`lower.parts.weight_roundings`).

`splits2` (`tp8xsplits2`) cuts the batch into two copies. One computes while the other communicates
(`lower.variants.unroll`, `analysis.overlap`). `overlap2` (`tp8xoverlap2`) cuts only the operators between two
communications, along the batch or the sequence (`lower.overlap.regions`).

`pp4` makes a pipeline of 4 devices, each of which runs the rest of the plan. A schedule may follow, by default `1f1b`:
`pp4-gpipe`, `pp4-interleaved2` (two stages per device), `pp4-seq1f1b8` (8 chunks of the sequence,
`lower.variants.unroll`). See `plan.pipeline.schedule`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import prod

from tutti.plan.pipeline.schedule import CHUNKED, COUNTED, IN_V, NO_PIPE, REGISTERED, Pipe
from tutti.plan.pipeline.schedule import names as schedules
from tutti.plan.variant import LAYERS, MATMULS, Variant

NAMES = (
    "auto, dp, tp, zero1, zero2, zero3, dp2xtp2, tp2xzero3, cp4, ep4, dp4xtp2xexperts8, pp4, pp2-zb-vxdp2, "
    "zero3xrecompute, tp8xrecompute-attention, zero3xoffload2, tp8xsplits2, tp8xoverlap2, ..."
)
WORDS = (
    "auto", "dp", "tp", "cp", "ep", "pp", "experts", "zero", "recompute", "offload", "splits", "overlap", "fp32sums",
    "sp", "shard", *MATMULS, "reround", "single",
)  # fmt: skip
STEMS = {**{word: word for word in WORDS}, "fsdp": "zero3"}
PART = re.compile(
    r"(?P<axis>dp|tp|cp|ep|pp|experts)(?P<size>\d*)(?:-(?P<schedule>.+))?|zero(?P<zero>[123])"
    r"|recompute(?:-(?P<again>[\w.*?+]+))?|offload(?P<offload>[123]?)|splits(?P<splits>\d+)|overlap(?P<overlap>\d+)"
    r"|shard(?P<shard>\d+)|(?P<sums>fp32sums)|(?P<sp>sp)|(?P<matmul>fp8|mxfp8|nvfp4)"
    r"|(?P<reround>reround)|single"
)
# Operators to recompute may have an x in their names, and mxfp8 has one.
BETWEEN = re.compile(rf"(?<!xm)(?<!^m)x(?={'|'.join(WORDS[1:])})")


@dataclass(frozen=True)
class Textbook:
    """A textbook plan.

    dp, tp, ep, cp: sizes of the axes.
    zero: ZeRO stage (0 to 3) of the axes dp, cp and ep.
    pipe: the pipeline.
    recompute: whether the backward pass recomputes activations.
    offload: what is offloaded (`plan.tier`).
    batch_splits, overlap_chunks, sum_dtype, matmul_dtype, reround: as in `Plan`.
    folded: whether axis `ep` is a part of data parallelism, and experts are split over axes `ep` and `tp`.
    again: what is recomputed (`plan.search.recompute`); by default activations inside layers.
    sp: whether `tp` splits norms and the residual stream along the sequence.
    shard: number of devices of dp over which ZeRO splits; 0 if it splits over all.
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
    folded: bool = False
    again: tuple[str, ...] = ()
    sum_dtype: str = ""
    sp: bool = False
    matmul_dtype: str = ""
    shard: int = 0
    reround: bool = False

    def __str__(self) -> str:
        dp, ep = (self.dp * self.ep, 1) if self.folded else (self.dp, self.ep)
        parts = [str(self.pipe)] if self.pipe.devices > 1 else []
        parts += [f"{axis}{n}" for axis, n in (("dp", dp), ("cp", self.cp), ("ep", ep), ("tp", self.tp)) if n > 1]
        parts += ["sp"] if self.sp else []
        parts += [f"experts{self.ep * self.tp}"] if self.folded else []
        parts += [f"zero{self.zero}"] if self.zero else []
        parts += [f"shard{self.shard}"] if self.shard else []
        parts += ["-".join(("recompute", *(["+".join(self.again)] if self.again else [])))] if self.recompute else []
        parts += [f"offload{self.offload if self.offload > 1 else ''}"] if self.offload else []
        parts += [f"splits{self.batch_splits}"] if self.batch_splits > 1 else []
        parts += [f"overlap{self.overlap_chunks}"] if self.overlap_chunks > 1 else []
        parts += ["fp32sums"] if self.sum_dtype else []
        parts += [word for word, name in MATMULS.items() if name == self.matmul_dtype]
        parts += ["reround"] if self.reround else []
        return "x".join(parts) or "single"

    @property
    def variant(self) -> Variant:
        """The variant of the step that the plan requires."""
        again = (self.again or (LAYERS,)) if self.recompute else ()
        return Variant(self.pipe.sequence_chunks, again, self.batch_splits, self.matmul_dtype)

    @property
    def mesh(self) -> dict[str, int]:
        """The mesh of a pipeline device. Tensor parallelism is the innermost axis, which has the fastest links."""
        shard = self.shard or 1
        axes = (("dp", self.dp // shard), ("fsdp", shard), ("cp", self.cp), ("ep", self.ep), ("tp", self.tp))
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
    book, pipe = Textbook(), ("1f1b", 1, 1)
    for part in BETWEEN.split(name):
        match = PART.fullmatch(part)
        if not match:
            if name.startswith("auto-"):
                raise ValueError(
                    f"no plan {name!r}: a search chose its layouts; save it with --save FILE.json and give that file, "
                    f"or write {name.removeprefix('auto-')!r}, the textbook plan on the same mesh"
                )
            near = _nearest(name)
            hint = f"did you mean {near!r}? W" if near and near != name else "w"
            raise ValueError(f"no plan {name!r}: {hint}rite {NAMES}, or the path of a saved plan, *.json")
        if axis := match["axis"]:
            if axis in sizes:
                raise ValueError(f"plan {name!r} names {axis} twice")
            if match["size"] and not int(match["size"]):
                raise ValueError(f"plan {name!r}: an axis has at least one device")
            sizes[axis] = int(match["size"] or 0)
            if match["schedule"]:
                pipe = _schedule(name, axis, match["schedule"])
        elif match["zero"]:
            book = replace(book, zero=int(match["zero"]))
        elif part.startswith("recompute"):
            book = replace(
                book, recompute=True, again=tuple((match["again"] or "").split("+")) if match["again"] else ()
            )
        elif part.startswith("offload"):
            book = replace(book, offload=int(match["offload"] or 1))
        elif match["matmul"]:
            book = replace(book, matmul_dtype=MATMULS[match["matmul"]])
        elif match["reround"]:
            book = replace(book, reround=True)
        elif match["sp"]:
            book = replace(book, sp=True)
        elif match["shard"]:
            book = replace(book, shard=int(match["shard"]))
        elif match["sums"]:
            book = replace(book, sum_dtype="float32")
        elif match["splits"]:
            book = replace(book, batch_splits=_at_least_2(name, match["splits"], "splits", "copies of the batch"))
        elif match["overlap"]:
            book = replace(book, overlap_chunks=_at_least_2(name, match["overlap"], "overlap", "parts of a region"))
    experts = sizes.pop("experts", None)
    if (book.zero and 0 not in sizes.values()) or experts is not None:
        sizes.setdefault("dp", 0)
    dp, tp, cp, ep, pp = _sizes(name, sizes, devices)
    folded, ep, dp = (experts is not None, *((ep, dp) if experts is None else _folded(name, experts, dp, tp, ep)))
    if book.zero and dp * cp * ep == 1 < devices:
        raise ValueError(f"plan {name!r}: ZeRO splits over dp, cp and ep, which have one device each; leave it out")
    zero = book.zero if dp * cp * ep > 1 else 0
    book = replace(book, dp=dp, tp=tp, cp=cp, ep=ep, folded=folded, pipe=Pipe(pp, *pipe), zero=zero)
    _check(name, book)
    return book


def with_recompute(name: str, devices: int, words: Collection[str] = ()) -> Variant:
    """The variant of a plan, which recomputes what the words say (`plan.search.recompute.chosen`)."""
    book = parse_name(name, devices)
    if words and book.recompute:
        raise ValueError(f"plan {name!r} says what is recomputed: leave out recompute={list(words)}")
    return replace(book.variant, recompute=tuple(words)) if words else book.variant


def refined(mesh: Mapping[str, int]) -> dict[str, int]:
    """A mesh of `dp`, `tp` and `experts` with an axis `ep` in place of `experts`, as the plan of such a name has.

    >>> refined({"dp": 4, "tp": 2, "experts": 4})
    {'dp': 2, 'ep': 2, 'tp': 2}
    """
    if "experts" not in mesh:
        return dict(mesh)
    if other := mesh.keys() - {"dp", "tp", "experts"}:
        raise ValueError(f"mesh {dict(mesh)}: experts are spread over dp x tp; leave out {min(other)}")
    name = "x".join(f"{axis}{n}" for axis, n in mesh.items())
    return parse_name(name, mesh.get("dp", 1) * mesh.get("tp", 1)).mesh


def _at_least_2(name: str, number: str, word: str, what: str) -> int:
    if int(number) < 2:
        raise ValueError(f"plan {name!r}: {word} needs at least 2 {what}")
    return int(number)


def _sizes(name: str, sizes: dict[str, int], devices: int) -> list[int]:
    """The sizes of dp, tp, cp, ep and pp; the open one takes the remaining devices."""
    open_axes, fixed = [axis for axis, size in sizes.items() if size == 0], prod(size or 1 for size in sizes.values())
    if len(open_axes) > 1:
        raise ValueError(f"plan {name!r} leaves the sizes of {' and '.join(open_axes)} open: give all but one")
    if devices % fixed or (not open_axes and fixed != devices):
        several = "device" if fixed == 1 else "devices"
        near = _resized(name, sizes, devices)
        hint = f": say how they are used, as in 'dpx{name}'" if not sizes and name != "single" else (
            f"; the nearest is {near!r}" if near else "")  # fmt: skip
        raise ValueError(
            f"plan {name!r} needs {'a multiple of ' if open_axes else ''}{fixed} {several}, not {devices}{hint}"
        )
    rest = dict.fromkeys(open_axes, devices // fixed)
    return [{**sizes, **rest}.get(axis, 1) for axis in ("dp", "tp", "cp", "ep", "pp")]


def _resized(name: str, sizes: Mapping[str, int], devices: int) -> str | None:
    """The plan of a name with sizes that fill this number of devices: tensor parallelism stays as large as possible,
    data parallelism takes the rest."""
    fitting, left = {}, devices
    for axis in ("tp", "cp", "ep", "pp"):
        fitting[axis] = max(n for n in range(1, max(1, sizes.get(axis, 1)) + 1) if left % n == 0)
        left //= fitting[axis]
    fitting["dp"] = left
    parts = []
    for part in BETWEEN.split(name):
        match = PART.fullmatch(part)
        assert match
        useless = (match["sp"] and fitting["tp"] == 1) or (match["zero"] and devices == fitting["tp"] * fitting["pp"])
        if (axis := match["axis"]) in fitting:
            if fitting[axis] > 1:
                parts.append(f"{axis}{fitting[axis]}" + (f"-{match['schedule']}" if match["schedule"] else ""))
        elif not useless:
            parts.append(part)
    if "dp" not in sizes and left > 1:
        parts.insert(1 if fitting["pp"] > 1 and parts[0].startswith("pp") else 0, f"dp{left}")
    try:
        return str(parse_name("x".join(parts) or "single", devices))
    except ValueError:
        return None


def _folded(name: str, experts: int, dp: int, tp: int, ep: int) -> tuple[int, int]:
    """(ep, dp) if experts are spread over this many of dp x tp devices, or over all of them if 0."""
    experts = experts or dp * tp
    if ep > 1:
        raise ValueError(f"plan {name!r}: experts are spread over ep, or over experts of dp x tp, not both")
    if experts % tp or dp % (experts // tp):
        fitting = ", ".join(f"experts{tp * n}" for n in range(1, dp + 1) if dp % n == 0)
        raise ValueError(f"plan {name!r}: experts over {experts} of {dp} x {tp} devices; possible are {fitting}")
    return experts // tp, dp // (experts // tp)


def _check(name: str, book: Textbook) -> None:
    """Raise ValueError for what cannot be combined."""
    if book.shard and (not book.zero or book.dp % book.shard or not 1 < book.shard < book.dp):
        possible = [f"shard{n}" for n in range(2, book.dp) if book.dp % n == 0]
        why = f"possible are {', '.join(possible)}" if book.zero and possible else "it goes with zero1, zero2 or zero3"
        raise ValueError(f"plan {name!r}: shard{book.shard} of {book.dp} data-parallel devices; {why}")
    if book.reround and not book.matmul_dtype:
        raise ValueError(f"plan {name!r}: reround goes with products in low precision; add fp8, mxfp8 or nvfp4")
    if book.sp and book.tp == 1:
        raise ValueError(f"plan {name!r}: sp splits the sequence over tp; add tp2 or more")
    if book.pipe.sequence_chunks > 1 and book.batch_splits > 1:
        raise ValueError(f"plan {name!r}: the sequence is cut into chunks or the batch into copies, not both")
    if book.overlap_chunks > 1 and (book.pipe.devices > 1 or book.batch_splits > 1 or book.offload):
        other = "a pipeline" if book.pipe.devices > 1 else "copies" if book.batch_splits > 1 else "offload"
        raise ValueError(f"plan {name!r}: overlap cannot be combined with {other}; leave one of them out")
    if book.pipe.sequence_chunks > 1 and book.pipe.devices < 2:
        raise ValueError(f"plan {name!r}: chunks of the sequence need a pipeline of at least 2 devices")


def _schedule(name: str, axis: str, said: str) -> tuple[str, int, int]:
    """The schedule of a pipeline, its stages per device, and its chunks of the sequence."""
    match = re.fullmatch(rf"({'|'.join(schedules())})(\d*)", said)
    if axis != "pp":
        raise ValueError(f"plan {name!r}: {axis} has no schedule; pp has")
    if not match:
        raise ValueError(f"plan {name!r}: no schedule {said!r} of pp; pp has {', '.join(schedules())}")
    schedule, number = match[1], int(match[2] or 1)
    counted, needed = schedule in COUNTED, schedule in (CHUNKED, "interleaved")
    if (match[2] and not counted) or (needed and not match[2]) or number < (2 if schedule == CHUNKED else 1):
        raise ValueError(
            f"plan {name!r}: interleaved and auto go with a number of stages on each device, pp4-interleaved2, "
            f"{CHUNKED} with one of chunks of the sequence, pp4-{CHUNKED}4, others with none"
        )
    if schedule == CHUNKED:
        return schedule, 1, number
    if schedule in REGISTERED:
        return schedule, REGISTERED[schedule].chunks, 1
    return schedule, 2 if schedule in IN_V else number, 1


def _nearest(name: str) -> str | None:
    """The known name whose words are most similar to this one's; None if any word resembles no known word."""
    words = []
    for word, size in re.findall(r"([a-wyz]+)(\d*)", name.lower()):
        near = get_close_matches(word, STEMS, 1)
        if not near:
            return None
        stem = STEMS[near[0]]
        sized = stem + size
        words.append(sized if PART.fullmatch(sized) else "zero3" if stem == "zero" else stem)
    return "x".join(words) or None
