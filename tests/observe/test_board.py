import errno
import io
import os

import pytest

from tutti.observe.board import Board
from tutti.observe.phases import append


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
