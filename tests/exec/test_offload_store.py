"""Memory outside of the device: files without a name, used again."""

import gc

import torch

from tutti.exec.offload_store import Shelf
from tutti.ir.step_graph import Spec
from tutti.plan.tier import DISK, HOST


def test_a_tensor_keeps_its_values_in_a_file_without_a_name(tmp_path):
    shelf, x = Shelf(tmp_path / "new"), torch.randn(3, 5)
    kept = shelf.place(x, DISK)
    assert torch.equal(kept, x) and kept.untyped_storage().filename and not list((tmp_path / "new").iterdir())
    assert shelf.holds(kept) and shelf.holds(kept.t()) and not shelf.holds(x) and shelf.bytes == x.nbytes


def test_what_nobody_has_any_more_is_used_again(tmp_path):
    shelf, spec = Shelf(tmp_path), Spec((4, 4), torch.bfloat16)
    first = shelf.take(spec, DISK)
    place = first.data_ptr()
    second = shelf.take(spec, DISK)
    assert second.data_ptr() != place and shelf.bytes == 2 * spec.bytes
    del first
    gc.collect()
    again = shelf.take(Spec((32,), torch.uint8), DISK)
    assert again.data_ptr() == place and shelf.bytes == 2 * spec.bytes
    assert shelf.take(spec, HOST).data_ptr() != place, "tiers do not mix"


def test_empty_tensors_and_other_orders(tmp_path):
    shelf = Shelf(tmp_path)
    assert shelf.take(Spec((0, 3), torch.float32), DISK).shape == (0, 3)
    assert shelf.take(Spec((2, 3), torch.float32), DISK, (1, 2)).stride() == (1, 2)
