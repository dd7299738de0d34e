import json
import subprocess
import sys

import transformers

from tutti.models import TYPES, register


def test_types_are_those_of_the_modules():
    register()
    for kind, module in TYPES.items():
        config = transformers.AutoConfig.for_model(kind)
        assert config.model_type == kind and type(config).__module__ == module


def test_a_folder_registers_its_own_type_only(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "peptide"}))
    code = (
        f"import sys; from tutti.models import register; register({str(tmp_path)!r});"
        "print(*sorted(x for x in sys.modules if x.startswith('tutti.models.')))"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.split() == ["tutti.models.blocks", "tutti.models.peptides"]
