import dataclasses
from typing import get_args, get_type_hints

import pytest

from tutti.analysis.passes import LEVELS
from tutti.train.configfile import load, parse
from tutti.train.text.config import Config, Model, Optimizer, Parallel, flatten


@pytest.fixture
def write(tmp_path):
    def make(text):
        file = tmp_path / "run.toml"
        file.write_text(text)
        return file

    return make


def test_a_file_sets_what_it_names_and_the_rest_is_default(write):
    config = load(write("seed = 3\n[optimizer]\nlr = 1\nbetas = [0.8, 0.9]\n[model.options]\nattention_bias = true"))
    assert config == Config(
        seed=3, optimizer=Optimizer(lr=1, betas=(0.8, 0.9)), model=Model(options={"attention_bias": True})
    )


def test_the_command_line_overrides_the_file(write):
    file = write("seed = 3\n[optimizer]\nlr = 1.0\nclip_norm = 2.0")
    options = ["--optimizer.lr", "3e-4", "--optimizer.clip-norm", "None", "--batch.size=8"]
    config = parse([str(file), *options])
    assert (config.seed, config.optimizer.lr, config.optimizer.clip_norm, config.batch.size) == (
        3,
        3e-4,
        None,
        8,
    )


def test_without_a_file_there_are_only_options():
    assert parse(["--seed", "7"]) == Config(seed=7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[optimizer]\nlrr = 1", r"run\.toml: there is no key optimizer\.lrr; did you mean optimizer\.lr\?"),
        ("[optimiser]\nlr = 1", r"there is no key optimiser; did you mean optimizer\?"),
        ("lr = 1", r"there is no key lr; did you mean optimizer\.lr\?"),
        ("[batch]\nzzz = 1", r"there is no key batch\.zzz; \[batch\] has size, seq, accumulate"),
        ('[optimizer]\nlr = "fast"', r"run\.toml: optimizer\.lr = 'fast' should be a number"),
        ("[batch]\nsize = 1.5", r"batch\.size = 1\.5 should be a whole number"),
        ("[batch]\nsize = true", r"batch\.size = True should be a whole number"),
        ("[data]\npatterns = '*.py'", r"data\.patterns = '\*\.py' should be a list of strings"),
        ("[optimizer]\nbetas = [0.9]", r"optimizer\.betas = \[0\.9\] should be a list of 2 numbers"),
        ("[parallel]\nlevel = 'O3'", r"parallel\.level = 'O3' should be one of 'auto', 'O0', 'O1', 'O2'"),
        ("[model]\noptions = 1", r"model\.options = 1 should be a table"),
        ("batch = 16", r"batch is a section: write \[batch\] and its keys below"),
        ("seed = ", r"run\.toml is not TOML: Invalid value"),
    ],
)
def test_a_mistake_in_the_file_is_named(write, text, message):
    with pytest.raises(ValueError, match=message):
        load(write(text))


def test_a_missing_file_names_one_that_is_there(write):
    file = write("")
    with pytest.raises(ValueError, match=r"no file .*runn\.toml; did you mean .*run\.toml\?"):
        load(file.with_name("runn.toml"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--batch.size", "0"], "batch.size must be at least 1, not 0"),
        (
            ["--schedule.steps", "20"],
            r"schedule.warmup \(50\) exceeds schedule.steps \(20\): add --schedule.warmup 2, or another .* up to 20",
        ),
        (["--batch.accumulate", "3"], r"batch.size \(16\) is not a multiple of batch.accumulate \(3\)"),
    ],
)
def test_a_number_outside_its_range_is_an_error(args, message):
    with pytest.raises(ValueError, match=message):
        parse(args)


@pytest.mark.parametrize(
    ("args", "messages"),
    [
        (["--optimizer.lrr", "1"], ["Unrecognized", "--optimizer.lr FLOAT"]),
        (["--optimizer.lr", "fast"], ["--optimizer.lr", "'fast'"]),
    ],
)
def test_a_mistake_on_the_command_line_is_named(capsys, args, messages):
    with pytest.raises(SystemExit) as end:
        parse(args)
    assert end.value.code == 2
    said = capsys.readouterr()
    assert all(m in said.out + said.err for m in messages)


def test_help_documents_every_key(capsys):
    with pytest.raises(SystemExit) as end:
        parse(["--help"])
    assert end.value.code == 0
    words = " ".join(capsys.readouterr().out.replace("\u2502", " ").split())
    for name, section in [("", Config), *((f.name, f.type) for f in dataclasses.fields(Config))]:
        if not dataclasses.is_dataclass(section):
            continue
        for key in dataclasses.fields(section):
            if not dataclasses.is_dataclass(key.type):
                option = f"--{name}.{key.name}" if name else f"--{key.name}"
                assert option.replace("_", "-") in words
    assert "Highest learning rate, reached when warm-up ends. (default: 0.001)" in words


def test_the_levels_offered_are_those_there_are():
    assert get_args(get_type_hints(Parallel)["level"]) == ("auto", *LEVELS)


def test_flatten_names_every_key_once():
    flat = flatten(dataclasses.asdict(Config()))
    assert flat["optimizer.betas"] == (0.9, 0.95) and flat["seed"] == 0 and flat["model.options"] == {}
