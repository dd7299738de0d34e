"""What all tests share: one thread, and one pool of Gloo processes for the whole session."""

from __future__ import annotations

import gc
import json
import os

import pytest
import torch

from gloo import Pool
from zoo import CONFIG

torch.set_num_threads(1)
gc.set_threshold(20_000, 20, 20)  # graphs are many small objects
os.environ["TUTTI_PLANS"] = "off"  # each search anew


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
