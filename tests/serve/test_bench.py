"""Measuring a server from outside: arrivals, what is noted, and the report."""

from __future__ import annotations

import itertools
import json

import pytest

from tutti.serve.bench import Arrival, Measured, poisson, report, table, trace


def test_poisson_arrivals():
    arrivals = poisson(4000, 5.0, (3, 9), (2, 4), seed=0)
    gaps = [b.at - a.at for a, b in itertools.pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.2, rel=0.05)
    assert (sum((x - mean) ** 2 for x in gaps) / len(gaps)) ** 0.5 == pytest.approx(0.2, rel=0.07)
    assert {x.prompt for x in arrivals} == set(range(3, 10)) and {x.tokens for x in arrivals} == {2, 3, 4}
    assert arrivals == poisson(4000, 5.0, (3, 9), (2, 4), seed=0)
    assert all(x.at == 0 for x in poisson(5, 0, (1, 1), (1, 1), 0))


def test_report():
    arrivals = [Arrival(0.0, 5, 3), Arrival(1.0, 5, 3), Arrival(1.0, 5, 3), Arrival(2.0, 5, 3)]
    measured = [
        Measured(arrivals[0], 200, "", [0.05, 0.07, 0.09], 3, 0.09),
        Measured(arrivals[1], 200, "", [1.5, 1.52, 1.54], 3, 1.54),
        Measured(arrivals[2], 429, "full"),
        Measured(arrivals[3], 200, "cut off", [2.1], 1, 2.1),
    ]
    summary = report(measured, ttft=0.1, tpot=0.05)
    assert summary.statuses == {"200": 2, "429": 1, "broken": 1} and summary.answered == 2
    assert summary.seconds == pytest.approx(1.54) and summary.throughput == pytest.approx(6 / 1.54)
    assert summary.goodput == pytest.approx(1 / 1.54)  # the second took too long to begin
    assert summary.ttft["p50"] == pytest.approx(0.275) and summary.tpot["mean"] == pytest.approx(0.02)
    assert "2 of 4 answered" in table(summary, 0.1, 0.05)


def test_traces(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"at": 0, "prompt": "hi", "tokens": 3}) + "\n")
    assert trace(path) == [Arrival(0.0, "hi", 3)]
    path.write_text('{"at": 0}\n')
    with pytest.raises(ValueError, match="line 1"):
        trace(path)
