"""Every use of torch's private API, in one place, so that a torch release is checked by reading one file.

Tested on torch 2.11 and 2.13.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch._decomp.decompositions import native_batch_norm_decomposition
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

# Operators that write into an argument though their schema denies it, as ones that admit it.
HONEST = {torch.ops.aten.native_batch_norm.default: native_batch_norm_decomposition}

# Raised where tracing would need the values of a tensor: for a Python number, or for a shape.
ValuesNeeded = (DataDependentOutputException, DynamicOutputShapeException)

# 2.13 renames these and warns of the old names, 2.11 has only them.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_grouped = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm  # pyright: ignore


def grouped_mm(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Products of groups of rows of `a` with the matrices of `b`; where `b` is one matrix, of groups of columns of `a`
    with groups of its rows. ends: where each group ends, int32."""
    return _grouped(a, b, offs=ends)


def fake_mode() -> FakeTensorMode:
    """A mode in which tensors have shapes and dtypes but no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def trace(function: Callable, *args) -> fx.GraphModule:
    """The ATen graph of `function(*args)`, autograd included."""
    return make_fx(function, decomposition_table=HONEST)(*args)


def graph_being_traced() -> fx.Graph:
    """The graph that the enclosing `trace` is filling."""
    mode = get_proxy_mode()
    assert mode is not None, "called outside of trace()"
    return mode.tracer.graph  # pyright: ignore[reportAttributeAccessIssue]


def autograd_clock() -> int:
    """The sequence number that the next autograd node will get."""
    return torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]


def born_at(grad_fn) -> int:
    """The sequence number that `grad_fn` got when the forward pass made it."""
    return grad_fn._sequence_nr()


def in_backward_order(root) -> list:
    """All autograd nodes that the backward pass from `root` can reach, each once."""
    seen, stack = {root}, [root]
    while stack:
        for parent, _ in stack.pop().next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                stack.append(parent)
    return list(seen)


def operators(namespace: str) -> list:
    """The overloads of all operators of a namespace that torch knows of."""
    found = []
    for qualified in torch._C._dispatch_get_all_op_names():
        space, _, rest = qualified.partition("::")
        name, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, space), name, None) if space == namespace else None
        if packet is not None and (overload or "default") in packet.overloads():
            found.append(getattr(packet, overload or "default"))
    return found


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning-rate schedulers that the optimizer has made its step, so that they do not warn."""
    optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]


def get_compiler_ready() -> None:
    """Let Inductor find out in the background which vector instructions there are: it compiles and runs small programs
    for that, which takes seconds."""
    from torch._inductor import codecache, cpu_vec_isa  # noqa: F401  (slow to import, and not by two threads)

    if not _processor:
        _processor.append(threading.Thread(target=cpu_vec_isa.pick_vec_isa, name="tutti compiler", daemon=True))
        _processor[0].start()


_processor: list[threading.Thread] = []


def compile_graph(graph: fx.Graph, args: Sequence[torch.Tensor]) -> Callable:
    """A function compiled by Inductor from a functional ATen graph without gradients, for arguments that have the
    shapes, dtypes, strides and devices of these. What is compiled is kept in torch's cache on disk."""
    from torch._inductor.compile_fx import compile_fx  # slow to import

    get_compiler_ready()
    _processor[0].join()
    fake = FakeTensorMode(shape_env=ShapeEnv(specialize_zero_one=True))  # without one nothing is kept on disk
    with torch.no_grad(), tracing(TracingContext(fake)):
        return compile_fx(fx.GraphModule({}, graph), [fake.from_tensor(x, static_shapes=True) for x in args])  # pyright: ignore


def job_store(prefix: str) -> Any:
    """A connection of one's own to the store of this job: threads of one process do not wait for each other there."""
    return dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store().clone())  # pyright: ignore


def pin(memory: torch.Tensor) -> None:
    """Lock memory of the host, so that a GPU copies from and to it by itself, for as long as this tensor lives.

    torch's own pinned memory comes in powers of two, of which up to a half is wasted. RuntimeError where the system
    does not let it.
    """
    cuda: Any = torch.cuda.cudart()
    place = memory.data_ptr()
    error = cuda.cudaHostRegister(place, memory.nbytes, 0)
    if int(error):
        raise RuntimeError(f"{memory.nbytes} bytes of host memory cannot be pinned (CUDA error {int(error)}): "
                           "keep less on tier host, or raise the limit of locked memory (ulimit -l)")  # fmt: skip
    weakref.finalize(memory, cuda.cudaHostUnregister, place).atexit = False
