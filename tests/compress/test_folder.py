"""Models in folders: the same bits as in memory, a block at a time, resumed where it was interrupted."""

import gc
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

import compress_models as small
import tutti
from tutti.compress import Quantize, Recipe, Scheme
from tutti.compress.folder import Reader, load


@pytest.fixture
def source(tmp_path):
    small.llama().save_pretrained(tmp_path / "source")
    return tmp_path / "source"


@pytest.mark.parametrize("recipe", ["int4", "rotate+int3-zeros-gptq", "int8-a8static-smooth-head", "int4-awq"])
def test_as_in_memory(recipe, source, tmp_path):
    compressed = tutti.compress(source, recipe, small.batches(), out=tmp_path / "out")
    expected = tutti.compress(small.llama(), recipe, small.batches())
    assert torch.equal(small.logits(load(tmp_path / "out")), small.logits(expected.model))
    assert (
        compressed.report.layers == expected.report.layers
        and compressed.model is None
        and compressed.folder == tmp_path / "out"
    )
    assert compressed.report.after == sum(x.stat().st_size for x in (tmp_path / "out").glob("*.safetensors"))
    assert {x.name for x in tmp_path.iterdir()} == {"source", "out"}
    with pytest.raises(ValueError, match="has been written to"):
        compressed.save(tmp_path / "again")


@pytest.mark.parametrize("kind", ["tied", "mixtral", "qwen3-moe"])
def test_other_models(kind, tmp_path):
    """Experts are one by one in the files of transformers, and fused in its models."""
    model = small.model(tie_word_embeddings=True) if kind == "tied" else small.model(kind)
    model.save_pretrained(tmp_path / "source")
    recipe = "int4-g32-e4" if kind == "tied" else "int4-gptq"
    tutti.compress(tmp_path / "source", recipe, small.batches(), out=tmp_path / "out")
    expected = tutti.compress(model, recipe, small.batches()).model
    assert torch.equal(small.logits(load(tmp_path / "out")), small.logits(expected))


