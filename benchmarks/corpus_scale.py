"""Time and memory of Tutti's preparation of a corpus at ten times the documents, with 256 MB for looking at hashes.

    python benchmarks/corpus_scale.py [--quick]

The recipe has every step that needs all documents (exact, near, repeated lines, repeated runs of 50 words) beside
repair, language, the rules of FineWeb and masking. Two workers. `CPU seconds` are of all processes. `peak memory` is
the largest sum of their resident memory, sampled, so what they share counts several times. `working` is what is on disk
at the most, as a multiple of the text. A picture is drawn beside the result.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import corpus
import harness
import planted_corpus

SIZES = (100_000_000, 300_000_000, 1_000_000_000)


def measured(folder: Path, size: int) -> dict[str, Any]:
    documents = planted_corpus.write(folder / "planted", size)["documents"]
    out, script = folder / "out", Path(__file__).with_name("corpus_tutti.py")
    ended, most = threading.Event(), [0]
    watch = threading.Thread(target=_watch, args=(out, ended, most))
    watch.start()
    run = corpus.measured("tutti_all", [sys.executable, script, "all", folder / "planted/documents", out], out,
                          documents, 3600.0)  # fmt: skip
    ended.set()
    watch.join()
    row = {"bytes": size, "documents": documents, "kept": len(run.survivors), "CPU seconds": run.cpu,
           "seconds": run.seconds, "peak memory": run.peak, "working": most[0] / size}  # fmt: skip
    harness.say(f"{size / 1e6:.0f} MB: {run.cpu:.1f} CPU s, {run.seconds:.1f} s, {run.peak / 1e6:.0f} MB, "
                f"{row['working']:.2f} of the text on disk")  # fmt: skip
    return row


def _watch(out: Path, ended: threading.Event, most: list[int]) -> None:
    while not ended.wait(0.5):
        sizes = []
        for path in out.rglob("*"):
            try:
                sizes.append(path.stat().st_size)
            except OSError:  # it has just been renamed
                continue
        most[0] = max(most[0], sum(sizes))


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    sizes = [r["bytes"] / 1e6 for r in rows]
    left.plot(sizes, [r["CPU seconds"] for r in rows], "o-", color="#3566a8", label="measured")
    slope = rows[-1]["CPU seconds"] / sizes[-1]
    left.plot([0, sizes[-1]], [0, slope * sizes[-1]], ":", color="#888888", label="in proportion to the text")
    left.set(xlabel="text (MB)", ylabel="CPU seconds", ylim=(0, None), xlim=(0, None))
    left.legend(frameon=False)
    right.plot(sizes, [r["peak memory"] / 1e6 for r in rows], "o-", color="#c4572f")
    right.set(xlabel="text (MB)", ylabel="memory of all processes (MB)", ylim=(0, None), xlim=(0, None))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 and 10 MB")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for corpus_scale.json and its picture")
    options = parser.parse_args()
    rows = []
    for size in (5_000_000, 10_000_000) if options.quick else SIZES:
        with tempfile.TemporaryDirectory() as temporary:
            rows.append(measured(Path(temporary), size))
    options.out.mkdir(parents=True, exist_ok=True)
    result = {"benchmark": "corpus_scale", **harness.environment(), "rows": rows}
    (options.out / "corpus_scale.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(rows, options.out / "corpus_scale.svg")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
