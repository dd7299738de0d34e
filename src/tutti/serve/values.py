"""Types of values that pass through the server, whose own libraries leave them open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Json = dict[str, Any]  # an object of JSON, or options by name
JsonView = Mapping[str, Any]  # one that is only read
JsonValue = Any  # any value of JSON, also one of a client that is not checked yet
Prompt = Sequence[int] | str  # of a request
Tokenizer = Any  # of transformers, or one with its methods
Processor = Any  # of transformers: a tokenizer, and what reads images or sound
Model = Any  # of transformers, or a module or config of one: attributes differ by family
EncoderInputs = Mapping[str, Any]  # of a request: what an encoder reads, by argument of the model
