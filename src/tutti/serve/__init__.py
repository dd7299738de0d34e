"""Inference and serving: an engine with continuous batching over a paged KV cache."""

from tutti.serve.draft import DraftModel
from tutti.serve.engine import Engine
from tutti.serve.request import Completion, Output, Request, Sampling
from tutti.serve.speculate import PromptLookup

__all__ = ["Completion", "DraftModel", "Engine", "Output", "PromptLookup", "Request", "Sampling"]
