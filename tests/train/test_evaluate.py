import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from tutti.checkpoint.model import model_folder
from tutti.serve.command import generate
from tutti.train import command
from tutti.train.evaluate import Score, evaluate, score
from tutti.train.text.finish import continue_text
from tutti.train.text.history import read, series
from tutti.train.text.prepare import prepare
from tutti.train.text.progress import Display


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """A finished tiny run."""
    from tutti.train.text.config import (
        Batch,
        Checkpoint,
        Config,
        Data,
        Eval,
        Model,
        Parallel,
        Sample,
        Schedule,
        Tokenizer,
    )

    config = Config(
        out=str(tmp_path_factory.mktemp("runs") / "run"),
        data=Data(str(corpus), held_out=0.2, cache=str(corpus.parent / "cache")),
        tokenizer=Tokenizer(300),
        model=Model("llama", 32, 2, 2, {"intermediate_size": 48}),
        batch=Batch(4, 16),
        schedule=Schedule(12, 2),
        parallel=Parallel(level="O0", precision="float32"),
        checkpoint=Checkpoint(every=6),
        eval=Eval(every=6, batches=2),
        sample=Sample(tokens=5),
    )
    command.run(config)
    return config


def test_the_score_is_that_of_the_trainer_and_of_a_plain_loop(trained):
    prepared = prepare(trained, Display(silent=True))
    folder = model_folder(trained.out)
    two = score(folder, prepared.held_out, batch=4, seq=16, batches=2)
    assert two.loss == pytest.approx(series(read(command.Path(trained.out)), "held_out_loss")[1][-1], rel=1e-5)
    whole = score(folder, prepared.held_out, batch=4, seq=16)
    row = torch.from_numpy(prepared.held_out.open().astype("int64"))
    windows = row[: len(row) // 64 * 64].view(-1, 16)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(f"{trained.out}/model").eval()(windows).logits
    plain = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), windows[:, 1:].flatten())
    assert whole.loss == pytest.approx(plain.item(), rel=0.02)  # the windows are spread, not the first ones
    assert whole.tokens == len(windows) * 15


def test_bits_a_byte_are_nats_a_token_over_bytes_a_token(trained):
    held_out = prepare(trained, Display(silent=True)).held_out
    held_out_score = score(model_folder(trained.out), held_out, 4, 16)
    assert held_out_score.bits_per_byte == pytest.approx(
        held_out_score.loss / math.log(2) * held_out.tokens / held_out.text_bytes
    )
    assert "perplexity 7.39  1.500 bits a byte  (1,000 tokens" in str(Score(2.0, 1.5, 1000))


def test_the_verb_prints_the_score(trained, capsys):
    evaluate(trained.out, batches=2)
    assert "loss " in (out := capsys.readouterr().out) and "(120 tokens of held-out text)" in out


def test_text_is_continued_the_same_way_for_the_same_seed(trained, capsys):
    printed = []
    for _ in range(2):
        generate(trained.out, prompt="def ", tokens=8, seed=3)
        printed.append(capsys.readouterr().out)
    folder = model_folder(trained.out)
    assert printed[0] == printed[1] and printed[0].startswith("def ")
    assert len({continue_text(folder, "def ", 8, 1.0, seed) for seed in range(2)}) == 2
    assert continue_text(folder, "def ", 8, 0.0, 1) == continue_text(folder, "def ", 8, 0.0, 2)


def test_a_folder_without_a_model_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"no complete checkpoint in .*; give the"):
        generate(str(tmp_path))
    with pytest.raises(ValueError, match=r"no .*run\.json; give the folder of a run"):
        evaluate(str(tmp_path))
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    with pytest.raises(ValueError, match="no complete checkpoint"):
        generate(str(tmp_path))


def test_an_empty_prompt_is_an_error(trained):
    with pytest.raises(ValueError, match="the prompt is empty"):
        generate(trained.out, prompt="")
