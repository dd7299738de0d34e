import json

import pytest

from recorded import SECONDS, write
from tutti.observe.recording import read
from tutti.observe.shares import shares


def test_where_the_time_goes(tmp_path):
    write(tmp_path, 4, slower={(2, "matmuls"): 2.0})
    per_rank = shares(read(tmp_path))
    assert per_rank[0].computing["matmuls"] == pytest.approx(SECONDS[0] + SECONDS[3], rel=0.05)
    assert per_rank[0].computing["rest"] == pytest.approx(SECONDS[1], rel=0.05)
    assert set(per_rank[0].waiting) == {2} and per_rank[0].waiting[2] == pytest.approx(SECONDS[0], rel=0.1)
    assert not per_rank[2].waiting
    for share in per_rank:
        assert share.moving["all_reduce", "dp"] == pytest.approx(SECONDS[2], rel=1e-3)
        assert share.other == pytest.approx(1e-3, rel=1e-3)


def test_clocks_of_machines_are_set_by_collectives(tmp_path):
    write(tmp_path / "a", 6, seed=3)
    write(tmp_path / "b", 6, seed=3, ahead={"one": 0, "two": 5 * 10**9, "three": -(10**8)})
    for one, other in zip(shares(read(tmp_path / "a")), shares(read(tmp_path / "b")), strict=True):
        assert one.waiting.keys() == other.waiting.keys()
        assert one.moving["all_reduce", "dp"] == pytest.approx(other.moving["all_reduce", "dp"], rel=1e-3)


def test_who_waits_late_for_a_collective_waits_for_whoever_began_it_last(tmp_path):
    calls = [
        {"label": "a", "phase": "backward", "kind": "rest"},
        {"label": "a", "phase": "backward", "kind": "all_reduce", "axis": "dp"},
        {"label": "b", "phase": "backward", "kind": "rest"},
        {"label": "a", "phase": "backward", "kind": "wait", "ends": 1},
    ]
    marks = [[0, 10, 11, 20, 50], [0, 40, 41, 49, 50]]  # rank 1 comes 30 later
    for rank in range(2):
        lines = [{"rank": rank, "ranks": 2, "host": "one", "groups": {"dp": [0, 1]}, "message": 1}]
        lines.append({"program": "train", "nodes": 4, "calls": calls})
        for step in (1, 2):
            lines.append({"step": step, "begin": 0, "end": 50, "runs": [["train", marks[rank]]], "links": {}})
        (tmp_path / f"rank-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second = shares(read(tmp_path))
    assert first.waiting == {1: pytest.approx(20e-9)}  # from 20 to 40
    assert first.moving["all_reduce", "dp"] == pytest.approx(11e-9)  # 10 to 11, where it begins, and 40 to 50
    assert not second.waiting


def test_of_many_ranks_the_newest_steps_are_read(tmp_path):
    write(tmp_path, 500, steps=9)
    assert read(tmp_path).steps == [5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("ranks", "said"), [((), "no recorded steps"), ((0,), "no recording of rank 1"), ((0, 1), "too few steps")]
)
def test_what_is_missing_is_said(tmp_path, ranks, said):
    write(tmp_path, 2, steps=1)
    for rank in {0, 1} - set(ranks):
        (tmp_path / f"rank-{rank}.jsonl").unlink()
    with pytest.raises(ValueError, match=said):
        read(tmp_path)
