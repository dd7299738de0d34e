"""Config files, and options over them."""

from __future__ import annotations

import pytest

from tutti.config.files import read, with_options


def test_options_reach_into_sections_and_keep_the_rest():
    table = {"out": "a", "data": {"train": "x.jsonl", "rows": 3}}
    changed = with_options(table, ["--data.train", "y.jsonl", "--betas=[0.9, 0.95]", "--a.b-c.d", "true"])
    assert changed == {
        "out": "a", "data": {"train": "y.jsonl", "rows": 3}, "betas": [0.9, 0.95], "a": {"b_c": {"d": True}}
    }  # fmt: skip
    assert table == {"out": "a", "data": {"train": "x.jsonl", "rows": 3}}


@pytest.mark.parametrize("arguments", [["seed", "3"], ["--seed"], ["--a", "1", "b"]])
def test_arguments_that_are_no_options_are_refused(arguments):
    with pytest.raises(ValueError, match=r"are written --section\.key value"):
        with_options({}, arguments)


@pytest.mark.parametrize("text", ["a = " + "[" * 100_000, "a = ", "\0", "- 1\n- 2"])
def test_hostile_files_are_refused_with_their_name(tmp_path, text):
    for name in ("run.toml", "run.yaml"):
        file = tmp_path / name
        file.write_text(text)
        if name == "run.yaml" and text == "a = ":
            continue  # a string to YAML, which the next test refuses
        with pytest.raises(ValueError, match=name):
            read(file)


def test_yaml_that_is_no_table_is_refused(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("a = ")
    with pytest.raises(ValueError, match="holds no keys and values"):
        read(file)
