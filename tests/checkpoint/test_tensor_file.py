"""Files of tensors and arrays are complete or absent, and what is hostile or damaged is refused by name."""

from __future__ import annotations

import json
import os
import pickle
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tutti.checkpoint.array_file import read_arrays, write_arrays
from tutti.checkpoint.tensor_file import read_metadata, read_tensors, write_tensors


def test_tensors_and_texts_return_as_they_were(tmp_path):
    whole = torch.randn(3, 4)
    tensors = {"whole": whole, "row": whole[1], "across": whole.T, "none": torch.zeros(0), "flag": torch.tensor(True)}
    write_tensors(tensors, tmp_path / "new/a", {"about": "x"})
    read = read_tensors(tmp_path / "new/a")
    assert read.keys() == tensors.keys() and all(torch.equal(x, tensors[name]) for name, x in read.items())
    assert read_metadata(tmp_path / "new/a") == {"about": "x"} and os.listdir(tmp_path / "new") == ["a"]


def test_the_file_before_remains_under_another_name(tmp_path):
    path, previous = tmp_path / "a", tmp_path / "a.old"
    for k in range(3):
        write_tensors({"x": torch.tensor(k)}, path, previous=previous)
    assert read_tensors(path)["x"] == 2 and read_tensors(previous)["x"] == 1


def test_files_of_earlier_versions_have_no_checksum(tmp_path):
    save_file({"x": torch.ones(2)}, tmp_path / "a")
    assert read_tensors(tmp_path / "a", unsigned=True)["x"].tolist() == [1, 1]
    with pytest.raises(ValueError, match="a is damaged: its content has changed"):
        read_tensors(tmp_path / "a")


def header(dtype: str = "F32", shape: tuple[int, ...] = (2,), end: int = 8) -> bytes:
    text = json.dumps({"x": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(8)


@pytest.mark.parametrize("content", [
    b"", b"text", header()[:-1], header()[:20], header("F99"), header(shape=(1 << 40,)), header(end=1 << 60),
    header(shape=(1 << 40,), end=1 << 42), (1 << 60).to_bytes(8, "little") + b"{}", (50 << 20).to_bytes(8, "little"),
])  # fmt: skip
def test_damaged_files_of_tensors_are_refused_by_name(tmp_path, content):
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    for read in (read_tensors, read_metadata):
        with pytest.raises(ValueError, match=r"a\.safetensors is damaged: .*download it again"):
            read(path)


def test_a_changed_byte_is_noticed_in_all_files_with_a_checksum(tmp_path):
    write_tensors({"x": torch.ones(2)}, tmp_path / "a")
    content = bytearray((tmp_path / "a").read_bytes())
    content[-1] ^= 1
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match="a is damaged: its content has changed"):
        read_tensors(tmp_path / "a", unsigned=True)


class Call:
    """Pickles as a call of os.mkdir."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_pickles_are_refused_and_not_run(tmp_path):
    marker = tmp_path / "marker"
    (tmp_path / "pickle").write_bytes(pickle.dumps(Call(marker)))
    torch.save(Call(marker), tmp_path / "torch")
    np.savez(tmp_path / "numpy.npz", x=np.array([Call(marker)], dtype=object))
    for name in ("pickle", "torch"):
        with pytest.raises(ValueError, match=rf"{name} is a pickle, .*: refused\. Write"):
            read_tensors(tmp_path / name)
        with pytest.raises(ValueError, match=rf"{name} "):
            read_arrays(tmp_path / name, "x")
    with pytest.raises(ValueError, match=r"numpy\.npz is no \.npz file of arrays of numbers: x\.npy holds objects"):
        read_arrays(tmp_path / "numpy.npz", "x")
    assert not marker.exists()


def test_missing_files_and_folders_are_named(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ValueError, match=f"there is no file {path}$"):
            read_tensors(path)


def test_arrays_return_as_they_were_also_from_compressed_files(tmp_path):
    write_arrays(tmp_path / "a.npz", x=np.eye(2), names=["TE", "TM"], number=3)
    np.savez_compressed(tmp_path / "b.npz", x=np.eye(2), names=["TE", "TM"], number=3)
    for name in ("a.npz", "b.npz"):
        read = read_arrays(tmp_path / name, "x", "names", "number")
        assert np.array_equal(read["x"], np.eye(2)) and read["names"].tolist() == ["TE", "TM"] and read["number"] == 3
    with pytest.raises(ValueError, match=r"a\.npz has no array y; it has x, names, number"):
        read_arrays(tmp_path / "a.npz", "y")
    assert sorted(os.listdir(tmp_path)) == ["a.npz", "b.npz"]


def array(shape: tuple[int, ...]) -> bytes:
    text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(16)


@pytest.mark.parametrize("content", [array((1 << 40,)), array((-2,)), array((2,))[:-1], array((2,))[:9], b"text"])
def test_arrays_that_declare_other_sizes_are_refused(tmp_path, content):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("x.npy", content)
    with pytest.raises(ValueError, match=r"a\.npz is no \.npz file of arrays of numbers: x\.npy holds"):
        read_arrays(tmp_path / "a.npz", "x")


def test_a_torn_file_of_arrays_is_refused_by_name(tmp_path):
    write_arrays(tmp_path / "a.npz", x=np.arange(100))
    whole = (tmp_path / "a.npz").read_bytes()
    for content in (whole[:-30], whole.replace(bytes([7] + [0] * 7), bytes([8] + [0] * 7)), b"", b"text"):
        (tmp_path / "a.npz").write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.npz is no \.npz file of arrays, or is damaged"):
            read_arrays(tmp_path / "a.npz", "x")


def test_a_dim_of_size_one_may_have_any_stride(tmp_path):
    tensors = {"expanded": torch.tensor(1.0, dtype=torch.float64).expand(1), "empty": torch.zeros(0, 3),
               "row": torch.randn(4, 4)[1:2, ::2]}  # fmt: skip
    write_tensors(tensors, tmp_path / "a")
    loaded = read_tensors(tmp_path / "a")
    assert all(torch.equal(loaded[name], x) for name, x in tensors.items())
