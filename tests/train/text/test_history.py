import math

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tutti.train.text.history import History, read, series


def test_lines_read_back_to_the_last_bit(tmp_path):
    values = [0.1 + 0.2, 1 / 3, 5e-324, math.pi]
    with History(tmp_path, 0) as history:
        for step, value in enumerate(values, 1):
            history.add(step, loss=value)
    assert series(read(tmp_path), "loss") == ([1, 2, 3, 4], values)


def test_every_line_is_there_before_the_history_is_closed(tmp_path):
    with History(tmp_path, 0) as history:
        history.add(1, loss=2.0, seconds=0.5)
        assert read(tmp_path) == [{"step": 1, "loss": 2.0, "seconds": 0.5}]


def test_what_an_interrupted_run_wrote_beyond_its_checkpoint_is_dropped(tmp_path):
    with History(tmp_path, 0) as history:
        for step in range(1, 6):
            history.add(step, loss=float(step))
    with History(tmp_path, 3) as history:
        history.add(4, loss=40.0)
    assert series(read(tmp_path), "loss") == ([1, 2, 3, 4], [1.0, 2.0, 3.0, 40.0])


def test_a_line_cut_short_by_a_crash_ends_the_history(tmp_path):
    (tmp_path / "history.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert read(tmp_path) == [{"step": 1, "loss": 2.0}]
    with History(tmp_path, 1) as history:
        history.add(2, loss=1.0)
    assert series(read(tmp_path), "loss") == ([1, 2], [2.0, 1.0])


def test_names_are_series_of_their_own(tmp_path):
    with History(tmp_path, 0) as history:
        history.add(1, loss=3.0)
        history.add(1, held_out_loss=4.0)
        history.add(2, loss=2.0)
    lines = read(tmp_path)
    assert series(lines, "loss") == ([1, 2], [3.0, 2.0])
    assert series(lines, "held_out_loss") == ([1], [4.0])
    assert series(lines, "other") == ([], [])


def test_tensorboard_has_the_same_values(tmp_path):
    with History(tmp_path, 0) as history:
        history.add(1, loss=3.0)
        history.add(2, loss=2.5)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(e.step, e.value) for e in board.Scalars("loss")] == [(1, 3.0), (2, 2.5)]


def test_the_other_ranks_write_nothing(tmp_path):
    with History(tmp_path, 0, write=False) as history:
        history.add(1, loss=3.0)
    assert list(tmp_path.iterdir()) == []
