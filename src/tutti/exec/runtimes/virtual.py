"""All ranks of a mesh in one process, in lockstep. Collectives work on lists of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tutti.exec.kernels.codegen import Request, Run, Wait
from tutti.launch.heartbeat import HEARTBEAT
from tutti.lower.collectives import bounds_of, parse_ppermute, peer
from tutti.plan.layouts.layout import Mesh, group_over

COMBINE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda stacked: stacked.sum(0, dtype=stacked.dtype),  # torch would widen integers
    "avg": lambda stacked: stacked.mean(0),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
}


def run_virtual(runs: Sequence[Run], inputs: Sequence[Sequence[torch.Tensor]], mesh: Mesh) -> list[tuple]:
    """The outputs of every rank. runs, inputs: by rank."""
    ranks = range(len(runs))
    programs = [run(*values) for run, values in zip(runs, inputs, strict=True)]
    answers: list = [None] * len(runs)
    results: list = [None] * len(runs)
    while True:
        HEARTBEAT.moves += 1
        requests, ended = [], 0
        for rank in ranks:
            try:
                requests.append(programs[rank].send(answers[rank]))
            except StopIteration as stop:
                results[rank], ended = stop.value, ended + 1
        if ended:
            assert ended == len(runs), "ranks disagree on the number of collectives"
            return results
        answers = answer(requests, mesh)


def answer(requests: Sequence[Request | Wait], mesh: Mesh) -> list[torch.Tensor]:
    """The answer to each rank. A collective completes when it starts; `Wait` returns its result."""
    asking = [r for r in requests if isinstance(r, Request)]
    assert len(asking) in (0, len(requests)), "some ranks start a collective while others wait for one"
    return exchange(asking, mesh) if asking else [r.begun for r in requests if isinstance(r, Wait)]


def exchange(requests: Sequence[Request], mesh: Mesh) -> list[torch.Tensor]:
    """The result of a collective on each rank."""
    assert len({r[:3] for r in requests}) == 1, f"ranks disagree: {[r[:3] for r in requests]}"
    kind, axis, op = requests[0][:3]
    if kind == "ppermute":
        return _ppermute([r.tensor for r in requests], axis, op, mesh)
    answers: list = [None] * len(requests)
    for rank in range(len(requests)):
        group = group_over(rank, axis.split(), mesh)
        if rank == group[0]:
            if kind == "exchange":
                received = _exchanged([requests[r] for r in group])
            else:
                received = _collective(requests[rank], [requests[r].tensor for r in group])
            for member, tensor in zip(group, received, strict=True):
                answers[member] = tensor
    return answers


def _ppermute(tensors: list[torch.Tensor], axes: str, how: str, mesh: Mesh) -> list[torch.Tensor]:
    by, edge = parse_ppermute(how)
    senders = [peer(rank, axes, -by, edge is None, mesh) for rank in range(len(tensors))]
    return [
        torch.full_like(x, edge) if sender is None else tensors[sender].clone()  # pyright: ignore[reportArgumentType]
        for x, sender in zip(tensors, senders, strict=True)
    ]


def _exchanged(requests: Sequence[Request]) -> list[torch.Tensor]:
    """The rows that each member receives. Raises RuntimeError if members disagree on their number."""
    rows = [r.rows for r in requests if r.rows is not None]
    sends = [bounds_of(s, len(r.tensor)) for r, (s, _, _) in zip(requests, rows, strict=True)]
    parts = [r.tensor[: sum(n)].split(n) for r, n in zip(requests, sends, strict=True)]
    answers = []
    for i, (_, receives, count) in enumerate(rows):
        if bounds_of(receives, count) != (received := [n[i] for n in sends]):
            raise RuntimeError(
                f"member {i} of an exchange expects {receives.tolist()} rows, the others send {received}"
            )
        out = requests[i].tensor.new_zeros((count, *requests[i].tensor.shape[1:]))
        torch.cat([p[i] for p in parts], out=out[: sum(received)])
        answers.append(out)
    return answers


def _collective(request: Request, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The result of each member, in separate memory, because a Program may write into it."""
    stacked = torch.stack(tensors)  # (member, ...)
    match request.kind:
        case "all_reduce":
            total = COMBINE[request.op](stacked)
            return [total.clone() for _ in tensors]
        case "all_gather":
            return [stacked.clone() for _ in tensors]
        case "reduce_scatter":
            return list(COMBINE[request.op](stacked).unbind(0))
        case "all_to_all":
            return [stacked[:, i].clone() for i in range(len(tensors))]
    raise ValueError(f"unknown collective {request.kind!r}")
