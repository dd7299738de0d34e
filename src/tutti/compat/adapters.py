"""Low-rank adapters of the package `peft`."""

from __future__ import annotations

import warnings
from typing import Any


def peft_model(model: Any, config: Any, **options: Any) -> Any:
    """`peft.get_peft_model`, without a warning about an alias of transformers that peft reads: users cannot change
    that. Other warnings remain."""
    import peft

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return peft.get_peft_model(model, config, **options)
