"""`tutti levels`: the passes of each level, and what they make of a model."""

from __future__ import annotations

import json

from tutti.cli import main
from tutti.run.levels import LEVELS


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
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    counts = {row[1].strip(): [int(cell) for cell in row[2:5]] for row in rows}
    assert counts["O0"][1:] == [0, 0] and counts["O2"][0] < counts["O1"][0] < counts["O0"][0]
    assert counts["O1"][2] < counts["O1"][1] and counts["O2"][2] < counts["O2"][1]
