"""Compression by several processes: the model that one process makes of the same data, written once."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import tutti
from compress_models import batches, model
from tutti.compress import parallel
from tutti.compress.folder import load
from tutti.launch.launch import LaunchError, launch

CASES = (
    ("llama", "int4-g32-gptq"),
    ("llama", "int4-g32-awq"),
    ("llama", "int8-a8static-smooth"),
    ("llama", "rotate-untie+int3-g32-gptq"),
    ("llama", "mixed-4-rtn"),
    ("llama", "prune-2:4+int4-g32"),
    ("llama", "shrink-heads0.5-layers1+int4-g32"),
    ("mixtral", "int4-g32-gptq"),
    ("mixtral", "shrink-experts0.5"),
    ("llama", "int4-g32+distill-4"),
)  # fmt: skip


def compressed(kind: str, recipe: str) -> tuple[dict[str, torch.Tensor], list[Any]]:
    outcome = tutti.compress(model(kind), recipe, batches(rows=2, length=24))
    return dict(outcome.model.state_dict()), [(x.path, x.tokens, x.note) for x in outcome.report.layers]


def everything(cases: tuple[tuple[str, str], ...]) -> list[Any]:
    return [compressed(*case) for case in cases]


@pytest.fixture(scope="module")
def both() -> list[Any]:
    return launch(everything, 2, CASES)


@pytest.mark.parametrize("at", range(len(CASES)), ids=[" ".join(x) for x in CASES])
def test_two_processes_make_the_model_of_one(both, at):
    """Sums over processes are in another order: codes may differ where a number is halfway between two, and GPTQ hands
    the difference on to other columns."""
    alone, reports = compressed(*CASES[at])
    (first, own), (second, _) = both[0][at], both[1][at]
    assert own == reports
    assert first.keys() == second.keys() == alone.keys()
    for name, x in first.items():
        assert torch.equal(x, second[name]), name
        if x.is_floating_point():
            torch.testing.assert_close(x, alone[name], rtol=1e-3, atol=1e-5)
        else:
            assert (x == alone[name]).float().mean() > 0.9, name


def to_folder(source: str, out: str, recipe: str) -> dict[str, Any]:
    data = batches(rows=2, length=24)
    first = tutti.compress(source, recipe, data, out=out)
    in_memory = tutti.compress(load_plain(source), recipe, data)
    in_memory.save(f"{out}-held")
    return {"bytes": first.report.after, "layers": len(first.report.layers)}


def load_plain(source: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source)


def test_the_first_process_writes(tmp_path):
    source = tmp_path / "source"
    model("llama").save_pretrained(source)
    results = launch(to_folder, 2, str(source), str(tmp_path / "out"), "int4-g32-gptq")
    assert results[0] == results[1]
    both = [load(tmp_path / name).state_dict() for name in ("out", "out-held")]
    assert all(torch.equal(x, both[1][name]) for name, x in both[0].items())
    assert not list(tmp_path.glob(".writing-*"))


def test_a_run_of_two_processes_goes_on_with_one(tmp_path):
    """Whatever wrote the blocks that are finished."""
    source, out = tmp_path / "source", tmp_path / "out"
    model("llama").save_pretrained(source)
    launch(interrupted, 2, str(source), str(out))
    done = json.loads((tmp_path / ".writing-out" / "compress.json").read_text())["blocks"]
    assert list(done) == ["model.layers.0"]
    began = (tmp_path / ".writing-out" / "model-00002-of-00003.safetensors").stat().st_mtime_ns
    tutti.compress(source, "int4-g32-gptq", batches(rows=2, length=24), out=out)
    assert (out / "model-00002-of-00003.safetensors").stat().st_mtime_ns == began


def interrupted(source: str, out: str) -> None:
    def stop(done: int, total: int, path: str) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tutti.compress(source, "int4-g32-gptq", batches(rows=2, length=24), out=out, progress=stop)


def too_few() -> None:
    tutti.compress(model("llama"), "int4-g32-gptq", [{"input_ids": torch.ones(4, 32, dtype=torch.long)}])


def test_fewer_batches_than_processes():
    with pytest.raises(LaunchError, match="1 batches of calibration data for 2 processes: give one for each"):
        launch(too_few, 2)


def test_each_with_one_process_works_when_asked():
    done: list[str] = []
    for name, x in parallel.each(["a", "b"], lambda name: done.append(name) or name * 2, len):
        assert done[-1] == name and x == name * 2
    assert done == ["a", "b"]


def refused(path: str) -> str:
    quantized = tutti.compress(model("llama"), "int4-g32")
    with pytest.raises(ValueError) as caught:
        quantized.save(path)
    return str(caught.value)


def test_what_the_first_process_cannot_write_is_an_error_in_all(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    one, two = launch(refused, 2, str(tmp_path / "out"))
    assert one == two and "is not a model: choose another folder" in one
