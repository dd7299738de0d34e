"""The verb `tutti corpus`: prepare a corpus, show what became of its documents, train models of quality."""

from __future__ import annotations

import inspect
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tutti.config.options import call_verb
from tutti.data.corpus import STEPS, Corpus, CorpusError, Source
from tutti.data.corpus.pipeline import finished
from tutti.data.corpus.report import HEAD, amount, rows
from tutti.launch.progress import LINE_EVERY, narrated
from tutti.progress import Count

First = tyro.conf.Positional


def run(
    config: First[Path],
    out: str | None = None,
    workers: int | None = None,
    memory: str | None = None,
    ray: bool = False,
) -> int:
    """Prepare the corpus that a config describes. The same command goes on where it was interrupted.

    Started on several machines by `tutti launch` or `tutti run`, all ranks share the work; --out must be a folder
    that all of them see. The exit code is 1 if files could not be read or tasks failed.

    Args:
        config: A TOML file; runs/code_corpus.toml is one.
        out: Folder of the result, instead of the config's.
        workers: Processes on this machine; by default one for each core. 0 works in this process.
        memory: What all workers may take for looking at hashes, such as "4 GB".
        ray: Do the work on a Ray cluster: that of RAY_ADDRESS, that which runs on this machine, or a new one.
    """
    from tutti.launch.launch import rank, under_launcher
    from tutti.train.corpus import load_pipeline

    console = Console(highlight=False, quiet=rank() > 0)
    pipeline = load_pipeline(config, out=out, memory=memory)
    pool: Any = None
    if ray and under_launcher():
        raise ValueError(
            "--ray is for a process of its own, which gives tasks to Ray; ranks of a job share them already"
        )
    if ray or under_launcher():
        from tutti.train.corpus_pools import Ranks, RayTasks

        pool = RayTasks() if ray else Ranks()
    begin = time.perf_counter()
    if pipeline.replaces:
        console.print(f"{pipeline.out} has a corpus of other sources or steps; this one replaces it when it is done")
    try:
        with _shown(console) as show, closing(pool) if pool else nullcontext():
            corpus = pipeline.run(workers, pool, show)
    except CorpusError as error:
        print(f"tutti corpus: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tutti corpus: interrupted; the same command goes on from here", file=sys.stderr)
        raise
    _show(corpus, console)
    console.print(f"{time.perf_counter() - begin:.0f} s; {corpus.folder}/report.html shows samples of what was dropped")
    return _faults(corpus)


def show(folder: First[Path]) -> int:
    """Show what each step of a finished corpus took in, gave out, and dropped and why.

    Args:
        folder: The folder of the corpus.
    """
    corpus = finished(folder)
    if corpus is None:
        raise ValueError(f"{folder} has no finished corpus; run `tutti corpus run CONFIG`")
    _show(corpus, Console(highlight=False))
    return _faults(corpus)


def steps() -> None:
    """List the steps of pipelines and their options."""
    console = Console(highlight=False)
    for name, step in STEPS.items():
        console.print(f"[bold]{name}[/bold]  {' '.join(f'{f.name}={_default(f)}' for f in fields(step))}")
        text = re.sub(r"(?<!\n)\n(?!\n|\w+: )", " ", inspect.cleandoc(step.__doc__ or ""))  # a line for each option
        console.print(Padding(Text(re.sub(" +", " ", text)), (0, 0, 1, 4)))


