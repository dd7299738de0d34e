"""Inference and serving: an engine with continuous batching over a paged KV cache."""

from tutti.extras import extra

with extra("serve"):
    from tutti.serve.apart.disaggregate import Disaggregated, Remote, generate_for
    from tutti.serve.engine.draft import DraftModel
    from tutti.serve.engine.engine import Engine
    from tutti.serve.engine.request import Completion, Output, Request, Sampling
    from tutti.serve.engine.speculate import PromptLookup

__all__ = [
    "Completion",
    "Disaggregated",
    "DraftModel",
    "Engine",
    "Output",
    "PromptLookup",
    "Remote",
    "Request",
    "Sampling",
    "generate_for",
]
