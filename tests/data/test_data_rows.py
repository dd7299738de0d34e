import pytest

from tutti.data.rows import Mapped, Numbered, column

ROWS = [{"x": 1}, {"x": 2}, {"x": 3}]


def test_a_map_is_computed_when_read():
    seen = []
    mapped = Mapped(ROWS, lambda row: seen.append(row) or {"y": -row["x"]})
    assert len(mapped) == 3 and not seen
    assert mapped[-1] == {"y": -3} and [row["y"] for row in mapped] == [-1, -2, -3]
    with pytest.raises(IndexError, match="row 3 of 3"):
        mapped[3]


def test_numbers_pass_through_a_map():
    assert Mapped(Numbered(ROWS), lambda row: {"y": row["x"]})[2] == {"sample_index": 2, "y": 3}
    assert Numbered([{"sample_index": 9}])[0] == {"sample_index": 9}


def test_a_column_that_is_missing():
    assert column({"x": 1}, "x") == 1
    with pytest.raises(ValueError, match=r"the row has no column 'label'; the nearest is 'labels'; its columns are"):
        column({"labels": 1, "sample_index": 4}, "label")
