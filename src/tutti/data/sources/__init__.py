"""Sources of rows, one format a file."""

from tutti.data.sources.open import open_source
from tutti.data.sources.source import Joined, Source, StreamingSource

__all__ = ["Joined", "Source", "StreamingSource", "open_source"]
