"""Models that transformers lacks, and fused parts for models that it has.

from tutti.models import register

register()  # AutoConfig, AutoModelForCausalLM and others then know the types in TYPES
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

from tutti.extras import extra

TYPES = {
    "dlrm": "tutti.models.dlrm",
    "edsr": "tutti.models.edsr",
    "pangu_alpha": "tutti.models.pangu_alpha",
    "pangu_beta": "tutti.models.pangu_beta",
    "peptide": "tutti.models.peptides",
    "wide_deep": "tutti.models.wide_deep",
}
"""`model_type` of a configuration -> the module that has it."""


def register(folder: str | Path | None = None) -> None:
    """Make the model types of this package known to the Auto classes of transformers.

    folder: folder of a saved model; only its type is registered, and nothing if it is a type of transformers.
    """
    kinds = list(TYPES)
    if folder is not None:
        file = Path(folder, "config.json")
        kind = json.loads(file.read_text()).get("model_type") if file.exists() else None
        kinds = [kind] if kind in TYPES else []
    with extra("train"):
        for kind in kinds:
            import_module(TYPES[kind])
