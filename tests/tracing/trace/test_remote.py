"""Remote tensors: what needs no value does not fetch it, and what does gets an ordinary tensor."""

from __future__ import annotations

import copy
import io
import pickle

import numpy
import pytest
import torch
from torch import nn

from tutti.tracing.trace.remote import Remote, fetch, home_of, make_ordinary, make_remote, shaped, strides_of

VALUE = torch.arange(12.0).reshape(3, 4)


class Shelf:
    """A home that counts what is fetched."""

    def __init__(self) -> None:
        self.count = 0

    def fetched(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return VALUE.to(tensor.dtype) + len(name)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def remote(shelf) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(3, 4))
    make_remote(parameter, shelf, "w")
    return parameter


WITHOUT = [
    lambda p: p.shape == (3, 4), lambda p: p.dtype is torch.float32, lambda p: p.device.type == "cpu",
    lambda p: p.numel() == 12 and len(p) == 3 and p.ndim == 2 and p.size(1) == 4, lambda p: p.grad is None,
    lambda p: p.is_leaf, lambda p: p.requires_grad_(False) is p, lambda p: isinstance(p, nn.Parameter),
    lambda p: p.is_floating_point() and not p.is_complex(), lambda p: hash(p) == id(p), lambda p: {p: 1}[p] == 1,
    lambda p: nn.ParameterList([p])[0] is p, lambda p: p.nbytes == 48, lambda p: p.register_hook(lambda g: g),
    lambda p: torch.optim.SGD([p], lr=1) is not None, lambda p: p.untyped_storage is not None,
]  # fmt: skip

WITH = [
    lambda p: p.detach(), lambda p: p.data, lambda p: p + 0, lambda p: 0 + p, lambda p: torch.add(p, 0),
    lambda p: nn.functional.linear(torch.eye(4), p).T, lambda p: torch._foreach_add([p], 0)[0],
    lambda p: torch.from_numpy(p.numpy(force=True)), lambda p: p.clone(), lambda p: p.view(-1).view(3, 4),
    lambda p: torch.tensor(p.tolist()), lambda p: p[:], lambda p: torch.stack([p])[0], lambda p: copy.deepcopy(p),
    lambda p: copy.copy(p), lambda p: pickle.loads(pickle.dumps(p)), lambda p: torch.ops.aten.clone.default(p),
    lambda p: torch.as_tensor(numpy.asarray(p.detach())), lambda p: p.to(torch.float64).float(), lambda p: abs(p),
    lambda p: torch.utils.dlpack.from_dlpack(p.detach()), lambda p: nn.Parameter(p.detach()),
    lambda p: torch.clone(input=p), lambda p: p.untyped_storage() and p, lambda p: p.data_ptr() and p,
    lambda p: p.stride() and p,
]  # fmt: skip


@pytest.mark.parametrize("use", WITHOUT)
def test_no_value_is_needed(use, remote, shelf):
    assert use(remote)
    assert shelf.count == 0 and home_of(remote) is shelf and remote.untyped_storage is not None


@pytest.mark.parametrize("use", WITH)
def test_the_value_is_fetched_once(use, remote, shelf):
    value = use(remote)
    assert torch.equal(value.detach(), VALUE + 1) and not isinstance(value, Remote)
    assert shelf.count == 1 and type(remote) is nn.Parameter and home_of(remote) is None
    assert vars(remote) == {}


def test_memory_is_one_element(remote):
    with torch._C.DisableTorchFunctionSubclass():
        assert remote.untyped_storage().nbytes() == 4


def test_a_module_with_remote_tensors(shelf):
    module = nn.LSTM(4, 4)
    wanted = module(torch.ones(1, 1, 4))[0]
    tensors = {name: x.clone() for name, x in module.state_dict().items()}
    shelf.fetched = lambda name, tensor: tensors[name].clone()
    for name, p in module.named_parameters():
        make_remote(p, shelf, name)
    assert torch.equal(module(torch.ones(1, 1, 4))[0], wanted)
    for name, p in module.named_parameters():
        make_remote(p, shelf, name)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    assert all(torch.equal(x, tensors[name]) for name, x in torch.load(file, weights_only=True).items())


def test_strides_and_versions_are_kept(shelf):
    parameter = nn.Parameter(torch.zeros(4, 3).T)
    version = parameter._version
    make_remote(parameter, shelf, "w")
    assert parameter._version == version
    assert fetch(parameter).stride() == (1, 3) and torch.equal(parameter, VALUE + 1)
    with torch.no_grad():
        parameter.mul_(2)
    assert parameter._version == version + 1


def test_an_expanded_tensor_gets_memory_for_all_elements(shelf):
    x = torch.zeros(4).expand(3, 4)
    make_remote(x, shelf, "w")
    assert strides_of(x) == (4, 1) and torch.equal(x.mul_(2), 2 * (VALUE + 1))


def test_an_ordinary_tensor_again(remote, shelf):
    value = torch.ones(3, 4)
    make_ordinary(remote, value)
    assert type(remote) is nn.Parameter and remote.data_ptr() == value.data_ptr() and shelf.count == 0


def test_shaped_gives_memory_without_values(remote, shelf):
    with shaped([remote]):
        assert type(remote) is nn.Parameter and remote.stride() == (4, 1)
    assert home_of(remote) is shelf and shelf.count == 0


def test_a_buffer_and_a_class_of_ones_own(shelf):
    class Named(nn.Parameter):
        pass

    for x in (torch.zeros(3, 4), nn.Buffer(torch.zeros(3, 4)), Named(torch.zeros(3, 4))):
        kind = type(x)
        make_remote(x, shelf, "w")
        assert isinstance(x, kind) and torch.equal(x + 0, VALUE + 1) and type(x) is kind


def test_an_error_of_the_home_leaves_it_remote(remote, shelf):
    def fails(name, tensor):
        raise RuntimeError("rank 1 is gone")

    shelf.fetched = fails
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        remote.sum()
    assert home_of(remote) is shelf
