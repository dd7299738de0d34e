"""Config files, and options over them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tutti.config.build import build
from tutti.config.files import read, with_options


@dataclass(frozen=True)
class Rows:
    rows: int = 0


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


@pytest.mark.parametrize("include", ["3", "[3]", "{a = 1}"])
def test_includes_are_names_of_files(tmp_path, include):
    file = tmp_path / "run.toml"
    file.write_text(f"include = {include}")
    with pytest.raises(ValueError, match=r"run\.toml: include is a file or a list of files"):
        read(file)


@pytest.mark.parametrize("text", ["1: 2", "a:\n  on: 2", "a: [{null: 1}]"])
def test_keys_of_yaml_are_strings(tmp_path, text):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match="is no string; write it in quotes"):
        read(file)


def test_a_value_of_many_aliases_is_named_in_short(tmp_path):
    """Nine lists of nine lists, thirty deep, are few bytes in the file and in memory, and 9**30 items as text."""
    lines = ["a0: &a0 [1]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 31))]
    file = tmp_path / "run.yaml"
    file.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"run\.yaml: rows = .* should be a whole number") as error:
        build(Rows, {"rows": read(file)["a30"]}, str(file))
    assert len(str(error.value)) < 10_000
