"""Remote tensors: the user's tensors whose values lie elsewhere, and hold no memory of their own.

A remote tensor is the same Python object as before, with its shape, dtype and device. Its class is a subclass of its
own class, which any function of torch that needs more than these fetches first: the class becomes its own again, and
the tensor an ordinary one, until its home takes it back.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tutti import compat


class Home(Protocol):
    """The storage of the values of remote tensors."""

    def fetched(self, name: str, tensor: Tensor) -> Tensor:
        """Return a copy of the full value of a tensor, on its device. The home records that it is in use."""
        ...


class Remote:
    """Methods of remote tensors. The attribute `_home` has their home, their name there and their strides."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in WITHOUT_VALUES:
            for x in pytree.tree_leaves((args, kwargs)):
                if isinstance(x, Remote):
                    fetch(x)  # pyright: ignore[reportArgumentType]
        with compat.without_subclasses():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(fetch(self), memo)  # pyright: ignore[reportArgumentType]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return fetch(self).__reduce_ex__(protocol)  # pyright: ignore[reportArgumentType]


def _getters(*names: str) -> Iterator[Any]:
    return (getattr(Tensor, name).__get__ for name in names)


WITHOUT_VALUES = frozenset((
    *_getters("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn", "output_nr",
              "itemsize", "nbytes", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized",
              "is_nested", "is_mkldnn", "is_xpu", "is_mps", "_version", "_backward_hooks", "_base",
              "_post_accumulate_grad_hooks"),
    *(getattr(Tensor, name).__set__ for name in ("requires_grad", "grad", "_backward_hooks")),
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.element_size,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.is_signed, Tensor.get_device, Tensor.requires_grad_,
    Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad, Tensor.is_inference,
    torch.is_floating_point, torch.is_complex, torch.numel, torch.is_inference,
))  # fmt: skip


@cache
def _remote(own: type) -> type:
    """The subclass of a class of tensors whose instances are remote."""
    return type(own)(f"Remote{own.__name__}", (Remote, own), {"__slots__": (), "__module__": own.__module__})


def make_remote(x: Tensor, home: Home, name: str) -> None:
    """Free the memory of a tensor. Its value is now that of `name` at a home."""
    strides = strides_of(x)
    x.__class__ = type(x) if isinstance(x, Remote) else _remote(type(x))
    vars(x)["_home"] = home, name, strides
    _set(x, _placeholder(x))


def home_of(x: Tensor) -> Home | None:
    """The home of a remote tensor; None for any other."""
    return vars(x)["_home"][0] if isinstance(x, Remote) else None


def fetch(x: Tensor) -> Tensor:
    """Make a remote tensor an ordinary one with its value. Returns it."""
    if isinstance(x, Remote):
        home, name, strides = vars(x)["_home"]
        with compat.computing_really(), compat.without_function_modes():
            value = home.fetched(name, x)
            if value.stride() != strides:
                value = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)
            make_ordinary(x, value)
    return x


def make_ordinary(x: Tensor, value: Tensor) -> None:
    """Give a remote tensor the memory of a value."""
    x.__class__ = type(x).__mro__[2]
    del vars(x)["_home"]
    x.data = value


@contextmanager
def shaped(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Turn remote tensors into ordinary ones without values within the block, so that capture sees their strides."""
    remote = [(x, type(x), *vars(x)["_home"]) for x in tensors if isinstance(x, Remote)]
    for x, kind, _, _, strides in remote:
        x.__class__ = kind.__mro__[2]
        x.data = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
    try:
        yield
    finally:
        for x, kind, home, name, strides in remote:
            x.__class__ = kind
            vars(x)["_home"] = home, name, strides
            _set(x, _placeholder(x))


def _placeholder(x: Tensor) -> Tensor:
    """One element in place of all, NaN or zero."""
    value = float("nan") if x.dtype.is_floating_point or x.dtype.is_complex else 0
    with compat.without_subclasses():
        return torch.full((), value, dtype=x.dtype, device=x.device).expand(x.shape)


def _set(x: Tensor, value: Tensor) -> None:
    with compat.without_subclasses():
        x.data = value


def strides_of(x: Tensor) -> tuple[int, ...]:
    """The strides that a tensor has when it is ordinary. An expanded one gets memory for all elements."""
    if isinstance(x, Remote):
        return vars(x)["_home"][2]
    expanded = any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.new_empty(x.shape).stride() if expanded else x.stride()
