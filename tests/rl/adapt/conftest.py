"""MuJoCo 4 writes warnings about gymnasium's models to MUJOCO_LOG.TXT in the current folder."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
