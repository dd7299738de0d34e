"""Read text files from disk, and split them by content into training and held-out text."""

import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from hashlib import blake2b
from pathlib import Path

from tutti.progress import Count, silent

STDLIB = "stdlib"
"""The name of the corpus that every machine has: the source code of Python's standard library."""

_SKIPPED_FOLDERS = {"site-packages", "__pycache__", ".git"}


@dataclass(frozen=True)
class Document:
    """One file: `size` in bytes, `digest` of its content in hex."""

    path: Path
    size: int
    digest: str

    def read(self) -> str:
        return self.path.read_bytes().decode("utf-8")


@dataclass(frozen=True)
class Corpus:
    """The documents of a folder in path order, split in two, and the files that could not be used.

    `undecodable` files are not UTF-8; `unreadable` ones raised an OSError (path, reason). Empty files are skipped.
    """

    root: Path
    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    undecodable: tuple[Path, ...] = ()
    unreadable: tuple[tuple[Path, str], ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all documents."""
        return sum(d.size for d in (*self.train, *self.held_out))

    @property
    def key(self) -> str:
        """A hash of the content, order and split of the documents."""
        text = "\n".join([*(d.digest for d in self.train), "held out", *(d.digest for d in self.held_out)])
        return blake2b(text.encode(), digest_size=8).hexdigest()

    def summary(self) -> str:
        """`1786 files, 31.5 MB; 1750 to train on, 36 held out; 4 skipped (not UTF-8): a.py, ...`."""
        files = len(self.train) + len(self.held_out)
        parts = [f"{files} files, {self.size / 1e6:.1f} MB", f"{len(self.held_out)} of them held out"]
        if self.undecodable:
            parts.append(f"{len(self.undecodable)} skipped (not UTF-8): {_some(self.undecodable)}")
        if self.unreadable:
            paths = [p for p, _ in self.unreadable]
            parts.append(f"{len(paths)} unreadable ({self.unreadable[0][1]}): {_some(paths)}")
        return "; ".join(parts)


def read_corpus(
    source: str | Path,
    patterns: tuple[str, ...] = ("*",),
    held_out: float = 0.02,
    progress: Count = silent,
) -> Corpus:
    """Read the files under a folder whose names match a pattern.

    `source` is a folder or "stdlib". A document is held out if the hash of its content, as a fraction of all hashes, is
    below `held_out`, so the same text is on the same side on every machine, whatever other files there are. At least
    one document is held out unless `held_out` is 0. `progress(done, total)` counts files. Raises ValueError if there
    is nothing to read.
    """
    root = Path(sysconfig.get_path("stdlib")) if source == STDLIB else Path(source).expanduser()
    if not root.is_dir():
        raise ValueError(f"the corpus {source} is not a folder; give one, or {STDLIB!r} for Python's own source code")
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out must be in [0, 1), not {held_out}")
    unreadable: list[tuple[Path, str]] = []
    undecodable: list[Path] = []
    documents: list[Document] = []
    every = list(_files(root, lambda e: unreadable.append((Path(e.filename), _reason(e)))))
    paths = [p for p in every if any(fnmatch(p.name, pattern) for pattern in patterns)]
    for done, path in enumerate(paths):
        progress(done, len(paths))
        try:
            content = path.read_bytes()
            content.decode("utf-8")
        except OSError as e:
            unreadable.append((path, _reason(e)))
        except UnicodeDecodeError:
            undecodable.append(path)
        else:
            if content:
                documents.append(Document(path, len(content), blake2b(content, digest_size=16).hexdigest()))
    progress(len(paths), len(paths))
    if not documents:
        raise ValueError(_nothing(root, patterns, every, undecodable, unreadable))
    chosen = _held_out(documents, held_out)
    return Corpus(
        root,
        train=tuple(d for d in documents if d not in chosen),
        held_out=tuple(d for d in documents if d in chosen),
        undecodable=tuple(undecodable),
        unreadable=tuple(unreadable),
    )


def _held_out(documents: list[Document], fraction: float) -> set[Document]:
    if fraction == 0:
        return set()
    if len({d.digest for d in documents}) < 2:
        raise ValueError(f"one document cannot be both trained on and held out: {documents[0].path}")
    limit = int(fraction * 2**128)
    chosen = {d for d in documents if int(d.digest, 16) < limit}
    if chosen and len(chosen) < len(documents):
        return chosen
    lowest = min(d.digest for d in documents)
    return {d for d in documents if d.digest == lowest}


def _files(root: Path, report: Callable[[OSError], None]) -> Iterator[Path]:
    for folder, folders, names in os.walk(root, onerror=report):
        folders[:] = sorted(set(folders) - _SKIPPED_FOLDERS)
        yield from (Path(folder, name) for name in sorted(names))


def _nothing(
    root: Path,
    patterns: tuple[str, ...],
    every: list[Path],
    undecodable: list[Path],
    unreadable: list[tuple[Path, str]],
) -> str:
    """Why there are no documents, and what to do."""
    if not every and not unreadable:
        return f"the corpus folder {root} is empty"
    why = f"no readable text matches {', '.join(patterns)} under {root}"
    if undecodable:
        why += f"; {len(undecodable)} files are not UTF-8: {_some(undecodable)}"
    if unreadable:
        why += f"; {len(unreadable)} could not be read ({unreadable[0][1]}): {_some([p for p, _ in unreadable])}"
    endings = Counter(p.suffix or p.name for p in every).most_common(3)
    if endings and not undecodable and not unreadable:
        why += "; it holds " + ", ".join(f"{n} {ending}" for ending, n in endings)
    return why


def _reason(e: OSError) -> str:
    return e.strerror or type(e).__name__


def _some(paths: list[Path] | tuple[Path, ...]) -> str:
    return ", ".join(p.name for p in paths[:3]) + (", ..." if len(paths) > 3 else "")
