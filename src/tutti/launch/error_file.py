"""The error file that a failed rank leaves for its launcher, in the TorchElastic protocol."""

import json
import sysconfig
import time
import traceback
from pathlib import Path
from types import TracebackType

from torch.distributed.elastic.multiprocessing.errors import ErrorHandler
from torch.distributed.elastic.multiprocessing.errors import record as elastic

from tutti.launch.launch import is_plain, rank, world_size
from tutti.whole_files import write_text

_WORKER = str(Path(__file__).with_name("worker.py"))
_NOT_USER = (str(Path(__file__).parents[1]), "<frozen", sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"))


class ErrorFile(ErrorHandler):
    """TorchElastic's error file, with the fields that tell the cause of a failure from its consequences."""

    def record_exception(self, e: BaseException) -> None:
        if not self.left(e):  # no launcher reads it: print the traceback
            traceback.print_exception(e)

    def left(self, e: BaseException) -> bool:
        """Write the error file. Returns False if no launcher asked for one."""
        path = self._get_error_file_path()
        if not path:
            return False
        tb = _without_launcher(e.__traceback__)
        extra = {
            "py_callstack": "".join(traceback.format_exception(e.with_traceback(tb))) if tb else "",
            "timestamp": str(int(time.time())),
            "time_ns": time.time_ns(),
            "rank": rank(),
            "ranks": world_size(),
            "type": type(e).__name__,
            "text": str(e),
            "frame": frame_of_user(traceback.extract_tb(tb)),
            "plain": is_plain(e),
        }
        report = {"message": {"message": f"{type(e).__name__}: {e}", "extraInfo": extra}}
        write_text(Path(path), json.dumps(report))  # the launcher may read it, and end this process, at any time
        return True


def frame_of_user(frames: traceback.StackSummary) -> str:
    """`file:line in function: source` of the deepest frame in user code, else of the deepest frame."""
    own = [f for f in frames if not f.filename.startswith(_NOT_USER)] or frames[-1:]
    return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}: {own[-1].line}" if own else ""


def _without_launcher(tb: TracebackType | None) -> TracebackType | None:
    """The traceback without the leading frames of the worker, runpy and the `record` wrapper."""
    machinery = (_WORKER, "<frozen runpy>", elastic.__code__.co_filename)
    while tb is not None and tb.tb_next is not None and tb.tb_frame.f_code.co_filename in machinery:
        tb = tb.tb_next
    return tb
