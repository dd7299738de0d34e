"""What all tests share: one thread, one pool of Gloo processes for the whole session, tiers and budgets."""

from __future__ import annotations

import gc
import json
import os
import resource
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from gloo import Pool
from zoo import CONFIG

torch.set_num_threads(1)
settings.register_profile("suite", deadline=None)  # the machine may be busy
settings.load_profile("suite")
gc.set_threshold(20_000, 20, 20)  # graphs are many small objects
os.environ["TUTTI_PLANS"] = "off"  # each search anew

TESTS = Path(__file__).parent
CEILING = 3000.0  # CPU seconds of `make test`, which takes 1,350, and up to twice as much on a busy machine


def pytest_addoption(parser):
    parser.addoption("--whole", action="store_true", help="run the slow tests too")


def pytest_configure(config):
    if config.option.whole:
        config.option.markexpr = ""


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


def listed(name: str) -> list[str]:
    """The tests that a file of this folder lists: a test function, or one of its cases."""
    return [line for line in (TESTS / name).read_text().splitlines() if line and not line.startswith("#")]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Tests are slow by name: those that slow.txt lists, and the proofs that quick_proofs.txt does not list."""
    slow, quick = set(listed("slow.txt")), set(listed("quick_proofs.txt"))
    for item in items:
        names = {item.nodeid, item.nodeid.partition("[")[0]}
        is_proof = folder_of(item.nodeid) == "tests/proofs"
        if names & slow or (is_proof and not names & quick):
            item.add_marker(pytest.mark.slow)
    if is_whole(config):
        there = {name for item in items for name in (item.nodeid, item.nodeid.partition("[")[0])}
        if strangers := sorted((slow | quick) - there):
            raise pytest.UsageError(f"slow.txt or quick_proofs.txt list a test that is not there: {strangers[0]}")


def is_whole(config) -> bool:
    """Whether all quick tests are run, and not a selection of them."""
    options = config.option
    chosen = (
        options.collectonly or options.markexpr != "not slow" or options.keyword or options.deselect or options.ignore
    )
    return config.args_source is config.ArgsSource.TESTPATHS and not chosen and not getattr(options, "lf", False)


def cpu_seconds() -> float:
    """CPU time of this process and of those that it has started."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # of xdist
        session.config.workeroutput["cpu"] = cpu_seconds()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    node.config.stash[CPU] = node.config.stash.get(CPU, 0.0) + getattr(node, "workeroutput", {}).get("cpu", 0.0)


CPU = pytest.StashKey[float]()


def pytest_terminal_summary(terminalreporter, config):
    """Where the whole suite has been run: its CPU time, and wall time by folder. More than `CEILING` fails."""
    if not is_whole(config):
        return
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[folder_of(report.nodeid)] += report.duration
    terminalreporter.section("seconds of tests, summed over workers")
    for folder in sorted(seconds):
        terminalreporter.line(f"{folder:<18}{seconds[folder]:>7.0f}")
    used = config.stash.get(CPU, 0.0) or cpu_seconds()
    terminalreporter.line(f"CPU time {used:.0f} s of at most {CEILING:.0f}")
    if used > CEILING:
        terminalreporter.line("OVER THE CEILING: list the slowest new tests in slow.txt (--durations=30 names them)")
        terminalreporter._session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="module", autouse=True)
def _collect_no_more():
    """Keep the garbage collector from looking at what earlier tests left (a million objects in the end)."""
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
