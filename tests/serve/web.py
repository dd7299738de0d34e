"""A server in a thread of the test."""

from __future__ import annotations

import json
import socket
import threading
import time

import httpx
import openai
import uvicorn

from tutti.serve import Engine
from tutti.serve.server.app import Options, application

JSON = {"Content-Type": "application/json"}


class Running:
    """A server in a thread."""

    def __init__(self, engine: Engine, options: Options):
        self.engine = engine
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.app = application(engine, options)
        self.server = uvicorn.Server(uvicorn.Config(self.app, port=self.port, log_level="warning"))
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self.port}"

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def post(self, path: str, **body) -> httpx.Response:
        return httpx.post(self.url + path, content=json.dumps(body), headers=JSON, timeout=60)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(60)
