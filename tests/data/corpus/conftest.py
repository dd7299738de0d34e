import pytest


@pytest.fixture(autouse=True)
def no_flush_to_disk(monkeypatch):
    """Tests write hundreds of small files; whether they survive a power cut is not tested."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
