"""Who holds up a job, told from reports alone."""

from __future__ import annotations

import os

import pytest
import torch
from torch import fx

from tutti import compat
from tutti.compile.compiled import Compiled
from tutti.launch.hang import HangReport, verdict
from tutti.launch.heartbeat import HEARTBEAT, Heartbeat, Meeting
from tutti.launch.watchdog import Watchdog


def waits(meeting: str = "all_reduce of 3/mlp over tp", seconds: float = 61, peers=None) -> HangReport:
    return HangReport(1, True, seconds, "in step 41", meeting=meeting, peers=peers)


def works(seconds: float = 62, stuck: bool = True, **what) -> HangReport:
    return HangReport(1, stuck, seconds, "in step 41", **what)


def test_who_does_not_come_is_named_with_what_the_others_wait_in():
    said = verdict({0: waits(), 1: waits(), 2: works(at="loader.py:7 in read: f.read()"), 3: waits()}, {}, 4)
    assert said == (
        "rank 2 of 4 has not reached all_reduce of 3/mlp over tp (in step 41): it has been in step 41 for 62 s, at "
        "loader.py:7 in read: f.read(); ranks 0, 1, 3 wait there for 61 s"
    )


def test_what_a_rank_is_waited_for_in_is_what_it_takes_part_in():
    others = waits("all_gather of 1/attn over dp", peers=[0, 1])
    said = verdict({0: others, 1: others, 2: works(), 3: waits(peers=[2, 3])}, {}, 4)
    assert said and said.startswith("rank 2 of 4 has not reached all_reduce of 3/mlp over tp")
    assert said.endswith("rank 3 waits there for 61 s; ranks 0, 1 wait in all_gather of 1/attn over dp (in step 41)")


@pytest.mark.parametrize("alive", [works(stuck=False), HangReport(1, False, 1, meeting="all_reduce of x")])
def test_nobody_hangs_while_any_rank_gets_on(alive):
    assert verdict({0: waits(), 1: alive}, {}, 2) is None


def test_who_says_nothing_is_named_and_who_has_left_is_not():
    last = HangReport(1, where="in step 9", process=os.getpid())
    said = verdict({0: waits(), 1: last, 2: HangReport(4, left=True)}, {1: 31.0}, 3)
    detail = "all_reduce of 3/mlp over tp (in step 41): it has sent no heartbeat for 31 s, last in step 9: process"
    assert said and said.startswith(f"rank 1 of 3 has not reached {detail}")
    assert "first heartbeat" in (verdict({0: waits()}, {1: 31.0}, 2) or "")
    assert (
        verdict({0: works(), 1: HangReport(1, left=True)}, {}, 2)
        == "rank 0 of 2 hangs: it has been in step 41 for 62 s"
    )


def test_of_ranks_that_wait_for_one_another_all_are_told():
    said = verdict({0: waits("send of a"), 1: waits("send of b")}, {}, 2)
    waiting = "rank 0 waits in send of a (in step 41); rank 1 waits in send of b (in step 41)"
    assert said == f"all ranks of 2 wait for one another: {waiting}"


def test_a_report_goes_through_the_store():
    report = works(at="x", peers=[1, 2])
    assert HangReport.from_json(report.to_json()) == report


def test_a_position_knows_whom_a_communication_takes():
    here = Heartbeat()
    here.place(2, {"pp": 2, "dp": 2, "tp": 2})
    assert here.peers() is None
    expected = {
        Meeting("ppermute", "dp tp", ""): [0, 2, 3],
        Meeting("all_gather", "tp", ""): [2, 3],
        Meeting("receive", "pp", "x", 6): [2, 6],
        Meeting("broadcast", "", ""): None,
    }
    for meeting, peers in expected.items():
        here.enter(meeting)
        assert here.peers() == peers


def test_compiling_is_known_to_take_long(monkeypatch):
    seen, before = [], HEARTBEAT.moves
    monkeypatch.setattr(compat, "compile_graph", lambda graph, args, modules: seen.append(HEARTBEAT.busy) or torch.sin)
    function = Compiled(fx.Graph())
    assert torch.equal(function(torch.ones(3)), torch.ones(3).sin())
    assert seen == ["compiles"] and HEARTBEAT.busy == "" and HEARTBEAT.moves > before


def test_patience_is_more_than_nothing(tmp_path):
    with pytest.raises(ValueError, match="needs more than 0 seconds"):
        Watchdog(0, tmp_path)
