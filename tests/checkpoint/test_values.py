"""Files of values are read without running code, whatever they hold."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tutti.checkpoint.model import load_model
from tutti.checkpoint.values import read_values, write_values
from tutti.config import files
from tutti.data.rows import BadRow
from tutti.data.sources.decode import decoded
from tutti.science.em.mt.inverse.vae import VAE
from tutti.weight_files import opened


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


class Own:
    pass


def test_values_return_as_they_were(tmp_path):
    values = {"numpy": np.random.RandomState(3).get_state(), "python": random.Random(3).getstate(), "rates": [0.1, 0.2],
              "scalar": np.float32(0.5), "flag": np.bool_(True), "rows": np.arange(3), "x": torch.ones(2)}  # fmt: skip
    write_values(values, tmp_path / "a.pt")
    read = read_values(tmp_path / "a.pt")
    assert read["python"] == values["python"] and read["rates"] == values["rates"] and read["scalar"] == 0.5
    assert np.array_equal(read["numpy"][1], values["numpy"][1]) and read["numpy"][2:] == values["numpy"][2:]
    assert np.array_equal(read["rows"], values["rows"]) and torch.equal(read["x"], values["x"]) and read["flag"]


def test_objects_are_refused_by_name_when_written_and_when_read(tmp_path):
    path = tmp_path / "a.pt"
    with pytest.raises(ValueError, match=r"a\.pt is not written: the values hold \S*test_values\.Own"):
        write_values({"x": [Own()]}, path)
    assert not path.exists()
    torch.save({"x": [Own()]}, path)
    with pytest.raises(ValueError, match=r"a\.pt holds \S*test_values\.Own, and reading that could run code: refused"):
        read_values(path)


READERS = {"values": read_values, "prior": VAE.load, "safetensors": opened}


@pytest.mark.parametrize("reader", READERS)
def test_a_call_is_not_executed(tmp_path, reader):
    marker, path = tmp_path / "marker", tmp_path / "bad.pt"
    torch.save({"state": Call(os.system, f"touch {marker}")}, path)
    with pytest.raises(ValueError, match=r"bad\.pt"):
        READERS[reader](path)
    assert not marker.exists()
    torch.load(path, weights_only=False)
    assert marker.exists(), "the file would have run it"


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04torn", b"\x80\x04}."], ids=["empty", "torn", "pickle"])
def test_a_damaged_file_is_an_error_with_its_name(tmp_path, reader, content):
    (tmp_path / "bad.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.pt"):
        READERS[reader](tmp_path / "bad.pt")


def test_arrays_of_objects_and_tags_of_python_are_refused(tmp_path):
    marker = tmp_path / "marker"
    np.save(tmp_path / "a.npy", np.array([Call(os.system, f"touch {marker}")], dtype=object), allow_pickle=True)
    with pytest.raises(BadRow, match=r"a\.npy: not a npy file"):
        decoded((tmp_path / "a.npy").read_bytes(), "npy", "a.npy")
    (tmp_path / "run.yaml").write_text(f"out: !!python/object/apply:os.system ['touch {marker}']\n")
    with pytest.raises(ValueError, match=r"run\.yaml"):
        files.read(tmp_path / "run.yaml")
    assert not marker.exists()


def test_weights_that_are_pickles_or_missing_say_what_to_do(tmp_path):
    with pytest.raises(ValueError, match=r"there is no file .*model\.safetensors$"):
        opened(tmp_path / "model.safetensors")
    Path(tmp_path, "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is a pickle; convert it with from_pretrained"):
        opened(tmp_path / "model.safetensors")


def test_a_model_whose_weights_are_torn_names_the_file(tmp_path):
    config = transformers.LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                                      vocab_size=16)  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    load_model(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged: .*Copy or download it again"):
        load_model(tmp_path)
