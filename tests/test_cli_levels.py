"""`tutti levels`: the passes of each level, and what they make of a model."""

from __future__ import annotations

import json

from tutti.analysis.passes import LEVELS
from tutti.cli import main


def test_passes_of_each_level_are_printed_with_what_they_do(capsys):
    assert main(["levels"]) == 0
    said = capsys.readouterr().out
    for name, level in LEVELS.items():
        assert f"{name} {level.summary}" in said
        assert all(change.__name__ in said for change in (*level.before, *level.after))


def test_functions_of_a_model_are_counted(tmp_path, capsys):
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 32, "n_layer": 3, "n_head": 2,
              "vocab_size": 64, "n_positions": 32}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["levels", "--model", str(tmp_path), "--batch", "2", "--seq", "16"]) == 0
    *_, counted = capsys.readouterr().out.rpartition("compiled functions")
    rows = [line.split() for line in counted.splitlines()]
    counts = {row[0]: [int(cell) for cell in row[1:]] for row in rows if len(row) == 4}
    assert counts["O0"][1:] == [0, 0] and counts["O2"][0] < counts["O1"][0] < counts["O0"][0]
    assert counts["O1"][2] < counts["O1"][1] and counts["O2"][2] < counts["O2"][1]


def test_a_mistake_is_told_before_anything_is_printed(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}))
    assert main(["levels", "--model", str(tmp_path), "--dtype", "int4"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "unknown dtype 'int4'; expected one of float32, bfloat16" in said.err
