"""Runtimes execute Programs and their collectives on the ranks of this process: all ranks (virtual), or one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from datetime import timedelta
from functools import cache, cached_property
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from tutti.compat import all_gather_single, reduce_scatter_single
from tutti.exec.kernels.codegen import Request, Run, Wait
from tutti.exec.runtimes.underway import UnderWay
from tutti.exec.runtimes.virtual import COMBINE, run_virtual
from tutti.hardware import Cluster, local, machine
from tutti.ir.kind import NUMBERS, kind_of
from tutti.ir.spec import Spec
from tutti.launch import watchdog
from tutti.launch.heartbeat import HEARTBEAT
from tutti.lower.collectives import bounds_of, parse_ppermute, peer
from tutti.plan.layouts.layout import Layout, Mesh, coordinates_of, devices, group_of, group_over
from tutti.plan.plan import PIPELINE

OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
TIMEOUT = timedelta(hours=2)  # of collectives: longer than ranks compile or write, and than a watchdog waits
UNREDUCED = {"all_reduce": "all_gather", "reduce_scatter": "all_to_all"}  # the same ways, without the reduction


_alone: ContextVar[bool] = ContextVar("alone", default=False)


@contextmanager
def alone() -> Iterator[None]:
    """Plan and run functions within the block as a process that is in no job: other ranks run other functions."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def in_group() -> bool:
    """Whether this process plans and runs together with others."""
    return dist.is_initialized() and dist.get_world_size() > 1 and not _alone.get()


def same_everywhere(tensor: torch.Tensor) -> torch.Tensor:
    """Rank 0's tensor on every rank of a job. Ranks with different seeds would otherwise train different models."""
    if in_group():
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        with HEARTBEAT.within("broadcast", "the model"):
            dist.broadcast(tensor, 0)
    return tensor


def from_rank_0(make: Callable[[], Any]) -> Any:
    """The result of rank 0 on every rank of a job. Its error is raised on every rank, as RuntimeError if it is neither
    ValueError nor OSError."""
    if not in_group():
        return make()
    box: list = [None]
    if dist.get_rank() == 0:
        try:
            with HEARTBEAT.working("plans"):
                box[0] = make()
        except (ValueError, OSError) as error:
            box[0] = error
        except Exception as error:  # it may hold what cannot be sent
            box[0] = RuntimeError(f"{type(error).__name__}: {error}")
    with HEARTBEAT.within("broadcast", "the plan"):
        dist.broadcast_object_list(box)
    if isinstance(box[0], Exception):
        raise box[0]
    return box[0]


def gathered(value: Any, what: str) -> list[Any]:
    """The values of all ranks of a job, on all ranks, which call this together. what: they are, for the watchdog."""
    if not in_group():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    with HEARTBEAT.within("all_gather", what):
        dist.all_gather_object(values, value)
    return values


def true_everywhere(value: bool) -> bool:
    """Whether a value is true on all ranks of a job, which call this together."""
    return all(gathered(value, "whether all ranks have compiled"))


