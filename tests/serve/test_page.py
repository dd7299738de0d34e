"""The page of the server, in headless Chromium: it chats, streams, stops, and draws what the engine does."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import tiny
from web import Running

from tutti.serve import Engine
from tutti.serve.server.app import Options

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]


class Page:
    """A page in a browser, through Chromium's DevTools protocol."""

    def __init__(self, url: str, folder: Path):
        from websockets.sync.client import connect

        command = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
                   f"--user-data-dir={folder}", "--window-size=1200,800", url]  # fmt: skip
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        port_file = folder / "DevToolsActivePort"
        wait(lambda: port_file.exists() and len(port_file.read_text().splitlines()) == 2)
        port = port_file.read_text().splitlines()[0]
        wait(lambda: self._pages(port))
        self.stack = ExitStack()
        self.socket = self.stack.enter_context(connect(self._pages(port)[0]["webSocketDebuggerUrl"], max_size=None))
        self.numbers = itertools.count()

    def _pages(self, port: str) -> list[Any]:
        with urlopen(f"http://127.0.0.1:{port}/json") as answer:
            return [x for x in json.load(answer) if x["type"] == "page" and x["url"].startswith("http")]

    def call(self, method: str, **params: Any) -> Any:
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv(timeout=30))
            if message.get("id") == number:
                return message["result"]

    def js(self, code: str) -> Any:
        reply = self.call("Runtime.evaluate", expression=code, returnByValue=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def say(self, text: str) -> None:
        self.js(f"$('text').value = {json.dumps(text)}; $('form').requestSubmit()")

    def close(self) -> None:
        self.stack.close()
        self.process.terminate()
        self.process.wait(30)


def wait(true, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not become true"
        time.sleep(0.05)


@pytest.fixture
def running() -> Iterator[Running]:
    engine = Engine(tiny.model(), tokenizer=tiny.tokenizer(), plan="single", blocks=64, budget=64, most=8)
    server = Running(engine, Options("tiny"))
    yield server
    server.stop()


def test_chat_and_live_view(running, tmp_path):
    page = Page(running.url, tmp_path)
    try:
        wait(lambda: page.js("typeof turns") == "object")
        wait(lambda: page.js("$('model').textContent") == "tiny")
        page.js("$('temperature').value = 0; $('max_tokens').value = 20")
        page.say("hello")
        wait(lambda: page.js("document.querySelectorAll('.turn small').length") == 1)
        assert page.js("document.querySelector('.user').textContent") == "hello"
        assert "tokens in" in page.js("document.querySelector('.turn small').textContent")
        client = running.client()
        completion = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}],
                                                    max_tokens=20, temperature=0)  # fmt: skip
        assert page.js("turns[1].content") == completion.choices[0].message.content
        page.js("$('max_tokens').value = 150; $('temperature').value = 1")
        page.say("go on")
        wait(lambda: running.engine.busy)
        page.js("$('form').requestSubmit()")  # Stop
        wait(lambda: not running.engine.busy)
        wait(lambda: page.js("$('send').textContent") == "Send")
        wait(lambda: page.js("$('p-running').getAttribute('points') || ''") != "")
        page.js("$('temperature').value = -1")
        page.say("bad")
        wait(lambda: page.js("document.querySelectorAll('.error').length") == 1)
        assert "temperature" in page.js("document.querySelector('.error').textContent")
        shot = page.call("Page.captureScreenshot", format="png")["data"]
        (tmp_path / "page.png").write_bytes(base64.b64decode(shot))
    finally:
        page.close()
