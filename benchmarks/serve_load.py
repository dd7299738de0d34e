"""A server at 1.5 times what it can do, for two minutes; clients that leave; bad requests between good ones.

- `answered`, `refused`: requests with status 200 and 429; `other`: any others, of which there should be none.
- `memory`: resident memory of the server after the load over that after a tenth of it.
- `leavers`: clients that leave in the middle of an answer; afterwards no sequence and no block is left.
- `bad`: malformed requests, all of which must be answered with 4xx.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from transformers import LlamaConfig, LlamaForCausalLM

import harness
from tutti.serve.bench import load, poisson, report

MODEL = dict(vocab_size=257, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=4, max_position_embeddings=512, eos_token_id=256, bos_token_id=None)  # fmt: skip
SECONDS, OVER, LEAVERS = 120, 1.5, 100
BAD = [b"{", b"[]", b"null", b'{"model": "model"}', b'{"model": "model", "prompt": {}}', b"\xff\xfe", b"x" * (10 << 20),
       json.dumps({"model": "model", "prompt": "x", "max_tokens": -5}).encode(),
       json.dumps({"model": "model", "prompt": "x", "temperature": -1}).encode(),
       json.dumps({"model": "model", "prompt": "x", "unknown": 1}).encode(),
       b'{"model": "model", "prompt": "\\ud800 \\u0000", "max_tokens": 1e99}',
       json.dumps({"model": "model", "prompt": [-1, 99999]}).encode()]  # fmt: skip


def start(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A server and its address."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    LlamaForCausalLM(LlamaConfig(**MODEL)).save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({x: i for i, x in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tutti.cli", "serve", str(folder), "--name", "model", "--port", str(port),
               "--memory", "0.05", "--most", "16", "--budget", "128", "--queue", "48"]  # fmt: skip
    process, url = subprocess.Popen(command), f"http://127.0.0.1:{port}"
    while True:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return process, url
        except httpx.HTTPError:
            assert process.poll() is None, "the server ended"
            time.sleep(0.2)


def memory(process: subprocess.Popen[bytes]) -> int:
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def leave(url: str, count: int) -> None:
    """Clients that leave after a random time."""
    draw = random.Random(0)

    async def one(client: httpx.AsyncClient) -> None:
        body = {"model": "model", "prompt": "hello", "max_tokens": 400, "stream": True, "ignore_eos": True}
        try:
            async with asyncio.timeout(draw.uniform(0.01, 2)):
                async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
                    async for _ in answer.aiter_lines():
                        pass
        except TimeoutError:
            pass

    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None)) as client:
        await asyncio.gather(*(one(client) for _ in range(count)))


async def bad(url: str) -> list[int]:
    """The statuses of bad requests, repeated while others are answered."""
    async with httpx.AsyncClient(timeout=60) as client:
        headers = {"Content-Type": "application/json"}
        statuses = []
        for body in BAD * 3:
            for path in ("completions", "chat/completions"):
                answer = await client.post(f"{url}/v1/{path}", content=body, headers=headers)
                statuses.append(answer.status_code)
                assert answer.json()["error"]["message"]
            await asyncio.sleep(0.05)
        return statuses


def gauge(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return next(float(x.split()[1]) for x in lines if x.startswith(f"tutti_{name} "))


def run(quick: bool) -> dict[str, Any]:
    seconds = 10 if quick else SECONDS
    with tempfile.TemporaryDirectory() as folder:
        process, url = start(Path(folder))
        try:
            warm = report(asyncio.run(load(url, "model", poisson(40, 0, (16, 64), (16, 64), 0))), 1, 1)
            rate = OVER * warm.requests_per_second
            count = round(rate * seconds) if quick else max(1000, round(rate * seconds))
            harness.say(f"capacity {warm.requests_per_second:.1f} requests/s; {count} requests at {rate:.1f}/s")
            arrivals = poisson(count, rate, (16, 64), (16, 64), 1)
            tenth = asyncio.run(load(url, "model", arrivals[: count // 10]))
            before = memory(process)

            async def together() -> tuple[list[Any], list[int]]:
                answers, statuses = await asyncio.gather(load(url, "model", arrivals), bad(url))
                return answers, statuses

            measured, statuses = asyncio.run(together())
            asyncio.run(leave(url, 20 if quick else LEAVERS))
            end = time.monotonic() + 10
            while gauge(url, "running") + gauge(url, "waiting") and time.monotonic() < end:
                time.sleep(0.1)
            after = memory(process)
            summary = report(measured, 1, 0.1)
            result = {
                "requests": len(tenth) + count, "answered": summary.statuses.get("200", 0),
                "refused": summary.statuses.get("429", 0),
                "other": count - summary.statuses.get("200", 0) - summary.statuses.get("429", 0),
                "memory": after / before, "left running": gauge(url, "running"),
                "cache used": gauge(url, "cache_used_ratio"),
                "bad answered with 4xx": sum(400 <= x < 500 for x in statuses) / len(statuses),
                "throughput": summary.throughput, "p99 of first tokens, s": summary.ttft.get("p99", 0.0),
                "healthy": httpx.get(f"{url}/health").status_code == 200,
            }  # fmt: skip
            return result
        finally:
            process.terminate()
            process.wait(90)


if __name__ == "__main__":
    harness.main(run, __file__, ["transformers", "fastapi", "uvicorn"])
