import json
from dataclasses import asdict

import pytest

from tutti.plan.plan import Plan, Prediction
from tutti.train.text.config import Config
from tutti.train.text.history import History
from tutti.train.text.report import costs, write_report

PLAN = Plan({"dp": 2}, prediction=Prediction(0.5, 0.4, 0.1, 1000, 0.4, 4_000_000))


@pytest.fixture
def folder(tmp_path):
    """A run of three steps, as the trainer leaves it."""
    with History(tmp_path, 0) as history:
        for step, (loss, seconds) in enumerate([(8.0, 9.0), (6.0, 0.4), (5.0, 0.6)], 1):
            history.add(step, loss=loss, seconds=seconds, data_seconds=0.02 * seconds)
        history.add(3, held_out_loss=5.25)
        history.add(3, peak_bytes=5_000_000)
    facts = {
        "cluster": "cpu:2",
        "dtype": "bfloat16",
        "plan": "dp 2",
        "explain": "dp because a < b",
        "parameters": 10_200_000,
        "shapes": {"layers.0.weight": [4, 4], "layers.1.weight": [4, 4]},
        "flops": 1e9,
        "peak_seconds": 0.3,
    }
    (tmp_path / "step.json").write_text(json.dumps(facts))
    (tmp_path / "run.json").write_text(json.dumps({"text": "", "config": asdict(Config())}))
    PLAN.save(tmp_path / "plan.json")
    return tmp_path


def test_the_page_has_everything_and_needs_nothing(folder):
    path = write_report(folder, sample="def f(x):\n    return x < 1")
    page = path.read_text()
    assert path == folder / "report.html" and page.startswith("<!doctype html>")
    for text in (
        "llama, 10.2 M parameters",
        "stdlib; 12,288 tokens seen in 3 steps",
        "6,827 tokens/s, 50% of bfloat16 peak",
        "steps waited 2.0% of that time for their batches",
        "8.000 at the first step, 5.000 at the last",
        "<td>held-out loss</td><td>5.250 on 8 batches; `tutti eval` takes all the text</td>",
        "<td>time of a step</td><td>500 ms</td><td>600 ms</td><td>1.20</td>",
        "<td>peak memory of rank 0, in tensors</td><td>4 MB</td><td>5 MB</td><td>1.25</td>",
        "dp because a &lt; b",
        "return x &lt; 1",
        "<td>optimizer.lr</td><td>0.001</td>",
    ):
        assert text in page, text
    assert page.count("<svg") == 2
    assert "<script" not in page and "src=" not in page and 'href="http' not in page


def test_without_a_prediction_or_a_measurement_the_page_says_so():
    rows = costs([{"step": 1, "seconds": 0.5}], Plan({"dp": 2}))
    assert rows[0] == ("time of a step", "not known", "500 ms", "")
    assert rows[1][1:] == ("not known", "not known", "")
