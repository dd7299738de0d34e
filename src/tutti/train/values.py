"""Types of values that pass through the Trainer, whose own libraries leave them open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Row = dict[str, Any]  # a row of a data set, by column
Rows = Any  # a list of rows, a `datasets.Dataset`, an iterable, or a data set of `tutti.data`
Processor = Any  # a tokenizer, image processor, feature extractor or processor of transformers
Outputs = Any  # of a model: a `ModelOutput`, a tuple or a tensor
NamedValues = dict[str, Any]  # options, facts or state, by name
ReadRow = Mapping[str, Any]  # a row that is only read
Inputs = Mapping[str, object]  # a batch that is only read: tensors and plain values, by argument of the model
