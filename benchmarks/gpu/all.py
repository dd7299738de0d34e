"""All that is checked and measured on one GPU, most telling first, within some minutes.

    python benchmarks/gpu/all.py [--minutes 12] [--only tests,serve] [--out out/gpu]

Each step is a process with a time limit of its own. After every step `all.json` (what was found) and `all.log` (what
was printed) are written anew. Steps whose result is in `all.json` are skipped: the same command goes on where an
earlier one stopped. A step that the time does not suffice for is left out, and later ones that fit are run; one that
was running when the time ended is run again.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LEAST = 0.5  # a step is begun if this share of the seconds that it is expected to take is left
SCRATCH = Path(tempfile.gettempdir()) / f"tutti-gpu-{os.getpid()}"  # what is not kept
LOG_LENGTH = 60_000  # characters of the log of a step


@dataclass(frozen=True)
class Step:
    """A command. seconds: it is expected to take. limit: after which it is ended. beside: the name of a group whose
    steps run at the same time."""

    part: str
    name: str
    command: tuple[str, ...]
    seconds: float
    limit: float
    beside: str = ""


# --- the steps -------------------------------------------------------------------------------------------------------

VERSIONS = """
import importlib.metadata, json, platform, subprocess, sys
import torch, transformers
versions = {"python": platform.python_version(), "cpus": __import__("os").cpu_count(), "device": None}
for name in ("torch", "triton", "transformers", "diffusers", "numpy", "pytest"):
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        versions[name] = None
if torch.cuda.is_available():
    x = torch.ones(4, device="cuda").sum().item()
    versions |= {"device": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability(),
              "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
              "memory": torch.cuda.get_device_properties(0).total_memory}
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
    versions["driver, clocks, power"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
import tutti, zoo
print(json.dumps(versions))
"""

GPU, RULES = "tests/proofs/test_gpu.py", "tests/proofs/test_rules.py"
SHARDS: dict[str, tuple[str, ...]] = {  # arguments of pytest
    "O1": (GPU, "-k", "O1-single"),
    "O2": (GPU, "-k", "O2-single"),
    "tp2": (GPU, "-k", "O1-tp2"),
    "O0": (GPU, "-k", "O0 or engine"),
    "kernels": ("tests/nn/test_triton_kernels.py",),
    "operators": ("tests/nn/attention/test_paged_attention.py", "tests/science/fdtd/test_fdtd_gpu.py",
                  "tests/data/test_prefetch.py", "-k", "gpu"),
    "flash": (RULES, "-k", "flash_attention and not for_cpu"),
    "efficient": (RULES, "-k", "efficient_attention"),
    "cudnn": (RULES, "-k", "cudnn_attention and not backward"),
    "cudnn backward": (RULES, "-k", "cudnn_attention_backward"),
    "attention of the CPU": (RULES, "-k", "flash_attention_for_cpu"),
}  # fmt: skip
SCRIPTS: dict[str, tuple[tuple[str, float, tuple[str, ...]], ...]] = {  # part -> (name, seconds, arguments)
    "serve": (("serve", 150, ()),),
    "decode": (("decode", 40, ()),),
    "train_profile": (("train profile", 130, ()),),
    "train": tuple((f"train {name}", 90, ("--only", name)) for name in (
        "Llama 1B", "GPT-2 medium", "Mixtral, 1.5B", "ViT-L/16", "U-Net", "Llama 8B, 8 layers")),
    "offload": (("offload", 120, ("--quick",)),),
    "fdtd": (("fdtd", 60, ()),),
}  # fmt: skip


def pytest_step(name: str, arguments: Sequence[str]) -> Step:
    timeout = ("--timeout", "60") if importlib.util.find_spec("pytest_timeout") else ()
    command = (sys.executable, "-m", "pytest", *arguments, "-v", "-p", "no:xdist", "-p", "no:benchmark",
               "-o", "addopts=", "-o", "filterwarnings=default", "--tb=short", "-rfE", *timeout,
               f"--junitxml={junit(name)}")  # fmt: skip
    return Step("tests", f"tests {name}", command, 60, 150, beside="tests")


def junit(shard: str) -> Path:
    return SCRATCH / f"{shard.replace(' ', '-')}.xml"


def steps_of() -> list[Step]:
    """All steps, most telling first. Scripts of this folder that no table names are run last."""
    steps = [Step("device", "device", (sys.executable, "-c", VERSIONS), 30, 120)]
    steps += [pytest_step(name, arguments) for name, arguments in SHARDS.items()]
    others = {path.stem for path in HERE.glob("*.py")} - {"all", *SCRIPTS}
    scripts = SCRIPTS | {name: ((name, 60, ()),) for name in sorted(others)}
    for part, rows in scripts.items():
        path = HERE / f"{part}.py"
        if path.exists():
            steps += [Step(part, name, (sys.executable, str(path), *arguments), seconds, 2 * seconds)
                      for name, seconds, arguments in rows]  # fmt: skip
    return steps


# --- running them ----------------------------------------------------------------------------------------------------


def site_of() -> list[str]:
    """A folder that names the release of tutti, for benchmarks that tell it, where tutti is not installed."""
    try:
        importlib.metadata.version("tutti")
    except importlib.metadata.PackageNotFoundError:
        version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
        folder = SCRATCH / f"tutti-{version}.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tutti\nVersion: {version}\n")
        return [str(folder.parent)]
    return []


class Results:
    """What was found, in `all.json` and `all.log`."""

    def __init__(self, out: Path):
        self.lock = threading.Lock()
        self.json, self.log = out / "all.json", out / "all.log"
        out.mkdir(parents=True, exist_ok=True)
        self.steps: dict[str, dict[str, Any]] = json.loads(self.json.read_text()) if self.json.exists() else {}

    def add(self, step: Step, outcome: dict[str, Any], text: str) -> None:
        with self.lock:
            self.steps[step.name] = {"part": step.part, **outcome}
            with self.log.open("a") as log:
                log.write(f"===== {step.name}: {outcome['state']}, {outcome['seconds']:.1f} s\n{text[-LOG_LENGTH:]}\n")
            fresh = self.json.with_suffix(".new")
            fresh.write_text(json.dumps(self.steps, indent=1) + "\n")
            fresh.replace(self.json)


def execute(step: Step, left: float) -> tuple[dict[str, Any], str]:
    """Run a step; its figures and what it printed. left: seconds for all steps. state: passed, failed, slow (ended at
    its limit) or cut (ended with the time for all steps)."""
    begin = time.monotonic()
    threads = {} if step.part not in ("device", "tests") else {"TORCHINDUCTOR_COMPILE_THREADS": "4"}
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), *site_of(), *inherited])
    process = subprocess.Popen(step.command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
                               start_new_session=True, env={**os.environ, "PYTHONPATH": path, **threads})  # fmt: skip
    try:
        said, errors = process.communicate(timeout=max(0.1, min(step.limit, left)))
        state = "failed" if process.returncode else "passed"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, errors = process.communicate()
        state = "slow" if step.limit <= left else "cut"
    outcome = {"state": state, "code": process.returncode, "seconds": time.monotonic() - begin}
    for line in reversed(said.splitlines()):  # a benchmark's result is the last line that is an object
        if line.startswith("{"):
            try:
                outcome["result"] = json.loads(line)
                break
            except ValueError:
                continue
    return outcome, said + errors


def tests_in(path: Path) -> dict[str, dict[str, Any]]:
    """The tests of a junit file: outcome, seconds, and of a failure the first lines."""
    tests: dict[str, dict[str, Any]] = {}
    if not path.exists():
        return tests
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        row: dict[str, Any] = {"outcome": "passed", "seconds": float(case.get("time", 0))}
        for kind in ("failure", "error", "skipped"):
            if (problem := case.find(kind)) is not None:
                row |= {"outcome": kind, "message": (problem.get("message") or "")[:600]}
        tests[f"{case.get('classname')}::{case.get('name')}"] = row
    return tests


def run(
    steps: Sequence[Step], out: Path, seconds: float, workers: int = max(1, len(os.sched_getaffinity(0)) - 1)
) -> Results:
    """Run the steps that are not done and that the time suffices for. Steps of one group run side by side, at most
    `workers` of them."""
    results, end = Results(out), time.monotonic() + seconds
    todo = [step for step in steps if results.steps.get(step.name, {}).get("state", "cut") == "cut"]
    while todo:
        group = [step for step in todo if step.beside == todo[0].beside] if todo[0].beside else todo[:1]
        todo = [step for step in todo if step not in group]
        if end - time.monotonic() < LEAST * max(step.seconds for step in group):
            continue

        def one(step: Step) -> None:
            outcome, text = execute(step, end - time.monotonic())
            if step.part == "tests":
                outcome["tests"] = tests_in(junit(step.name.removeprefix("tests ")))
            results.add(step, outcome, text)
            print(f"{step.name}: {outcome['state']}, {outcome['seconds']:.1f} s", flush=True)

        with ThreadPoolExecutor(min(len(group), workers)) as pool:
            list(pool.map(one, group))
    return results


def table(steps: Sequence[Step], results: Results) -> str:
    """One line for each step; below, each test that failed, and the slowest."""
    lines, slow = [], []
    for step in steps:
        row = results.steps.get(step.name)
        if row is None:
            lines.append(f"{step.name:28} not run")
            continue
        tests = row.get("tests", {})
        counts = {kind: [t["outcome"] for t in tests.values()].count(kind)
                  for kind in ("passed", "failure", "error", "skipped")}  # fmt: skip
        shown = ", ".join(f"{n} {kind}" for kind, n in counts.items() if n)
        lines.append(f"{step.name:28} {row['state']:7} {row['seconds']:7.1f} s  {shown}")
        lines += [f"    {name}: {test['message'].splitlines()[0] if test['message'] else ''}"[:200]
                  for name, test in tests.items() if test["outcome"] in ("failure", "error")]  # fmt: skip
        slow += [(test["seconds"], name) for name, test in tests.items()]
    lines += [f"slow: {seconds:.1f} s {name}" for seconds, name in sorted(slow, reverse=True)[:8] if seconds > 1]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=12, help="all steps together")
    parser.add_argument("--only", default="", help="parts, by comma: device, tests, or a script of this folder")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu", help="folder of all.json and all.log")
    options = parser.parse_args()
    out = options.out.resolve()
    steps, parts = steps_of(), [*filter(None, options.only.split(","))]
    if strangers := {*parts} - {step.part for step in steps}:
        parser.error(f"there is no part {', '.join(sorted(strangers))}; there are {sorted({s.part for s in steps})}")
    steps = [step for step in steps if not parts or step.part in ("device", *parts)]
    print(table(steps, run(steps, out, 60 * options.minutes)))
    shutil.rmtree(SCRATCH, ignore_errors=True)


if __name__ == "__main__":
    main()
