"""What all tests share: one thread, and one pool of Gloo processes for the whole session."""

from __future__ import annotations

import pytest
import torch

from gloo import Pool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool():
    """Four Gloo ranks; started with the first test that asks for them."""
    workers = Pool()
    yield workers
    workers.close()
