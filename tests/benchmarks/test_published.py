"""The benchmark against published runs: every row names a plan, a cluster and a model that there are."""

import importlib
import sys
from pathlib import Path

import pytest

from tutti.hardware import Cluster
from tutti.plan.textbook import parse_name

PATH = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def published():
    sys.path.insert(0, str(PATH))
    try:
        yield importlib.import_module("published")
    finally:
        sys.path.remove(str(PATH))


def test_rows_are_complete(published):
    rows = published.published()
    assert {row["row"] for row in published.published(quick=True)} == set(published.QUICK)
    for row in rows:
        assert (published.DATA / row["config"]).is_file()
        parse_name(published.named(row)[0], Cluster.parse(row["cluster"]).size)
        assert row["global_batch"] % row["microbatches"] == 0 and row["step_seconds"] > 0


def test_errors_are_relative_to_what_was_published(published):
    row = {"row": "X", "config": "a.json", "cluster": "h100:8", "step_seconds": 2.0, "peak_gib": None,
           "source": "somebody (2024)"}  # fmt: skip
    prediction = {"plan": "dp8", "kind": published.DENSE, "predicted_seconds": 1.5, "predicted_gib": 40.0, "fits": True,
             "took": 1.0}  # fmt: skip
    judged_row = published.judged(row, prediction)
    assert judged_row["error"] == -0.25 and judged_row["memory_error"] is None and judged_row["source"] == "somebody"
    assert published.judged({**row, "peak_gib": 50.0}, prediction)["memory_error"] == -0.2
    kinds = published.by_kind([judged_row, {**judged_row, "error": 0.05, "memory_error": 0.1}])
    assert kinds[published.DENSE]["mean"] == 0.15 and kinds[published.MEMORY]["rows"] == 1
    assert published.EXPERTS not in kinds


def test_a_prediction_is_made_once(published, monkeypatch, tmp_path):
    monkeypatch.setattr(published.machine, "FOLDER", tmp_path)
    monkeypatch.setattr(published, "predicted", lambda row: {"predicted_seconds": row["step_seconds"]})
    first = published.cached({"row": "X1", "plan": "dp", "step_seconds": 1.0}, "source")
    monkeypatch.delattr(published, "predicted")
    assert published.cached({"row": "X1", "plan": "dp", "step_seconds": 1.0}, "source") == first
