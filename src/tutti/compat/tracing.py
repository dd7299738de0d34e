"""Fake tensors, decompositions, dispatch modes and checkpointed regions."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._decomp.decompositions import native_batch_norm_decomposition
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import get_proxy_mode as get_proxy_mode
from torch.nested._internal import nested_tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, autograd_would_have_decomposed

# Operators whose schema hides that they write an argument -> variants that declare it.
HONEST = {torch.ops.aten.native_batch_norm.default: native_batch_norm_decomposition}

# Raised if tracing needs the values of a tensor, for a Python number or a shape.
ValuesNeeded = (DataDependentOutputException, DynamicOutputShapeException)


_grouped = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm  # pyright: ignore


def grouped_mm(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Products of groups of rows of `a` with the matrices of `b`, or, if `b` is one matrix, of groups of columns of `a`
    with groups of its rows. ends: the end of each group, int32."""
    return _grouped(a, b, offs=ends)


@contextmanager
def fake_mode() -> Iterator[FakeTensorMode]:
    """A mode in which tensors have shapes and dtypes but no memory. torch does not log the errors of operators: they
    are raised."""
    log = logging.getLogger(FakeTensorMode.__module__)
    before, log.disabled = log.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        log.disabled = before


def decomposition(operator: Any, args: Sequence) -> Callable | None:
    """The decomposition that autograd would use, or None. In inference mode autograd is not asked."""
    if operator not in _composed:
        _composed[operator] = operator._can_decompose()
    composed = _composed[operator] and autograd_would_have_decomposed(operator, pytree.tree_leaves(args))
    return operator.decompose if composed else None


_composed: dict[Any, bool] = {}


@contextmanager
def computing_really() -> Iterator[None]:
    """Compute on real tensors, without gradients or casts, even while fake tensors are traced."""
    with _disable_current_modes(), torch.no_grad(), torch._C._DisableAutocast():  # pyright: ignore
        yield


@contextmanager
def apart() -> Iterator[None]:
    """The enclosing fake tensor mode, without the trace in progress."""
    mode = detect_fake_mode()
    assert mode is not None, "called outside of fake tensors"
    with _disable_current_modes(), mode:
        yield


def of_packed_sequences(name: str) -> Callable:
    """The function that `torch.nn.utils.rnn` calls."""
    return getattr(torch._C._VariableFunctions, name)  # pyright: ignore[reportAttributeAccessIssue]


def without_subclasses() -> Any:
    """Treat subclasses of tensors as plain tensors."""
    return torch._C.DisableTorchFunctionSubclass()  # pyright: ignore[reportPrivateImportUsage]


def without_function_modes() -> Any:
    """Call functions of torch directly, ignoring function modes."""
    return torch._C.DisableTorchFunction()  # pyright: ignore[reportPrivateImportUsage]


@contextmanager
def eager_models() -> Iterator[None]:
    """Models and functions under `torch.compile` run as plain Python."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def checkpoint_regions(enter: Callable[[], None], leave: Callable[[], None]) -> Iterator[None]:
    """Make `torch.utils.checkpoint` run its functions once, between `enter` and `leave`, without recomputation."""
    import torch.utils.checkpoint as checkpoint

    def without_reentrance(*args: Any, **kwargs: Any) -> Iterator[None]:
        enter()
        try:
            yield
        finally:
            leave()

    class Reentrant:
        @staticmethod
        def apply(function: Callable, preserve_rng_state: bool, *args: Any) -> Any:
            enter()
            try:
                return function(*args)
            finally:
                leave()

    before = checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction
    checkpoint._checkpoint_without_reentrant_generator = without_reentrance  # pyright: ignore
    checkpoint.CheckpointFunction = Reentrant  # pyright: ignore
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction = before


@contextmanager
def no_nested_tensors() -> Iterator[None]:
    """Raise ValueError where code makes a nested tensor, within the block: fake ones need symbolic shapes."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            "the model makes a nested tensor, but tensors of a step are dense: use padded tensors and a mask"
        )

    before = nested_tensor.get_tensor_symint
    nested_tensor.get_tensor_symint = refuse
    try:
        yield
    finally:
        nested_tensor.get_tensor_symint = before


def operators(namespace: str) -> list:
    """The overloads of all registered operators of a namespace."""
    overloads = []
    for qualified in torch._C._dispatch_get_all_op_names():
        space, _, rest = qualified.partition("::")
        name, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, space), name, None) if space == namespace else None
        if packet is not None and (overload or "default") in packet.overloads():
            overloads.append(getattr(packet, overload or "default"))
    return overloads
