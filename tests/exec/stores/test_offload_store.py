"""Memory outside of the device: files without a name, used again."""

import gc

import torch

from tutti.exec.stores.offload_store import OffloadStore
from tutti.ir.spec import Spec
from tutti.plan.tier import DISK, HOST


def test_a_tensor_keeps_its_values_in_a_file_without_a_name(tmp_path):
    offload_store, x = OffloadStore(tmp_path / "new"), torch.randn(3, 5)
    on_disk = offload_store.place(x, DISK)
    assert torch.equal(on_disk, x) and on_disk.untyped_storage().filename and not list((tmp_path / "new").iterdir())
    assert (
        offload_store.holds(on_disk)
        and offload_store.holds(on_disk.t())
        and not offload_store.holds(x)
        and offload_store.bytes == x.nbytes
    )


def test_what_nobody_has_any_more_is_used_again(tmp_path):
    offload_store, spec = OffloadStore(tmp_path), Spec((4, 4), torch.bfloat16)
    first = offload_store.take(spec, DISK)
    place = first.data_ptr()
    second = offload_store.take(spec, DISK)
    assert second.data_ptr() != place and offload_store.bytes == 2 * spec.bytes
    del first
    gc.collect()
    again = offload_store.take(Spec((32,), torch.uint8), DISK)
    assert again.data_ptr() == place and offload_store.bytes == 2 * spec.bytes
    assert offload_store.take(spec, HOST).data_ptr() != place, "tiers do not mix"


def test_empty_tensors_and_other_orders(tmp_path):
    offload_store = OffloadStore(tmp_path)
    assert offload_store.take(Spec((0, 3), torch.float32), DISK).shape == (0, 3)
    assert offload_store.take(Spec((2, 3), torch.float32), DISK, (1, 2)).stride() == (1, 2)
