"""Several workers behind one port: routing, a worker that is killed, and draining."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import tiny

from tutti.serve import command
from tutti.serve.server.router import Process, _labelled, chunks_of


def test_chunks_are_of_the_beginning():
    a = chunks_of(b'{"prompt": "' + b"x" * 200 + b'"}')
    b = chunks_of(b'{"prompt": "' + b"x" * 130 + b'y"}')
    assert len(a) == 3 and a[:2] == b[:2] and chunks_of(b"{") == [] and chunks_of(b"[1]") == []
    worker = Process([], 1)
    worker.remember(b)
    assert worker.seen_chunks(a) == 2 and worker.seen_chunks(chunks_of(b'{"prompt": "' + b"z" * 200 + b'"}')) == 0


def test_metrics_get_a_label():
    assert _labelled("a_total 3.0", 1) == 'a_total{worker="1"} 3.0'
    assert _labelled('a{le="0.5"} 2', 0) == 'a{le="0.5",worker="0"} 2' and _labelled("# HELP a", 0) == "# HELP a"


def test_the_router_counts_the_requests_of_all_workers(monkeypatch):
    apps = []
    monkeypatch.setattr(command, "_listen", lambda uvicorn, app, *rest: apps.append(app))
    command.serve("tiny", workers=2, keys=("a", "b"), rate=2, allowed_hosts=("x",), trust_request_chat_template=True)
    router = apps[0].routes[0].endpoint.__self__
    assert all("--rate" not in x.command and "--keys" in x.command for x in router.workers)
    assert all("--trust_request_chat_template" in x.command and "x" not in x.command for x in router.workers)

    async def statuses(*keys: str) -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(apps[0]), base_url="http://router") as client:
            headers = [{"Authorization": f"Bearer {key}"} for key in keys]
            return [(await client.post("/v1/completions", json={}, headers=x)).status_code for x in headers]

    assert asyncio.run(statuses("a", "a", "a", "b", "c")) == [503, 503, 429, 503, 401]  # no worker is ready


def test_the_stages_of_a_start_are_printed(monkeypatch, tmp_path: Path, capsys):
    tiny.model().save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(command, "_listen", lambda uvicorn, app, *rest: None)
    command.serve(str(tmp_path), port=0, memory=0.001, most=1, budget=16, name="m")
    out, err = capsys.readouterr()
    lines = [x.removeprefix("tutti serve: ") for x in err.splitlines() if x.startswith("tutti serve: ")]
    assert lines[0] == f"loading {tmp_path}" and sum(x.startswith("self-check: ") for x in lines) == 1
    assert lines[-1].startswith("preparing steps") and len(lines) == len(set(lines)) <= 6 and not out


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_the_others_answer(tmp_path: Path):
    tiny.model().save_pretrained(tmp_path / "tiny")
    tiny.tokenizer().save_pretrained(tmp_path / "tiny")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tutti.cli", "serve", str(tmp_path / "tiny"), "--port", str(port), "--workers",
               "2", "--most", "2", "--budget", "16", "--memory", "0.01"]  # fmt: skip
    router = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    url, body = f"http://127.0.0.1:{port}", {"model": "tiny", "prompt": "hello", "max_tokens": 4, "temperature": 0}
    try:
        _wait(lambda: httpx.get(f"{url}/health").json()["ready"] == 2)
        first = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
        pids = [int(x) for x in Path(f"/proc/{router.pid}/task/{router.pid}/children").read_text().split()]
        assert len(pids) == 2
        statuses: list[int] = []

        def ask() -> None:
            for _ in range(15):
                answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
                statuses.append(answer.status_code)
                assert answer.status_code != 200 or answer.json()["choices"][0]["text"] == first

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        os.kill(pids[0], signal.SIGKILL)
        for thread in threads:
            thread.join()
        assert len(statuses) == 45 and statuses.count(200) >= 42  # answers that had begun on the killed one are lost
        _wait(lambda: httpx.get(f"{url}/health").json()["ready"] == 2)
        assert httpx.get(f"{url}/health").json()["restarts"] == 1
        assert 'worker="1"' in httpx.get(f"{url}/metrics").text
        with httpx.stream("POST", f"{url}/v1/completions", timeout=60, json={**body, "stream": True, "max_tokens": 60,
                                                                            "ignore_eos": True}) as answer:  # fmt: skip
            lines = answer.iter_lines()
            next(lines)
            router.send_signal(signal.SIGTERM)  # what runs is finished
            assert "data: [DONE]" in list(lines)
    finally:
        router.terminate()
        assert router.wait(90) is not None


def _wait(true, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if true():
                return
        except (httpx.HTTPError, KeyError):
            pass
        time.sleep(0.2)
    raise TimeoutError("it did not become true")
