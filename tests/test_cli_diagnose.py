import json

import pytest

from recorded import write
from tutti.cli import main
from tutti.observe.phases import Phases


@pytest.fixture
def recorded(tmp_path):
    write(tmp_path, 4, slower={(3, "matmuls"): 2.0}, links={(1, 2): 4.0})
    return tmp_path


def test_what_is_slow_is_said_in_words(recorded, capsys):
    for rank in range(2):
        with Phases(recorded, rank) as phases:
            for step in range(3):
                phases.seconds |= {"step": 0.1, "data": 0.05 * rank}
                phases.end(step)
    assert main(["diagnose", str(recorded)]) == 0
    out = capsys.readouterr().out
    assert "11 recorded steps, 2 to 12, on 4 ranks" in out
    assert "rank 3's matmuls run at 5" in out and "; the others wait for it 4" in out
    assert "link 1-2 at 0.2" in out
    assert "data takes 33% of rank 1's time, beside its steps" in out
    assert "rank 1 waits 50 ms a step for batches, 33.3% of its time" in out
    main(["diagnose", str(recorded), "--numbers", str(recorded / "n.json")])
    numbers = json.loads((recorded / "n.json").read_text())["data"]
    assert numbers == {"rank": 1, "seconds": pytest.approx(0.05), "share": pytest.approx(1 / 3)}


def test_communication_that_takes_longer_than_predicted(tmp_path, capsys):
    write(tmp_path, 2)
    predicted = {"seconds": 0.0142, "programs": {"train": [0, 4e-3, 1e-3, 2e-4, 0, 0, 8e-3]}, "panels": []}
    (tmp_path / "simulated.json").write_text(json.dumps(predicted))
    main(["diagnose", str(tmp_path)])
    out = capsys.readouterr().out
    assert "predicted 14.2 ms" in out and "all_reduce over dp takes 10.0 times what was predicted: 2 ms a step" in out
    assert "matmuls takes" not in out and "nothing is slow" not in out


def test_a_rank_whose_links_are_all_slow(tmp_path, capsys):
    write(tmp_path, 4, links={pair: 4.0 for other in range(4) for pair in ((2, other), (other, 2))})
    main(["diagnose", str(tmp_path)])
    out = capsys.readouterr().out
    assert "all links of rank 2 at 0.2" in out and "link " not in out.replace("all links", "")


def test_nothing_is_slow(tmp_path, capsys):
    write(tmp_path, 4)
    main(["diagnose", str(tmp_path)])
    out = capsys.readouterr().out
    assert "nothing is slow" in out and "batches" not in out  # without a training loop


def test_picture_timeline_and_numbers(recorded, tmp_path):
    files = [tmp_path / name for name in ("p.svg", "t.json", "n.json")]
    assert main(["diagnose", str(recorded), "--picture", str(files[0]), "--timeline", str(files[1]), "--numbers",
                 str(files[2])]) == 0  # fmt: skip
    assert "rank 3 computes" in files[0].read_text()
    events = json.loads(files[1].read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    numbers = json.loads(files[2].read_text())
    assert numbers["slow_ranks"][0]["rank"] == 3 and numbers["slow_links"][0]["source"] == 1


def test_a_folder_without_a_recording(tmp_path, capsys):
    assert main(["diagnose", str(tmp_path)]) == 2
    assert "has no recorded steps" in capsys.readouterr().err
