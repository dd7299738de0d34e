"""Tensors of a step are dense and keep their memory and shape: whatever is not is refused, with a remedy."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh

import tutti


@torch.library.custom_op("dense_only::halve_", mutates_args=("x",))
def halve_(x: torch.Tensor) -> None:
    x.mul_(0.5)


class Model(nn.Module):
    """A linear layer and a buffer. use: what happens to the activations and the batch."""

    def __init__(self, use, buffer=None):
        super().__init__()
        self.layer, self.use = nn.Linear(4, 4), use
        self.register_buffer("state", torch.zeros(1, 4) if buffer is None else buffer)

    def forward(self, x):
        return self.use(self, self.layer(x), x).sum()


def grown(model, h, x):
    model.state = torch.cat([model.state, x[:1]])
    return h


def unsqueezed(model, h, x):
    model.state.unsqueeze_(0)
    return h


def halved(model, h, x):
    torch.ops.dense_only.halve_(model.state)
    return h


def nested(model, h, x):
    return torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged).values() + h


REFUSED = {
    grown: r"changes buffer 'state' from \(1, 4\) torch.float32 to \(2, 4\)",
    unsqueezed: r"changes buffer 'state' from \(1, 4\) torch.float32 to \(1, 1, 4\)",
    halved: r"halve_\.default, a custom operator that writes into an argument.*write one that returns a new tensor",
    nested: r"makes a nested tensor.*use padded tensors and a mask",
    (lambda model, h, x: x.to_sparse() @ h): "creates a sparse tensor",
}


@pytest.mark.parametrize("use", REFUSED, ids=lambda use: use.__name__)
def test_models(use):
    with pytest.raises(ValueError, match=REFUSED[use]):
        tutti.capture(Model(use), (torch.ones(4, 4),))


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_buffers(layout):
    buffer = getattr(torch.eye(4), "to_sparse_csr" if layout == "csr" else "to_sparse")()
    buffer = torch.eye(4).to_sparse_csc() if layout == "csc" else buffer
    model = Model(lambda model, h, x: model.state @ h, buffer)
    with pytest.raises(ValueError, match=f"buffer:state is a sparse_{layout} tensor.*to_dense"):
        tutti.capture(model, (torch.ones(4, 4),))
    with pytest.raises(ValueError, match=f"sparse_{layout} tensor.*to_dense"):
        tutti.function(model, torch.ones(4, 4), store=tutti.Store(model=model), cluster="cpu:1")


@pytest.mark.parametrize("kind", ["nested", "sparse_coo"])
def test_batches(kind):
    x = torch.ones(4, 4).to_sparse() if kind == "sparse_coo" else torch.nested.nested_tensor(
        [torch.ones(1, 4), torch.ones(3, 4)], layout=torch.jagged)  # fmt: skip
    with pytest.raises(ValueError, match=f"batch entry 'x' is a {kind} tensor"):
        tutti.capture(Model(lambda model, h, x: h), {"x": x})


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def fully_sharded(model):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


def parallelized(model):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    return parallelize_module(model, init_device_mesh("cpu", (1,)), {"layer": ColwiseParallel()})


def flattened(model):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrap, wrapper", [
    (fully_sharded, "fully_shard or"), (parallelized, "or parallelize_module"), (flattened, "FullyShardedDataParallel"),
])  # fmt: skip
def test_models_that_are_distributed_already(one_rank, wrap, wrapper):
    model = wrap(Model(lambda model, h, x: h))
    with pytest.raises(ValueError, match=rf"param:\S+ was distributed by .*{wrapper}.*give a plan instead"):
        tutti.capture(model, (torch.ones(4, 4),))


def reduced(model, h, x):
    dist.all_reduce(h)
    return h


def gathered(model, h, x):
    parts = [torch.empty_like(h)]
    dist.all_gather(parts, h)
    return parts[0]


COLLECTIVES = [reduced, gathered, lambda model, h, x: all_reduce(h, "sum", init_device_mesh("cpu", (1,)))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use", COLLECTIVES, ids=lambda use: use.__name__)
def test_collectives_in_a_model(one_rank, use):
    with pytest.raises(ValueError, match=r"test_dense_only\.py:\d+, `.*: the model calls \S+, a collective .*Leave"):
        tutti.capture(Model(use), (torch.ones(4, 4),))


def test_a_barrier_in_a_model_has_no_effect(one_rank):
    model = Model(lambda model, h, x: h if dist.barrier() is None else x)
    assert not any("barrier" in str(node.target) for node in tutti.capture(model, (torch.ones(4, 4),)).calls)
