"""Data: sources, mixtures, streams, packing, buckets, and the corpus, tokenizer and loader of `tutti train`."""

from tutti.data.buckets import bucket_lengths, pad_to_bucket
from tutti.data.mixture import Mixture
from tutti.data.packs import Packs, pack_lengths, packed_batch
from tutti.data.rows import BadRow, Mapped, Numbered, Rows
from tutti.data.sources import Source, StreamingSource, open_source
from tutti.data.stream import Stream
from tutti.data.windows import Windows

__all__ = [
    "BadRow", "Mapped", "Mixture", "Numbered", "Packs", "Rows", "Source", "Stream", "StreamingSource", "Windows",
    "bucket_lengths", "open_source", "pack_lengths", "packed_batch", "pad_to_bucket",
]  # fmt: skip
