"""Windows of a long array of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from tutti.data.rows import Rows


class Windows(Rows):
    """Consecutive windows of `length` tokens; tokens after the last full one are left out.

    tokens: (tokens,) integers, in memory or mapped (`tutti.data.packing.Packed.open`).
    """

    def __init__(self, tokens: np.ndarray, length: int):
        if len(tokens) < length:
            raise ValueError(f"the text has {len(tokens)} tokens, fewer than a window of {length}; lower length")
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def row(self, i: int) -> dict[str, Any]:
        return {"input_ids": self.tokens[i * self.length : (i + 1) * self.length].astype(np.int64)}
