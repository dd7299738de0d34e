import json

import numpy as np
import pytest
import torch

from tutti.data import Mapped, Stream, open_source
from tutti.data.digest import digest


def test_every_kind_of_value_counts():
    rows = [{"a": 1, "b": "x", "c": [1.0, None], "d": np.arange(3), "e": b"y", "f": torch.ones(2), "g": True}]
    before = digest(rows)
    assert before == digest([dict(rows[0])]) and len(before) == 16
    changes = {"a": 2, "b": "z", "c": [1.0], "d": np.arange(3.0), "e": b"", "f": torch.zeros(2), "g": False}
    for name, value in changes.items():
        assert digest([{**rows[0], name: value}]) != before, name
    assert digest([]) == digest(()) != before


def test_functions_of_rows_do_not_count():
    rows = [{"x": i} for i in range(100)]
    assert digest(Mapped(rows, lambda row: {"y": object()})) == digest(rows)
    assert digest(Mapped([*rows[:-1], {"x": -1}], dict)) != digest(rows)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_stream_does_not_resume_on_a_file_of_other_rows(tmp_path, suffix):
    import gzip

    file = tmp_path / f"rows{suffix}"

    def write(word):
        text = "".join(json.dumps({"text": f"{word} {i}"}) + "\n" for i in range(50))
        file.write_bytes(gzip.compress(text.encode()) if suffix.endswith("gz") else text.encode())

    write("one")
    stream = Stream(str(file), batch=4)
    next(stream)
    state = json.loads(json.dumps(stream.state_dict()))
    following = next(stream)
    stream.close()
    again = Stream(str(file), batch=4)
    again.load_state_dict(state)
    assert next(again) == following
    again.close()
    old = {key: value for key, value in state.items() if key != "content"}
    Stream(str(file), batch=4).load_state_dict(old)
    write("two")
    with pytest.raises(ValueError, match="rows of source 0 are not those that the state was saved with"):
        Stream(open_source(str(file)), batch=4).load_state_dict(state)


def test_a_file_with_a_bad_row_may_be_named_otherwise(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text('{"x": 1}\n{bad\n')
    monkeypatch.chdir(tmp_path)
    assert digest(open_source("rows.jsonl")) == digest(open_source(tmp_path / "rows.jsonl"))
    (tmp_path / "rows.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
    assert digest(open_source("rows.jsonl")) != digest([{"x": 1}, {"x": 3}])
