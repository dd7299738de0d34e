import json

import transformers

import tutti.models
from tutti.models import TYPES, register


def test_types_are_those_of_the_modules():
    register()
    for kind, module in TYPES.items():
        config = transformers.AutoConfig.for_model(kind)
        assert config.model_type == kind and type(config).__module__ == module


def test_a_folder_registers_its_own_type_only(tmp_path, monkeypatch):
    imported = []
    monkeypatch.setattr(tutti.models, "import_module", imported.append)
    register(tmp_path)
    for kind in ("peptide", "llama"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        register(tmp_path)
    assert imported == ["tutti.models.peptides"]
