"""Corpora: from raw pages to clean, deduplicated documents, on all cores or many machines, with every document
accounted for."""

from tutti.data.corpus.documents import Outcome
from tutti.data.corpus.pipeline import Corpus, CorpusError, Pipeline
from tutti.data.corpus.reading.documents import read_documents
from tutti.data.corpus.reading.splits import Source
from tutti.data.corpus.steps import STEPS
from tutti.data.corpus.steps.step import Function, Step

__all__ = ["STEPS", "Corpus", "CorpusError", "Function", "Outcome", "Pipeline", "Source", "Step", "read_documents"]
