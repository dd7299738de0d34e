"""Metrics of a server, in Prometheus's format."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tutti.serve.engine.protocols import Serving
from tutti.serve.engine.request import Output

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

T = TypeVar("T", Counter, Gauge, Histogram)


class Metrics:
    """What a server counts. `observe` is called by the engine's thread after each step."""

    def __init__(self):
        self.registry = registry = CollectorRegistry()

        def make(kind: type[T], name: str, text: str, **options: Any) -> T:
            return kind(f"tutti_{name}", text, registry=registry, **options)

        self.running = make(Gauge, "running", "Sequences in the batch")
        self.waiting = make(Gauge, "waiting", "Sequences that wait for room")
        self.cache = make(Gauge, "cache_used_ratio", "Share of the KV cache's blocks that sequences hold")
        self.preemptions = make(Gauge, "preemptions", "Sequences that lost their blocks, in all")
        self.requests = make(Counter, "requests", "Finished requests", labelnames=["finish"])
        self.refused = make(Counter, "refused", "Refused requests", labelnames=["status"])
        self.prompt = make(Counter, "prompt_tokens", "Tokens of prompts")
        self.cached = make(Counter, "cached_tokens", "Tokens of prompts found in the prefix cache")
        self.generated = make(Counter, "generated_tokens", "Generated tokens")
        self.first = make(Histogram, "time_to_first_token_seconds", "From arrival to the first token", buckets=SECONDS)
        self.between = make(Histogram, "inter_token_seconds", "Between tokens of a request", buckets=SECONDS)
        self.whole = make(Histogram, "request_seconds", "From arrival to the end", buckets=SECONDS)
        self.counted: dict[str, int] = {}  # tokens of each unfinished request that are counted
        self.recent: deque[dict[str, float]] = deque(maxlen=240)  # for the page
        self.tokens, self.last, self.latency = 0, time.monotonic(), 0.0
        self.state: dict[str, float] = {"running": 0, "waiting": 0, "cache": 0.0}

    def observe(self, engine: Serving, changed: list[Output]) -> None:
        """Count a step."""
        engines = engine.engines
        running = sum(len(x.scheduler.running) for x in engines)
        waiting = sum(len(x.scheduler.waiting) for x in engines)
        used = sum(x.pool.used for x in engines) / sum(x.pool.count for x in engines)
        self.running.set(running)
        self.waiting.set(waiting)
        self.cache.set(used)
        self.preemptions.set(sum(x.scheduler.preemptions for x in engines))
        for output in changed:
            self._count(output)
        self.latency = max((x.times[-1] - x.times[-2] for x in changed if len(x.times) > 1), default=0.0)
        self.state = {"running": running, "waiting": waiting, "cache": used}
        self.sample()

    def sample(self) -> None:
        """Note the state for the page, at most four times a second."""
        now = time.monotonic()
        if now - self.last > 0.25:
            rate, idle = self.tokens / (now - self.last), not self.state["running"]
            self.recent.append({"time": time.time(), **self.state, "rate": rate,
                                "latency": 0.0 if idle else self.latency})  # fmt: skip
            self.tokens, self.last = 0, now

    def _count(self, output: Output) -> None:
        counted, times = self.counted.pop(output.id, 0), output.times
        if times and not counted:
            self.first.observe(times[0] - output.arrival)
            self.prompt.inc(len(output.prompt))
            self.cached.inc(output.cached)
        for i in range(max(counted, 1), len(times)):
            self.between.observe(times[i] - times[i - 1])
        self.generated.inc(len(times) - counted)
        self.tokens += len(times) - counted
        if output.finished:
            self.whole.observe(time.monotonic() - output.arrival)
            self.requests.labels(finish="error" if output.error else output.completions[0].finish).inc()
        else:
            self.counted[output.id] = len(times)

    def text(self) -> bytes:
        """All metrics."""
        return generate_latest(self.registry)
