"""`tutti compress`: mistakes are errors before anything is computed, and what is done otherwise is said."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

import compress_models as small
import tutti
from tutti.cli.compress import command


@pytest.fixture
def source(tmp_path):
    """A model with a tokenizer that makes each word of `text.txt` a token."""
    model = small.llama()
    model.save_pretrained(tmp_path / "source")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(model.config.vocab_size)}, "w0"))
    words.pre_tokenizer = Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=8).save_pretrained(tmp_path / "source")
    (tmp_path / "text.txt").write_text(" ".join(f"w{i % 50}" for i in range(1000)))
    return tmp_path / "source"


def test_fewer_rows_than_asked_for(source, tmp_path, capfd):
    command(source, tmp_path / "out", "int4-gptq", str(tmp_path / "text.txt"), samples=128, length=64)
    said = capfd.readouterr()
    assert f"{tmp_path / 'text.txt'} has 15 rows of 64 tokens, of 128 asked for" in said.out
    assert "compressing: 0 of 2, model.layers.0" in said.out, "progress without a terminal"
    assert "longer than" not in said.out + said.err, "no warning that a text is longer than a row"


def test_interrupted(source, tmp_path, capfd, monkeypatch):
    from tutti.compress.folder import Files

    def interrupted(files: Files, path: str, reports: object) -> None:
        raise KeyboardInterrupt

    text = str(tmp_path / "text.txt")
    monkeypatch.setattr(Files, "done", interrupted)
    with pytest.raises(KeyboardInterrupt):
        command(source, tmp_path / "out", "int4-gptq", text, length=64)
    assert "the same command goes on from here" in capfd.readouterr().out


def test_data_that_no_step_reads(source, tmp_path, capfd):
    command(source, tmp_path / "out", "int8", str(tmp_path / "text.txt"))
    assert "recipe int8 needs no data: --calibration is not read" in capfd.readouterr().out


def test_rows_longer_than_the_model_reads(source, tmp_path):
    longest = small.llama().config.max_position_embeddings
    with pytest.raises(ValueError, match=f"at most {longest}: give --length"):
        command(source, tmp_path / "out", "int4-gptq", str(tmp_path / "text.txt"), length=longest + 1)


def test_a_file_for_llama_cpp(source, tmp_path, capfd):
    from tutti.compress.formats import gguf
    from tutti.data.tokenizer import train_tokenizer

    with pytest.raises(ValueError, match="tokenizer"):
        command(source, tmp_path / "model.gguf", "int4-g32")
    train_tokenizer(["def f(x): return x"], 257).save_pretrained(source)
    model = small.model(vocab_size=257)
    model.save_pretrained(source)
    command(source, tmp_path / "model.gguf", "int4-g32")
    assert "wrote" in capfd.readouterr().out
    own, quantized = gguf.load(tmp_path / "model.gguf"), tutti.compress(model, "int4-g32").model
    ids = small.batches(1)[0]["input_ids"]
    assert (own(ids).logits - quantized(ids).logits).norm() < 0.02 * quantized(ids).logits.norm()
    with pytest.raises(OSError, match="cannot be written"):
        command(source, source / "config.json" / "model.gguf", "int4-g32")


def test_several_processes(source, tmp_path, capfd):
    command(source, tmp_path / "out", "int4-gptq", str(tmp_path / "text.txt"), length=64, processes=2)
    assert capfd.readouterr().out.count("wrote") == 1, "the first process speaks"
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
