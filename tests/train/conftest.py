"""A corpus and a model so small that a whole run takes a second or two."""

from dataclasses import replace

import pytest

from tutti.train import command
from tutti.train.text.config import Batch, Checkpoint, Config, Data, Eval, Model, Parallel, Sample, Schedule, Tokenizer


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(30):
        lines = [f"def add_{i}_{j}(x, y):\n    return x + y * {i * j}\n" for j in range(12)]
        (folder / f"module_{i:02}.py").write_text("\n".join(lines))
    return folder


def config_of(corpus, folder):
    return Config(
        out=str(folder / "run"),
        data=Data(str(corpus), held_out=0.2, cache=str(corpus.parent / "cache")),
        tokenizer=Tokenizer(vocab_size=300),
        model=Model("llama", 32, 2, 2, {"intermediate_size": 48}),
        batch=Batch(4, 16),
        schedule=Schedule(steps=8, warmup=2),
        parallel=Parallel(level="O0", precision="float32"),
        checkpoint=Checkpoint(every=2, keep=2),
        eval=Eval(every=4, batches=2),
        sample=Sample(tokens=5),
    )


@pytest.fixture
def tiny(corpus, tmp_path):
    """Eight steps, a checkpoint every second one, in one process, operator by operator."""
    return config_of(corpus, tmp_path)


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """The same, done. Nothing in its folder is changed."""
    config = config_of(corpus, tmp_path_factory.mktemp("finished"))
    command.run(config)
    return config


@pytest.fixture
def but(tiny):
    """`but(seed=3, schedule={"steps": 4})`: the tiny config with some keys changed."""

    def change(**sections):
        changed = {
            name: replace(getattr(tiny, name), **value) if isinstance(value, dict) else value
            for name, value in sections.items()
        }
        return replace(tiny, **changed)

    return change
