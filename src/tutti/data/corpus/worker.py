"""A worker process of `Processes`: `python -m tutti.data.corpus.worker DESCRIPTOR LIBRARY PARENT`.

It takes tasks from a connection, and answers ("tick", (documents, bytes)), ("done", None) or ("error", (why, disk is
full)).
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from multiprocessing.connection import Connection

import pyarrow as pa

from tutti.data.corpus import native
from tutti.data.corpus.pool import described, is_full
from tutti.data.corpus.shard import Context
from tutti.data.corpus.tasks import carry_out


class _Telling(Context):
    def __init__(self, connection: Connection, careful: bool):
        self.connection, self.careful = connection, careful

    def tick(self, documents: int, size: int) -> None:
        self.connection.send(("tick", (documents, size)))


def main(descriptor: int, library: str, parent: int) -> None:
    _end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    native.use(library)
    native.library()
    connection = Connection(descriptor)
    connection.send(("ready", None))
    while True:
        try:
            task, careful = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        except Exception as error:  # a function of a module that cannot be imported here
            connection.send(("error", (f"{described(error)}; put functions of steps into a module", False)))
            continue
        try:
            carry_out(task, _Telling(connection, careful))
            connection.send(("done", None))
        except Exception as error:
            connection.send(("error", (described(error), is_full(error))))


def _end_with(parent: int) -> None:
    """End this process when the one that gives tasks is gone, in the middle of a task, too."""
    try:
        descriptor = os.pidfd_open(parent)
    except (OSError, AttributeError):  # not Linux, or gone already: the connection ends with the task
        return

    def watch() -> None:
        select.select([descriptor], [], [])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
