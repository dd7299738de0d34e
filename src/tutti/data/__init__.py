"""Data: sources, mixtures, streams, packing, buckets, and the corpus, tokenizer and loader of `tutti train`."""

from tutti.data.buckets import bucket_lengths, pad_to_bucket
from tutti.data.rows import Mapped, Numbered, Rows

__all__ = ["Mapped", "Numbered", "Rows", "bucket_lengths", "pad_to_bucket"]
