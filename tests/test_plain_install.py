"""Without the packages of any extra: public names, the example of the README, and errors that name the extra.

`make install` tries the same with real environments.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = {"pyyaml": "yaml", "pillow": "PIL", "python-multipart": "multipart", "lm_eval": "lm_eval",
           "scikit-learn": "sklearn"}  # fmt: skip
BLOCKED = """
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder

class Plain(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {names!r} else super().find_spec(name, path, target)

sys.meta_path[:] = [BuiltinImporter, FrozenImporter, Plain]
"""


def without_extras(code: str) -> subprocess.CompletedProcess[str]:
    """Run code where no package of an extra can be imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    plain = {re.split(r"[\[><=]", x)[0] for x in project["dependencies"]}
    rest = {re.split(r"[\[><=]", x)[0] for extra in project["optional-dependencies"].values() for x in extra}
    names = {MODULES.get(x, x.replace("-", "_")) for x in rest - plain - {"tutti"}}
    return subprocess.run([sys.executable, "-c", BLOCKED.format(names=names) + code], capture_output=True, text=True)


def test_the_example_of_the_readme_runs():
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    code = "import tutti\nfor name in tutti.__dir__():\n    try:\n        getattr(tutti, name)\n" + (
        "    except ModuleNotFoundError as error:\n        print(name, error)\nprint(tutti.__version__)\n"
    )
    done = without_extras(code + example[1])
    assert done.returncode == 0, done.stderr
    lacking = [line.split()[0] for line in done.stdout.splitlines() if "pip install 'tutti[train]'" in line]
    assert lacking == ["Trainer", "TrainingArguments", "pipeline"] and "predicted step" in done.stdout


PICTURE = """
from pathlib import Path
from tutti.sim.picture import drawing
with drawing(Path("a.svg"), 1, 1):
    pass
"""


@pytest.mark.parametrize(
    ("statement", "extra"),
    [
        ("from tutti import Trainer", "train"),
        ("from tutti.rl import PPO", "rl"),
        ("from tutti.science.em.mt import MT2D", "science"),
        ("from tutti.cli import main; sys.exit(main(['peptides', 'run.toml']))", "peptides"),
        (PICTURE, "train"),
        ("from tutti.cli import main; sys.exit(main(['eval', 'nothing']))", "eval"),
        ("from tutti.cli import main; sys.exit(main(['bench-serve', 'nothing']))", "serve"),
    ],
)
def test_a_missing_package_names_the_extra(statement, extra):
    done = without_extras(statement)
    assert done.returncode and f"pip install 'tutti[{extra}]'" in done.stderr


def test_types_are_shipped():
    assert (ROOT / "src/tutti/py.typed").exists()