def check_same_everywhere(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError on every rank if the ranks of a job hold different tensors."""
    if not in_group():
        return
    digests = {key: _digest(tensor) for key, tensor in tensors.items()}
    everywhere = gathered(digests, "the first batch's checksums")
    for rank, theirs in enumerate(everywhere):
        if differing := [key for key in digests if theirs.get(key) != everywhere[0].get(key)]:
            raise ValueError(
                f"batch entry {differing[0]!r} differs between ranks 0 and {rank}: every rank passes the global batch, "
                "and Tutti takes the rank's part. Use equal seeds and data on all ranks (no DistributedSampler)"
            )


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha1(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def _reduces(group: dist.ProcessGroup, x: torch.Tensor, op: str) -> bool:
    """Whether the backend can reduce such tensors. Gloo has no bool and int16, and its max and min ignore NaN."""
    if dist.get_backend(group) != "gloo":
        return True
    return x.dtype not in (torch.bool, torch.int16) and (op not in ("max", "min") or not x.is_floating_point())


def raw(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor: backends send bytes of any dtype."""
    return x.view(-1).view(torch.uint8)


class Virtual:
    """All ranks of the mesh in this process, in lockstep."""

    def __init__(self, mesh: Mesh):
        self.mesh, self.rank, self.ranks = mesh, 0, list(range(devices(mesh)))

    def run(self, runs: Sequence[Run], inputs: Sequence[Sequence[torch.Tensor]]) -> list[tuple]:
        """The outputs of each local rank."""
        return run_virtual(runs, inputs, self.mesh)

    def agree(self, said: Sequence[str]) -> bool:
        """Whether all ranks of the mesh pass the same texts."""
        return len(set(said)) == 1

    def whole(self, parts: Sequence[torch.Tensor], layout: Layout, spec: Spec) -> torch.Tensor:
        """The full tensor from the parts of the local ranks, on the CPU."""
        return layout.assemble([p.cpu() for p in parts], spec.shape, self.mesh)

    def of_rank(self, rank: int, part: torch.Tensor | None, spec: Spec) -> torch.Tensor:
        """A rank's part of a tensor, on the CPU. part: given on the rank that has it. spec: shape and dtype of it."""
        assert part is not None
        return part.cpu()


class Distributed:
    """One rank of a `torch.distributed` job."""

    def __init__(self, mesh: Mesh):
        self.mesh, self.rank = mesh, dist.get_rank()
        self.ranks = [self.rank]
        with HEARTBEAT.within("new_group", "the mesh"):
            self.groups = {axis: self._group(axis) for axis, size in mesh.items() if size > 1}
            self.readers = _group_of_readers(dist.group.WORLD) if self.groups else None
        HEARTBEAT.place(self.rank, mesh)

    @cached_property
    def device(self) -> torch.device:
        """The device of tensors that the backend sends."""
        nccl = dist.get_backend() == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    @cached_property
    def directions(self) -> dict[bool, Any]:
        """Groups of all ranks, for messages up and down a pipeline. All ranks create them together."""
        return {up: dist.new_group(timeout=TIMEOUT) for up in (True, False)}

    def _group(self, axis: str) -> dist.ProcessGroup:
        """This rank's group along an axis. Every rank creates all groups in the same order, as torch requires."""
        if self.mesh[axis] == dist.get_world_size():
            return dist.group.WORLD  # pyright: ignore[reportReturnType]
        members = {tuple(group_of(rank, axis, self.mesh)): None for rank in range(devices(self.mesh))}
        groups = {group: dist.new_group(list(group), TIMEOUT) for group in members}
        return groups[tuple(group_of(self.rank, axis, self.mesh))]  # pyright: ignore[reportReturnType]

    def run(self, runs: Sequence[Run], inputs: Sequence[Sequence[torch.Tensor]]) -> list[tuple]:
        program, answer = runs[0](*inputs[0]), None
        try:
            while True:
                answer = self.carry_out(program.send(answer))  # pyright: ignore[reportArgumentType]
        except StopIteration as stop:
            return [stop.value]

    def agree(self, said: Sequence[str]) -> bool:
        agreed = True
        for axis, group in self.groups.items():  # one axis after the other, so that the result covers the mesh
            if axis == PIPELINE:  # its devices run different Programs
                continue
            gathered: list = [None] * group.size()
            with HEARTBEAT.within("all_gather", f"the order of operators over {axis}"):
                dist.all_gather_object(gathered, (agreed, *said), group)
            agreed = all(gathered) and len(set(gathered)) == 1 and gathered[0][0]
        return agreed

    def carry_out(self, request: Request | Wait) -> torch.Tensor | UnderWay:
        """This rank's result of a collective, or a handle if the program waits later."""
        meeting = (request.begun if isinstance(request, Wait) else request).meeting
        HEARTBEAT.enter(meeting)
        if isinstance(request, Wait):
            answer = request.begun.over()
        else:
            begun = self.begin(request)
            begun.meeting = meeting
            answer = begun.over() if request.waits else begun
        HEARTBEAT.leave()
        return answer

    def begin(self, request: Request) -> UnderWay:
        """Start a collective. The handle keeps the tensors alive that the backend reads and writes."""
        if request.kind == "ppermute":
            return self._ppermute(request.tensor, request.axis, request.op)
        if request.kind == "exchange":
            return self._exchange(request)
        group, k = self.groups.get(request.axis), self.mesh[request.axis]
        x = request.tensor.contiguous()
        op, scale = OPS.get(request.op, dist.ReduceOp.SUM), 1 / k if request.op == "avg" else None
        finish = None if scale is None else lambda out: out.mul_(scale)
        if request.kind in UNREDUCED and group is not None and not _reduces(group, x, request.op):
            begun = self.begin(request._replace(kind=UNREDUCED[request.kind]))
            return replace(begun, finish=COMBINE[request.op])
        match request.kind:
            case _ if group is None:  # an axis of one rank
                out = x.unsqueeze(0) if request.kind == "all_gather" else x
                return UnderWay((), x.squeeze(0) if request.kind == "reduce_scatter" else out, x)
            case "all_reduce":
                out = x.clone() if x is request.tensor else x
                x, work = out, dist.all_reduce(out, op, group, async_op=True)
            case "all_gather":
                out = x.new_empty((k, *x.shape))
                work = all_gather_single(raw(out), raw(x), group, async_op=True)
            case "reduce_scatter":
                out = x.new_empty(x.shape[1:])
                work = reduce_scatter_single(out.view(-1), x.view(-1), op, group, async_op=True)
            case "all_to_all":
                out = torch.empty_like(x)
                work = dist.all_to_all_single(raw(out), raw(x), group=group, async_op=True)
            case kind:
                raise ValueError(f"unknown collective {kind!r}")
        return UnderWay((work,), out, x, finish)

    def _ppermute(self, x: torch.Tensor, axes: str, how: str) -> UnderWay:
        """Point-to-point sends and receives, started together; needs no process group."""
        by, edge = parse_ppermute(how)
        source, target = (peer(self.rank, axes, step, edge is None, self.mesh) for step in (-by, by))
        x = x.contiguous()
        out = torch.empty_like(x) if source is not None else torch.full_like(x, edge)  # pyright: ignore
        if source == self.rank:
            return UnderWay((), out.copy_(x), x)
        sends = [] if target is None else [dist.P2POp(dist.isend, raw(x), target)]
        receives = [] if source is None else [dist.P2POp(dist.irecv, raw(out), source)]
        return UnderWay(dist.batch_isend_irecv(sends + receives) if sends or receives else (), out, x)

    def _exchange(self, request: Request) -> UnderWay:
        """Messages of as many rows as there are for each rank, started together; needs no process group."""
        assert request.rows is not None
        *counts, size = request.rows
        x = request.tensor.contiguous()
        sends, receives = (bounds_of(c, n) for c, n in zip(counts, (len(x), size), strict=True))
        out = x.new_zeros((size, *x.shape[1:]))
        messages = []
        sent, taken = x[: sum(sends)].split(sends), out[: sum(receives)].split(receives)
        for peer_, a, b in zip(group_over(self.rank, request.axis.split(), self.mesh), sent, taken, strict=True):
            if peer_ == self.rank:
                b.copy_(a)
                continue
            messages += [dist.P2POp(dist.isend, raw(a), peer_)] if len(a) else []
            messages += [dist.P2POp(dist.irecv, raw(b), peer_)] if len(b) else []
        return UnderWay(dist.batch_isend_irecv(messages) if messages else (), out, x)

    def whole(self, parts: Sequence[torch.Tensor], layout: Layout, spec: Spec) -> torch.Tensor:
        if layout == Layout():
            return parts[0].to("cpu", copy=True)  # the next step writes into the part
        ranks = range(devices(self.mesh))
        shapes = [layout.local_shape(spec.shape, self.mesh, coordinates_of(rank, self.mesh)) for rank in ranks]
        own = torch.zeros(max(map(prod, shapes)), dtype=spec.dtype, device=self.device)
        own[: parts[0].numel()] = parts[0].reshape(-1)
        world = [torch.empty_like(own) for _ in ranks]
        with HEARTBEAT.within("all_gather", "what all ranks hold of a tensor"):
            dist.all_gather(world, own, self.readers)
        blocks = [x[: prod(shape)].view(shape).cpu() for x, shape in zip(world, shapes, strict=True)]
        return layout.assemble(blocks, spec.shape, self.mesh)

    def of_rank(self, rank: int, part: torch.Tensor | None, spec: Spec) -> torch.Tensor:
        x = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
        if part is not None:
            x.copy_(part)
        with HEARTBEAT.within("broadcast", f"what rank {rank} holds of a tensor"):
            dist.broadcast(raw(x), rank, self.readers)
        return x.cpu()


@cache
def _group_of_readers(world: Any) -> Any:
    """All ranks, for reads of stored tensors. A rank that reads alone waits: it meets no collective of a step."""
    return dist.new_group(timeout=TIMEOUT)


Runtime = Virtual | Distributed


def in_job() -> bool:
    """Whether this process was started as one rank of several (torchrun, `tutti run`, ...)."""
    return dist.is_initialized() or ("RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1)


def join_job(device: torch.device) -> int:
    """Initialize torch.distributed from the environment, once. Returns the number of processes."""
    if not dist.is_initialized():
        place, beside = (int(os.environ.get(name, "0")) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        if device.type == "cuda":
            torch.cuda.set_device(place)
        elif beside:
            machine.keep_to_own_cores(place, beside, torch.get_num_threads())
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    watchdog.watch_as_asked()
    return dist.get_world_size()


def cluster_of(cluster: Cluster | str, device: torch.device) -> Cluster:
    """The cluster for a description, a name, or "auto": the processes of this job, or one device."""
    if in_job():
        processes = join_job(device)
        if isinstance(cluster, str) and cluster == "auto":
            box = [local(processes, device.type).to_json() if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(box)
            return Cluster.from_json(box[0])  # pyright: ignore[reportArgumentType]
    if isinstance(cluster, Cluster):
        return cluster
    if not isinstance(cluster, str):
        raise ValueError(f"cluster is {cluster!r}; it may be 'auto', a name such as 'cpu:4', or a tutti.Cluster")
    return local(1, device.type) if cluster == "auto" else Cluster.parse(cluster)


def runtime_for(mesh: Mesh) -> Runtime:
    """A distributed runtime if this process is one rank of a job of the mesh's size, else a virtual one."""
    return Distributed(mesh) if in_group() and dist.get_world_size() == devices(mesh) else Virtual(mesh)


def own_part(
    name: str, whole: torch.Tensor, layout: Layout, mesh: Mesh, rank: int, device: torch.device
) -> torch.Tensor:
    """A rank's part of an input that every rank is given in full. Single numbers stay on their device."""
    if kind_of(name) in NUMBERS:
        return whole
    return layout.local_slice(whole, mesh, coordinates_of(rank, mesh)).to(device, non_blocking=True)


def own_slice(whole: torch.Tensor, layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    """A rank's part of a tensor, in separate memory."""
    return layout.local_slice(whole, mesh, coordinates_of(rank, mesh)).clone(memory_format=torch.contiguous_format)
