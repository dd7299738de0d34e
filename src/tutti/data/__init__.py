"""Data: sources, mixtures, streams, packing, buckets, corpora, and the tokenizer and loader of `tutti train`.

Names are imported when they are used: the workers that prepare a corpus do without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tutti.data.buckets import bucket_lengths as bucket_lengths
    from tutti.data.buckets import pad_to_bucket as pad_to_bucket
    from tutti.data.mixture import Mixture as Mixture
    from tutti.data.packs import Packs as Packs
    from tutti.data.packs import pack_lengths as pack_lengths
    from tutti.data.packs import packed_batch as packed_batch
    from tutti.data.prefetch import Prefetch as Prefetch
    from tutti.data.reviews import Reviews as Reviews
    from tutti.data.rows import BadRow as BadRow
    from tutti.data.rows import Mapped as Mapped
    from tutti.data.rows import Numbered as Numbered
    from tutti.data.rows import Rows as Rows
    from tutti.data.sources import Source as Source
    from tutti.data.sources import StreamingSource as StreamingSource
    from tutti.data.sources import open_source as open_source
    from tutti.data.stream import Stream as Stream
    from tutti.data.tokenizer import train_tokenizer as train_tokenizer
    from tutti.data.tokenizer import train_wordpiece as train_wordpiece
    from tutti.data.windows import Windows as Windows

_MODULES = {
    "bucket_lengths": "buckets", "pad_to_bucket": "buckets", "Mixture": "mixture", "Packs": "packs",
    "pack_lengths": "packs", "packed_batch": "packs", "BadRow": "rows", "Mapped": "rows", "Numbered": "rows",
    "Rows": "rows", "Source": "sources", "StreamingSource": "sources", "open_source": "sources", "Stream": "stream",
    "Windows": "windows", "Prefetch": "prefetch", "Reviews": "reviews", "train_tokenizer": "tokenizer",
    "train_wordpiece": "tokenizer",
}  # fmt: skip

__all__ = list(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(f"tutti.data.{_MODULES[name]}"), name)
