import errno
import io
import os

import pytest

from tutti.observe.board import Board
from tutti.observe.phases import append, named


def test_a_full_disk_ends_the_logs_and_nothing_else(tmp_path):
    board = Board(tmp_path / "logs", 3)
    board.add_scalar("loss", 1.0, 4)

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    board.writer.add_scalar = full
    with pytest.warns(UserWarning, match=r"no more logs for TensorBoard in .*logs: No space left on device"):
        board.add_scalar("loss", 2.0, 5)
    board.add_scalar("loss", 3.0, 6)
    board.flush()
    board.close()


def test_a_line_that_cannot_be_written_names_its_file():
    class Full(io.StringIO):
        name = "history.jsonl"

        def write(self, text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match=r"No space left on device: 'history\.jsonl'"):
        append(Full(), "{}\n")


def test_a_disk_that_is_full_from_the_beginning(tmp_path, monkeypatch):
    def full(*args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", full)
    with pytest.warns(UserWarning, match="no more logs for TensorBoard in .*: No space left on device"):
        board = Board(tmp_path / "logs")
    board.add_scalar("loss", 1.0, 1)
    board.close()


def test_a_full_disk_is_named_also_where_the_file_is_closed():
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"), open("/dev/full", "w") as file:
        try:
            append(file, "{}\n")  # into the buffer
        finally:
            with named(file):
                file.close()
