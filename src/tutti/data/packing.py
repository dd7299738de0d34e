"""Pack documents into one memory-mapped array of tokens.

`NAME.bin` has the tokens (little-endian uint16, or uint32 for a vocabulary above 65,536), `NAME.json` their metadata.
Packing appends to `NAME.bin.partial` and records its progress in `NAME.json.partial`, so an interrupted run resumes
there. The finished files are renamed, the json last.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from tutti.data.text_folder import Document
from tutti.data.tokenizer import encode
from tutti.progress import Count, silent
from tutti.whole_files import write_text

_CHUNK = 64  # documents between two records of progress


@dataclass(frozen=True)
class Packed:
    """Packed tokens on disk: `tokens` tokens of `documents` documents with `text_bytes` bytes of text."""

    path: Path
    dtype: str
    tokens: int
    documents: int
    text_bytes: int

    def open(self) -> np.ndarray:
        """The tokens, (tokens,) unsigned, mapped read-only."""
        return np.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.tokens,))


def open_packed(folder: Path, name: str) -> Packed | None:
    """The finished result of `pack`, or None. Raises ValueError if the token file does not match its json."""
    meta = folder / f"{name}.json"
    if not meta.exists():
        return None
    packed = Packed(path=folder / f"{name}.bin", **json.loads(meta.read_text()))
    expected = packed.tokens * np.dtype(packed.dtype).itemsize
    actual = packed.path.stat().st_size if packed.path.exists() else 0
    if actual != expected:
        raise ValueError(f"{packed.path} has {actual} bytes instead of {expected}; delete {folder} to pack it again")
    return packed


def pack(
    folder: Path,
    name: str,
    tokenizer: PreTrainedTokenizerFast,
    documents: tuple[Document, ...],
    progress: Count = silent,
) -> Packed:
    """Encode the documents in order, each followed by the end-of-text token. `progress(done, total)` counts bytes.

    The result depends only on the documents and the tokenizer: name the folder after both.
    """
    done = open_packed(folder, name)
    if done is not None:
        return done
    folder.mkdir(parents=True, exist_ok=True)
    dtype = "<u2" if len(tokenizer) <= 2**16 else "<u4"
    binary, note = folder / f"{name}.bin.partial", folder / f"{name}.json.partial"
    packed, total = _resume(binary, note, dtype), sum(d.size for d in documents)
    with open(binary, "ab") as file:
        for start in range(packed.documents, len(documents), _CHUNK):
            chunk = documents[start : start + _CHUNK]
            rows = encode(tokenizer, [d.read() for d in chunk])
            ids = np.fromiter((i for row in rows for i in row), dtype=dtype)
            ids.tofile(file)
            file.flush()
            packed = Packed(
                binary,
                dtype,
                tokens=packed.tokens + len(ids),
                documents=packed.documents + len(chunk),
                text_bytes=packed.text_bytes + sum(d.size for d in chunk),
            )
            _write(note, packed)
            progress(packed.text_bytes, total)
        os.fsync(file.fileno())
    binary.rename(folder / f"{name}.bin")
    _write(folder / f"{name}.json", packed)
    note.unlink(missing_ok=True)
    return Packed(folder / f"{name}.bin", dtype, packed.tokens, packed.documents, packed.text_bytes)


def _resume(binary: Path, note: Path, dtype: str) -> Packed:
    """The progress of an interrupted packing. Tokens after the last record are cut off."""
    if not (note.exists() and binary.exists()):
        binary.unlink(missing_ok=True)
        return Packed(binary, dtype, 0, 0, 0)
    packed = Packed(binary, **json.loads(note.read_text()))
    size = packed.tokens * np.dtype(dtype).itemsize
    if binary.stat().st_size < size:  # the record was flushed to disk, the tokens were not
        binary.unlink()
        return Packed(binary, dtype, 0, 0, 0)
    os.truncate(binary, size)
    return packed


def _write(path: Path, packed: Packed) -> None:
    meta = {k: v for k, v in asdict(packed).items() if k != "path"}
    write_text(path, json.dumps(meta))
