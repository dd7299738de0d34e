"""A checkpoint as a model of transformers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tutti import cli
from tutti.checkpoint.model import model_folder, stored_model
from tutti.train import command
from tutti.train.text.config import Model


@pytest.mark.parametrize("model", [
    Model("llama", 32, 2, 2, {"intermediate_size": 48}), Model("gpt2", 32, 2, 2, {}),
    Model("mixtral", 32, 1, 2, {"intermediate_size": 48, "num_local_experts": 2, "num_key_value_heads": 2}),
], ids=lambda model: model.type)  # fmt: skip
def test_transformers_reads_what_was_trained(tiny, model, tmp_path, capsys):
    config = replace(tiny, model=model, schedule=replace(tiny.schedule, steps=2))
    command.run(config)
    capsys.readouterr()
    assert cli.main(["export", config.out, str(tmp_path / "model"), "--shard", "20KB"]) == 0
    assert f"{tmp_path / 'model'}" in capsys.readouterr().out
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    expected, exported = (
        stored_model(model_folder(config.out)),
        AutoModelForCausalLM.from_pretrained(tmp_path / "model"),
    )
    for name, value in expected.state_dict().items():
        assert torch.equal(exported.state_dict()[name], value), name
    ids = torch.arange(8)[None]
    assert torch.equal(expected.eval()(ids).logits, exported.eval()(ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "model").model_max_length == 16


def test_what_is_no_checkpoint_or_is_there_already_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine").write_text("text")
    assert cli.main(["export", str(tmp_path / "nothing"), str(tmp_path / "out")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path), str(tmp_path)]) == 2
    assert "already exists and is not a model" in capsys.readouterr().err
    assert Path(tmp_path, "mine").read_text() == "text"
