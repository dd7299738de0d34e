"""What all tests share: one thread, one pool of Gloo processes for the whole session, tiers and budgets."""

from __future__ import annotations

import gc
import json
import os
import statistics
from collections import defaultdict

import pytest
import torch

from gloo import Pool
from zoo import CONFIG

torch.set_num_threads(1)
gc.set_threshold(20_000, 20, 20)  # graphs are many small objects
os.environ["TUTTI_PLANS"] = "off"  # each search anew

# Seconds that the tests of each folder usually take on two cores, summed over workers.
USUAL = {
    "tests": 95, "tests/analysis": 25, "tests/api": 50, "tests/benchmarks": 8, "tests/check": 15,
    "tests/checkpoint": 40, "tests/compile": 10, "tests/data": 25, "tests/exec": 95, "tests/hardware": 8,
    "tests/ir": 5, "tests/launch": 45, "tests/lower": 87, "tests/models": 20, "tests/nn": 45, "tests/observe": 12,
    "tests/ops": 14, "tests/optim": 20, "tests/plan": 80, "tests/proofs": 440, "tests/rl": 60,
    "tests/science": 60, "tests/serve": 140, "tests/sim": 38,
    "tests/tracing": 22, "tests/train": 230,
}  # fmt: skip
TIMES, SLACK = 4.0, 120.0  # a folder may take so many times as long, and so many seconds more
EACH = 3
SLOWEST = 4.0  # times as slow may a machine be, or as busy with other work


def folder_of(node: str) -> str:
    parts = node.partition("::")[0].split("/")
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


def pytest_itemcollected(item):
    """The tiers: `slow` is what is marked so, `proof` the rest of tests/proofs, `unit` what starts neither a process
    nor a compiler."""
    if item.get_closest_marker("slow"):
        return
    if folder_of(item.nodeid) == "tests/proofs":
        item.add_marker(pytest.mark.proof)
    elif "pool" not in item.fixturenames and not item.get_closest_marker("starts"):
        item.add_marker(pytest.mark.unit)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of a proof with many cases, none of which is marked, one in `EACH` is quick and the others are slow."""
    cases = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and folder_of(item.nodeid) == "tests/proofs":
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_proof in cases.values():
        if len(of_proof) > EACH and not any(item.get_closest_marker("slow") for item in of_proof):
            for i, item in enumerate(of_proof):
                if i % EACH:
                    item.add_marker(pytest.mark.slow)


def seconds_by_folder(config) -> dict[str, float]:
    """Of the tests that were run, with what prepares them and cleans up."""
    found: dict[str, float] = defaultdict(float)
    for reports in config.pluginmanager.get_plugin("terminalreporter").stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                found[folder_of(report.nodeid)] += report.duration
    return found


def over_budget(found: dict[str, float]) -> list[str]:
    """Folders that take much longer than usual. How slow this machine is the median of all folders says."""
    slowness = statistics.median(found.get(folder, 0.0) / usual for folder, usual in USUAL.items())
    most = TIMES * min(max(slowness, 1.0), SLOWEST)
    return [folder for folder, usual in USUAL.items() if found.get(folder, 0.0) > most * usual + SLACK]


def is_whole(config) -> bool:
    """Whether all quick tests are run, and not a selection of them."""
    options = config.option
    chosen = (
        options.collectonly or options.markexpr != "not slow" or options.keyword or options.deselect or options.ignore
    )
    return config.args_source is config.ArgsSource.TESTPATHS and not chosen and not getattr(options, "lf", False)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    config = session.config
    reports = config.pluginmanager.get_plugin("terminalreporter")  # none in the workers of xdist
    if exitstatus == 0 and reports and is_whole(config) and over_budget(seconds_by_folder(config)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    """Seconds by folder, where the whole suite has been run."""
    if not is_whole(config):
        return
    found = seconds_by_folder(config)
    over = over_budget(found)
    terminalreporter.section("seconds of tests, summed over workers")
    for folder in sorted(found):
        usual = f"usually {USUAL[folder]:.0f}" if folder in USUAL else "no budget: add it to USUAL in conftest.py"
        too_long = ", OVER BUDGET" if folder in over else ""
        terminalreporter.line(f"{folder:<18}{found[folder]:>7.0f}  {usual}{too_long}")


@pytest.fixture(scope="module", autouse=True)
def _collect_no_more():
    """Of what earlier tests left (a million objects in the end) the garbage collector need not look at any again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pool():
    """Four Gloo ranks; started with the first test that asks for them."""
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The folder of a tiny Llama, as the commands take it."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder
