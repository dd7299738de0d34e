"""Sources of rows, one format a file."""

from tutti.data.sources.open import open_source
from tutti.data.sources.source import Joined, MappedStream, Regrouped, Source, StreamingSource

__all__ = ["Joined", "MappedStream", "Regrouped", "Source", "StreamingSource", "open_source"]
