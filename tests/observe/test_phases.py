import pytest

from tutti.observe.phases import Phases, read_phases


def test_what_was_written_beyond_a_checkpoint_goes(tmp_path):
    scalars = []
    with Phases(tmp_path, 3, scalar=lambda *said: scalars.append(said)) as phases:
        for step in (1, 2, 3):
            with phases("data"):
                pass
            with phases("data"), phases("step"):
                pass
            phases.end(step, peak_bytes=step)
    assert [name for name, *_ in scalars[:3]] == ["seconds/data", "seconds/step", "peak_bytes"]
    with open(tmp_path / "phases-3.jsonl", "a") as file:
        file.write('{"step": 4, "pha')
    with Phases(tmp_path, 3, step=2):
        assert [line["step"] for line in read_phases(tmp_path)[3]] == [1, 2]
    with Phases(tmp_path, 3):
        assert read_phases(tmp_path) == {3: []}


def test_time_counts_for_the_step_under_way(tmp_path):
    with Phases(tmp_path, 0) as phases:
        with phases("data"):
            pass
        phases.end(1)
        phases.end(2)
    first, second = read_phases(tmp_path)[0]
    assert first["phases"]["data"] == pytest.approx(0, abs=1) and second["phases"] == {}
