"""Build the wheel and try it as a new user would: in a clean environment without extras, then with each extra alone.

    python tools/check_install.py [--extras train serve ...] [--keep FOLDER]

Each environment runs the first example of the README, imports the public names of its extra, asks each verb for its
help, and loads it. A verb whose packages are missing must say which extra to install. Exits with 1 if anything fails.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMES = {  # extra -> what its users import first
    "": ["from tutti import parallelize, function, Store, Cluster, Plan, capture, jit, scan, optim, Checkpoints"],
    "train": ["from tutti import Trainer, TrainingArguments, pipeline", "from tutti.train.tasks import get_task"],
    "data": ["from tutti.data import Stream, open_source, Mixture"],
    "eval": ["from tutti.train.scores.text import bleu, rouge"],
    "serve": ["from tutti.serve import Engine, Sampling", "from tutti.serve.server.app import application"],
    "rl": ["from tutti.rl import PPO, DQN, SAC, make"],
    "science": ["from tutti.science.em.mt import MT2D, Mesh2D", "from tutti.science.em.fdtd import Simulation",
                "from tutti.science.em.cad import box", "from tutti.science.em.surrogate import Surrogate"],
    "peptides": ["from tutti.science.peptides.command import run"],
    "check": ["from tutti.check.samples import samples"],
}  # fmt: skip
UNSUITED = ("dev", "docs")  # extras for work on this project


def readme_example() -> str:
    """The first Python block of the README."""
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    return block[1]


def run(python: Path, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, *command], cwd=cwd, text=True, capture_output=True, timeout=600)


def check(python: Path, extra: str, verbs: dict[str, set[str]], cwd: Path) -> list[str]:
    """What fails in an environment."""
    failures = []

    def expect(what: str, done: subprocess.CompletedProcess[str], code: int, text: str = "") -> None:
        if done.returncode != code or text not in done.stdout + done.stderr:
            last = (done.stdout + done.stderr).strip().splitlines()[-1:]
            failures.append(f"[{extra}] {what}: exit code {done.returncode}, {' '.join(last)}")

    expect("README", run(python, "-W", "error::SyntaxWarning", "-c", readme_example(), cwd=cwd), 0)
    for statement in NAMES[""] + NAMES.get(extra, []):
        expect(statement, run(python, "-c", statement, cwd=cwd), 0)
    for verb, needs in verbs.items():
        expect(f"tutti {verb} --help", run(python, "-m", "tutti", verb, "--help", cwd=cwd), 0, "usage: ")
        done = run(python, "-m", "tutti", verb, "--zzz", cwd=cwd)  # loads the verb
        names_extra = "pip install 'tutti[" in done.stderr
        expect(f"tutti {verb} --zzz", done, 2)
        if names_extra and needs <= {extra}:
            failures.append(f"[{extra}] tutti {verb}: the extra does not suffice: {done.stderr.strip()}")
    return failures


def main() -> int:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    usual = [name for name in extras if name not in UNSUITED]
    parser.add_argument("--extras", nargs="*", default=usual, choices=usual, help="try these only")
    parser.add_argument("--keep", type=Path, help="make the environments here, and keep them")
    options = parser.parse_args()
    root = options.keep or Path(tempfile.mkdtemp(prefix="tutti-install-"))
    try:
        root.mkdir(parents=True, exist_ok=True)
        pip = ("-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--progress-bar", "off")
        subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps",
                        "--wheel-dir", root / "wheel", ROOT], check=True)  # fmt: skip
        (wheel,) = (root / "wheel").glob("*.whl")
        venv.create(root / "plain", with_pip=True)
        subprocess.run([root / "plain/bin/python", *pip, wheel], check=True)
        listing = "from tutti.cli import VERBS; print(*(f'{k}:{v.extra}' for k, v in VERBS.items()), sep='\\n')"
        lines = run(root / "plain/bin/python", "-c", listing, cwd=root).stdout.split()
        verbs = {
            verb: set(filter(None, needs.split(","))) for verb, _, needs in (line.partition(":") for line in lines)
        }
        failures = []
        for extra in ["", *options.extras]:
            folder = root / (extra or "plain")
            if extra:  # hard links: pip replaces files, and does not write into them
                shutil.rmtree(folder, ignore_errors=True)
                subprocess.run(["cp", "-al", root / "plain", folder], check=True)
                subprocess.run([folder / "bin/python", *pip, f"{wheel}[{extra}]"], check=True)
            faults = check(folder / "bin/python", extra, verbs, root)
            print(f"{extra or 'no extra':10s} {'ok' if not faults else f'{len(faults)} failures'}", flush=True)
            failures += faults
    finally:
        if options.keep is None:
            shutil.rmtree(root, ignore_errors=True)
    print(*failures, sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