def model(
    kind: First[Literal["perplexity", "quality"]],
    out: Path,
    good: tuple[str, ...],
    bad: tuple[str, ...] = (),
    order: int = 3,
    text: str = "text",
) -> None:
    """Train a model of quality on examples of your own, for the steps `perplexity` and `quality`.

    Args:
        kind: perplexity: n-grams of good text. quality: a classifier of good and bad text.
        out: Folder of the model.
        good: Files, folders or patterns with good text.
        bad: Files, folders or patterns with bad text, for a classifier.
        order: Words of the longest n-gram.
        text: The field of records that has the text.
    """
    import pyarrow as pa

    from tutti.data.corpus.steps.perplexity import train_perplexity
    from tutti.data.corpus.steps.quality import train_quality

    console = Console(highlight=False)
    if kind == "perplexity":
        if bad:
            raise ValueError("--bad has no effect on a model of perplexity; give --good alone")
        info = train_perplexity((pa.array(t, pa.string()) for t in _texts(good, text)), out, order).info
        console.print(f"{out}: {', '.join(f'{n:,} {m + 1}-grams' for m, n in enumerate(info['n_grams']))}")
        return
    if not bad:
        raise ValueError("a classifier needs --bad, files with examples of bad text")
    examples = [[t for part in _texts(paths, text) for t in part] for paths in (good, bad)]
    scores = train_quality(examples[0], examples[1], out)
    console.print(
        f"{out}: on a tenth held out, accuracy {scores['accuracy']:.3f}, area under the ROC curve {scores['auc']:.3f}"
    )


def corpus(argv: list[str]) -> int | None:
    """Run `tutti corpus`."""
    verbs = {"run": run, "show": show, "steps": steps, "model": model}
    return call_verb(verbs, "tutti corpus", "Corpora.", argv)


def _texts(paths: tuple[str, ...], field: str) -> Iterator[list[str]]:
    from tutti.data.corpus.reading import read
    from tutti.data.corpus.reading.splits import splits_of

    documents, lost = 0, []
    for path in paths:
        for split in splits_of(Source(path, text=field), 1 << 40):
            for batch, dropped, _ in read(split, 1 << 26):
                documents += len(batch)
                lost += dropped[: max(0, 1 - len(lost))]
                yield batch.column("text").to_pylist()
    why = f"; others are none, such as {lost[0].id}: {lost[0].reason}, {lost[0].detail}" if lost else ""
    print(f"{', '.join(paths)}: {documents:,} documents{why}", file=sys.stderr)


def _show(corpus: Corpus, console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    columns = HEAD if any(a.cut for a in corpus.accounts) else HEAD[:-1]
    for k, name in enumerate(columns):
        table.add_column(name, justify="right" if 0 < k < 5 else "left", no_wrap=k == 0)
    for row in rows(corpus.accounts):
        table.add_row(*(cell.replace(", ", "\n") if k > 4 else cell for k, cell in enumerate(row[: len(columns)])))
    console.print(table)
    console.print(f"{corpus.documents:,} documents, {amount(corpus.manifest['bytes'])}, in {corpus.folder}/documents")


def _faults(corpus: Corpus) -> int:
    """Tell what was wrong with the input. Returns the exit code."""
    read = corpus.accounts[0]
    lost = read.documents_in - read.documents_out
    if lost > read.documents_out:
        reason = max(read.dropped, key=lambda r: read.dropped[r][0])
        detail = read.samples[reason][0]["detail"]
        print(
            f"tutti corpus: {lost:,} of {read.documents_in:,} records are no documents: {reason}, {detail}",
            file=sys.stderr,
        )
    if not corpus.documents:
        print("tutti corpus: no document is left", file=sys.stderr)
        return 1
    for fault in corpus.faults[:20]:
        print(f"{fault['file']}: {fault['reason']}: {fault['detail']}", file=sys.stderr)
    if len(corpus.faults) > 20:
        print(f"and {len(corpus.faults) - 20} more in {corpus.folder}/report.json", file=sys.stderr)
    return 1 if corpus.faults else 0


def _default(field: Any) -> str:
    from dataclasses import MISSING

    value = field.default if field.default is not MISSING else field.default_factory()
    return repr(list(value) if isinstance(value, tuple) else value)


@contextmanager
def _shown(console: Console) -> Iterator[Callable[[str], Count]]:
    """A function that shows the progress of a phase, and keeps a line of each that has ended."""
    with narrated(console, "reading", LINE_EVERY) as tell:

        def show(phase: str) -> Count:
            tell(phase)

            def count(done: int, total: int, rate: str = "", /) -> None:
                if done == total:
                    tell.result(f"{phase}: {done} of {total} {rate}".rstrip())
                else:
                    tell.count(done, total, rate)

            return count

        yield show