def weights() -> int:
    """How many weights of the shape of up_proj there are in memory."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
    return sum(x.shape == (128, 64) and x.is_floating_point() and x.device.type == "cpu" for x in tensors)


def test_one_block_is_in_memory_at_a_time(source, tmp_path):
    released = []

    def progress(done, total, path):
        blocks = files.model.model.layers
        released.append([all(x.device.type == "meta" for x in block.parameters()) for block in blocks])

    from tutti.compress import folder

    before = weights()
    files = folder.Files(source, tmp_path / "out", Recipe((Quantize(Scheme(4, 64)),)), "")
    run = folder.Compression(files, Recipe((Quantize(Scheme(4, 64)),)), progress=progress)
    run.run()
    assert run.progress and weights() == before, "no weight of a block is held"
    assert released == [[True, True]] * 3, "before each block, and at the end, no block is held"


class Stopped(Exception):
    pass


@pytest.mark.parametrize("recipe", ["int4-gptq", "int4", "rotate+int8"])
def test_a_run_that_was_interrupted_goes_on(recipe, source, tmp_path, monkeypatch):
    def stop(done, total, path):
        if done == 1:
            raise Stopped

    with pytest.raises(Stopped):
        tutti.compress(source, recipe, small.batches(), out=tmp_path / "out", progress=stop)
    assert not (tmp_path / "out").exists()
    compressed = []
    block = tutti.compress.compressor.Compression._block
    monkeypatch.setattr("tutti.compress.compressor.Compression._block",
                        lambda self, walk, i, *args: compressed.append(i) or block(self, walk, i, *args))  # fmt: skip
    resumed = tutti.compress(source, recipe, small.batches(), out=tmp_path / "out")
    assert compressed == [1]
    expected = tutti.compress(small.llama(), recipe, small.batches())
    assert torch.equal(small.logits(load(tmp_path / "out")), small.logits(expected.model))
    assert resumed.report.layers == expected.report.layers


@pytest.mark.parametrize("changed", ["recipe", "data", "shape", "files", "config"])
def test_another_run_begins_again(changed, source, tmp_path, monkeypatch):
    def stop(done, total, path):
        if done == 1:
            raise Stopped

    with pytest.raises(Stopped):
        tutti.compress(source, "int4-gptq", small.batches(), out=tmp_path / "out", progress=stop)
    if changed == "files":
        small.model().double().float().save_pretrained(source)
    if changed == "config":
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    recipe = "int3-gptq" if changed == "recipe" else "int4-gptq"
    data = small.batches(seed=1 if changed == "data" else 0)
    if changed == "shape":
        data = [{"input_ids": x["input_ids"].reshape(4, 12)} for x in data]
    tutti.compress(source, recipe, data, out=tmp_path / "out")
    expected = tutti.compress(LlamaForCausalLM.from_pretrained(source), recipe, data).model
    assert torch.equal(small.logits(load(tmp_path / "out")), small.logits(expected))


def test_the_tokenizer_comes_along(source, tmp_path):
    (source / "tokenizer.json").write_text("{}")
    tutti.compress(source, "int4", out=tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").exists() and (tmp_path / "out" / "generation_config.json").exists()


# -- what cannot be read ----------------------------------------------------------------------------------------------


def test_places_that_are_wrong(source, tmp_path):
    with pytest.raises(ValueError, match="give out="):
        tutti.compress(source, "int4")
    with pytest.raises(ValueError, match="is the model itself"):
        tutti.compress(source, "int4", out=source)
    (tmp_path / "run" / "config.json").parent.mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    source.rename(inner := tmp_path / "run" / "source")
    with pytest.raises(ValueError, match="would be replaced, with the model in it"):
        tutti.compress(inner, "int4", out=tmp_path / "run")
    inner.rename(source)
    with pytest.raises(ValueError, match=r"there is no folder .*nothing"):
        tutti.compress(tmp_path / "nothing", "int4", out=tmp_path / "out")
    with pytest.raises(ValueError, match=r"config.json is a file: choose a folder"):
        tutti.compress(source, "int4", out=source / "config.json")
    for recipe in ("int4", "prune-0.5-magnitude"):
        with pytest.raises(OSError, match=r"cannot be written \(Not a directory\): choose another"):
            tutti.compress(source, recipe, out=source / "config.json" / "out")
    with pytest.raises(ValueError, match=r"has no config.json|there is no file"):
        tutti.compress(tmp_path, "int4", out=tmp_path / "out")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not a model"):
        tutti.compress(source, "int4", out=tmp_path / "notes")
    with pytest.raises(ValueError, match="groups of 48 do not divide"):
        tutti.compress(source, "int4-g48", out=tmp_path / "out")
    small.model("gpt-oss").save_pretrained(tmp_path / "oss")
    with pytest.raises(ValueError, match="no names for the experts"):
        tutti.compress(tmp_path / "oss", "int4", out=tmp_path / "out")
    (tmp_path / "notes" / "inner").mkdir()
    (tmp_path / "notes" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="has folders besides a model, such as inner"):
        tutti.compress(source, "int4", out=tmp_path / "notes")
    (tmp_path / "some.gguf").mkdir()
    with pytest.raises(ValueError, match="gguf is a folder"):
        tutti.compress(source, "int4", out=tmp_path / "some.gguf")
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:transformers cannot load")
@pytest.mark.parametrize("once", ["int4", "int4-zeros", "int4-s8"])  # transformers reads, dequantizes and refuses
def test_a_quantized_model_is_not_compressed_again(once, source, tmp_path):
    tutti.compress(source, once, out=tmp_path / "once")
    for recipe, out in (("int4", "out"), ("int4", "out.gguf"), ("prune-0.5-magnitude", "out")):
        with pytest.raises(ValueError, match="is quantized already"):
            tutti.compress(tmp_path / "once", recipe, out=tmp_path / out)


@pytest.mark.parametrize("recipe", ["int4", "prune-0.5-magnitude"])
def test_a_link_leads_to_the_folder_that_is_written(recipe, source, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    tutti.compress(source, recipe, out=tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "disk" / "config.json").exists()
    assert {x.name for x in tmp_path.iterdir()} == {"source", "disk", "link"}


def header(size=None, **offsets):
    """The header of a file with tensors of float32 at offsets."""
    tensors = {name: {"dtype": "F32", "shape": shape, "data_offsets": at} for name, (shape, *at) in offsets.items()}
    text = json.dumps(tensors).encode()
    return (len(text) if size is None else size).to_bytes(8, "little") + text


HOSTILE = {
    "truncated": lambda whole: whole[: len(whole) // 2],
    "empty": lambda whole: b"",
    "no header": lambda whole: whole[:6],
    "a header of 2^63 bytes": lambda whole: header(2**63),
    "offsets behind the end": lambda whole: header(a=([4], 0, 1 << 40)),
    "offsets that overlap": lambda whole: header(a=([1], 0, 4), b=([1], 2, 6)) + bytes(6),
    "a shape that overflows": lambda whole: header(a=([2**62, 8], 0, 4)) + bytes(4),
    "no JSON": lambda whole: (4).to_bytes(8, "little") + b"{{{{",
    "a pickle": lambda whole: b"\x80\x04K\x01.",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_files_that_are_damaged_or_hostile(kind, source, tmp_path):
    path = source / "model.safetensors"
    path.write_bytes(HOSTILE[kind](path.read_bytes()))
    said = "is a pickle, .*: refused" if kind == "a pickle" else "is damaged: .*Copy or download it again"
    with pytest.raises(ValueError, match=f"model.safetensors {said}"):
        tutti.compress(source, "int4", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_index_that_leads_out_of_the_folder(source, tmp_path):
    shutil.move(source / "model.safetensors", tmp_path / "other.safetensors")
    index = {"weight_map": {"model.norm.weight": "../other.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="leads out of the folder: refused"):
        Reader(source)


@pytest.mark.parametrize("changed", [None, torch.ones(3, 3)])
def test_a_tensor_that_is_missing_or_has_another_shape(changed, source, tmp_path):
    path, name = source / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    whole = load_file(path)
    del whole[name]
    save_file({**whole, **({} if changed is None else {name: changed})}, path)
    with pytest.raises(ValueError, match=r"has no tensor 'model.layers.1|has \(3, 3\) in"):
        tutti.compress(source, "int4", out=tmp_path / "out")


DAMAGED = {
    "a pattern": lambda entry: {**entry, "ignore": ["re:("]},
    "ignored numbers": lambda entry: {**entry, "ignore": [5]},
    "a list of ranks": lambda entry: {**entry, "low_rank": ["model"]},
    "a norm of low rank": lambda entry: {**entry, "low_rank": {"model.norm": 8}},
    "a rank without end": lambda entry: {**entry, "low_rank": {"model.layers.0.mlp.up_proj": 10**12}},
    "a rank that is no number": lambda entry: {**entry, "low_rank": {"model.layers.0.mlp.up_proj": "8"}},
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_entries_that_are_damaged_or_hostile(kind, source, tmp_path):
    tutti.compress(source, "int4", out=tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": DAMAGED[kind](config["quantization_config"])}))
    with pytest.raises(ValueError, match="the quantization_config is damaged"):
        load(tmp_path / "out")
