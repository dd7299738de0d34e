"""The gallery: its models are those of their names, and its rows say what a plan takes or which cluster has one."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tutti.cli.plan.sweep import Point
from tutti.cli.plan.workload import StepWork
from tutti.hardware import Cluster
from tutti.tracing.load import load

PATH = Path(__file__).parents[2] / "benchmarks"
BILLIONS = {  # parameters, from the models' cards and papers
    "Mistral 7B": 7.25, "Qwen2.5 72B": 72.7, "Gemma-2 27B": 27.2, "Phi-4": 14.7, "BERT large": 0.335, "GPT-2 XL": 1.56,
    "Falcon 40B": 41.3, "MPT 7B": 6.65, "OLMo-2 13B": 13.7, "Mixtral 8x7B": 46.7, "gpt-oss 120B": 117,
    "Qwen3 235B-A22B": 235, "ViT 22B": 21.7,
}  # fmt: skip


@pytest.fixture(scope="module")
def gallery():
    sys.path.insert(0, str(PATH))
    try:
        yield importlib.import_module("gallery")
    finally:
        sys.path.remove(str(PATH))


def test_requests_name_models_and_clusters_that_there_are(gallery):
    assert len({request.model for request in gallery.REQUESTS}) == len(gallery.REQUESTS) == 20
    assert gallery.QUICK in {request.model for request in gallery.REQUESTS}
    for request in gallery.REQUESTS:
        assert (PATH / request.config).is_file()
    for cluster in gallery.CLUSTERS:
        assert Cluster.parse(cluster).device.name in gallery.PRICES


@pytest.mark.parametrize("model", BILLIONS)
def test_a_model_has_the_parameters_of_its_name(gallery, model):
    (request,) = (request for request in gallery.REQUESTS if request.model == model)
    network, _ = load(str(PATH / request.config), 2, request.seq)
    assert sum(p.numel() for p in network.parameters()) == pytest.approx(1e9 * BILLIONS[model], rel=0.01)


def test_rows(gallery):
    request, cluster = gallery.REQUESTS[0], Cluster.parse("h100:8")
    prediction = SimpleNamespace(step_seconds=2.0, fraction_of_peak=0.4, communication_seconds=0.1, bubble_seconds=0.0,
                                 peak_bytes=1 << 30)  # fmt: skip
    plan = SimpleNamespace(name="dp8", accumulate=1, predicted=prediction)
    row = gallery.row_of(request, "h100:8", Point(cluster, 4096, StepWork(2_000_000, "tokens"), plan, "yes"), 8, 1.0)
    assert row["device_hours"] == pytest.approx(1e12 / 1e6 / 3600 * 8)
    assert row["cost"] == pytest.approx(2.5 * row["device_hours"]) and row["command"].startswith("tutti plan --model ")
    none = Point(cluster, 4096, StepWork(1, "tokens"), why="no plan fits", enough="h100:2x8")
    row = gallery.row_of(request, "h100:8", none, 8, 1.0)
    assert (row["fits"], row["enough"]) == ("no", "h100:2x8") and "plan" not in row
