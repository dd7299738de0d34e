"""The verb `tutti bench-serve`: load a server, and measure what its clients see.

Requests arrive as a Poisson process or as a trace says. Of each request it notes the time to first token (TTFT), the
mean time per further token (TPOT), and the times between tokens (ITL). Goodput counts requests that keep an objective.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from tutti.launch.progress import progress

QUANTILES = (50, 90, 99)


@dataclass(frozen=True)
class Arrival:
    """A request of a load. at: seconds after the start. prompt: a text or a number of tokens. tokens: number of tokens
    of the output."""

    at: float
    prompt: int | str
    tokens: int


@dataclass
class Measured:
    """What a client saw of a request. times: when pieces of the answer came, in seconds after the start."""

    arrival: Arrival
    status: int = 0
    error: str = ""
    times: list[float] = field(default_factory=list)
    tokens: int = 0
    end: float = 0.0

    @property
    def first(self) -> float:
        """Time to first token, seconds."""
        return self.times[0] - self.arrival.at

    @property
    def each(self) -> float:
        """Mean time of a token after the first, seconds."""
        return (self.times[-1] - self.times[0]) / max(1, self.tokens - 1)

    @property
    def good(self) -> bool:
        """Whether it was answered."""
        return self.status == 200 and not self.error and bool(self.times)


def poisson(count: int, rate: float, prompt: tuple[int, int], tokens: tuple[int, int], seed: int) -> list[Arrival]:
    """A load of so many requests, `rate` in a second on average; 0: all at once. prompt, tokens: smallest and largest
    length, of which all are equally likely."""
    draw, at, arrivals = random.Random(seed), 0.0, []
    for _ in range(count):
        arrivals.append(Arrival(at, draw.randint(*prompt), draw.randint(*tokens)))
        at += draw.expovariate(rate) if rate else 0.0
    return arrivals


def trace(path: Path) -> list[Arrival]:
    """A load from a JSONL file. Each line has `at` (seconds), `prompt` (text, or number of tokens) and `tokens`."""
    arrivals = []
    for i, line in enumerate(path.read_text().splitlines()):
        try:
            row = json.loads(line)
            arrivals.append(Arrival(float(row["at"]), row["prompt"], int(row["tokens"])))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {i + 1}: expected at, prompt and tokens ({error!r})") from error
    return arrivals


async def load(url: str, model: str, arrivals: Sequence[Arrival], *, key: str = "", vocabulary: int = 200,
               seed: int = 0) -> list[Measured]:  # fmt: skip
    """Send requests to a server as they arrive, and measure. Prompts that are numbers are random tokens below
    `vocabulary`."""
    import httpx

    limits, start = httpx.Limits(max_connections=None, max_keepalive_connections=64), time.perf_counter()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits, headers=headers) as client:

        async def one(number: int, arrival: Arrival) -> Measured:
            await asyncio.sleep(max(0.0, start + arrival.at - time.perf_counter()))
            draw, result = random.Random(seed * 100_003 + number), Measured(arrival)
            prompt = arrival.prompt
            if isinstance(prompt, int):
                prompt = [draw.randrange(3, vocabulary) for _ in range(prompt)]
            body = {"model": model, "prompt": prompt, "max_tokens": arrival.tokens, "ignore_eos": True, "stream": True,
                    "stream_options": {"include_usage": True}, "temperature": 0}  # fmt: skip
            try:
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    result.status = answer.status_code
                    if answer.status_code != 200:
                        result.error = (await answer.aread()).decode(errors="replace")[:200]
                        return result
                    async for line in answer.aiter_lines():
                        _note(result, line, time.perf_counter() - start)
            except httpx.HTTPError as error:
                result.error = repr(error)
            result.end = time.perf_counter() - start
            return result

        return list(await asyncio.gather(*(one(i, x) for i, x in enumerate(arrivals))))


def _note(result: Measured, line: str, now: float) -> None:
    """Note an event of a stream."""
    if not line.startswith("data: {"):
        return
    event = json.loads(line[6:])
    if "error" in event:
        result.error = event["error"]["message"]
    elif event["choices"]:
        result.times.append(now)
    if usage := event.get("usage"):
        result.tokens = usage["completion_tokens"]


@dataclass(frozen=True)
class LoadReport:
    """A load in numbers. Seconds, and tokens or requests in a second. statuses: how requests were answered."""

    requests: int
    answered: int
    statuses: dict[str, int]
    seconds: float
    throughput: float
    requests_per_second: float
    goodput: float
    ttft: dict[str, float]
    tpot: dict[str, float]
    itl: dict[str, float]


def report(measured: Sequence[Measured], ttft: float, tpot: float) -> LoadReport:
    """ttft, tpot: the objective that goodput counts, seconds."""
    good = [x for x in measured if x.good]
    seconds = max((x.end for x in good), default=0.0) - min((x.arrival.at for x in measured), default=0.0)
    statuses: dict[str, int] = {}
    for x in measured:
        name = str(x.status) if not x.error or x.status != 200 else "broken"
        statuses[name] = statuses.get(name, 0) + 1
    within_goals = [x for x in good if x.first <= ttft and x.each <= tpot]
    between = [b - a for x in good for a, b in zip(x.times, x.times[1:], strict=False)]
    per = max(seconds, 1e-9)
    return LoadReport(
        len(measured), len(good), statuses, seconds, sum(x.tokens for x in good) / per, len(good) / per,
        len(within_goals) / per, _quantiles([x.first for x in good]), _quantiles([x.each for x in good]),
        _quantiles(between),
    )  # fmt: skip


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {"mean": float(np.mean(values)), **{f"p{q}": float(np.percentile(values, q)) for q in QUANTILES}}


def draw(measured: Sequence[Measured], path: Path) -> None:
    """Draw when requests ran, and the distributions of times."""
    from matplotlib.figure import Figure

    good = [x for x in measured if x.good]
    figure = Figure(figsize=(11, 4), layout="constrained")
    spans, times = figure.subplots(1, 2, width_ratios=(3, 2))
    for i, x in enumerate(good):
        spans.plot([x.arrival.at, x.times[0]], [i, i], color="tab:gray", linewidth=1)
        spans.plot([x.times[0], x.end], [i, i], color="tab:blue", linewidth=1)
    spans.set(xlabel="seconds", ylabel="request", title="waiting and prefill (gray), generation (blue)")
    between = [b - a for x in good for a, b in zip(x.times, x.times[1:], strict=False)]
    for name, values in (("first token", [x.first for x in good]), ("between tokens", between)):
        if values:
            times.plot(np.sort(values) * 1e3, np.linspace(0, 100, len(values)), label=name)
    times.set(xlabel="milliseconds", ylabel="percent", xscale="log", title="no longer than")
    times.grid(alpha=0.3)
    times.legend()
    figure.savefig(path, dpi=120)


def bench_serve(
    url: Annotated[str, tyro.conf.Positional] = "http://127.0.0.1:8000",
    requests: int = 64,
    rate: float = 4.0,
    prompt: tuple[int, int] = (16, 256),
    tokens: tuple[int, int] = (16, 128),
    trace_file: Path | None = None,
    ttft: float = 0.1,
    tpot: float = 0.05,
    key: str = "",
    seed: int = 0,
    out: Path | None = None,
) -> None:
    """Load a server and report what its clients see: TTFT, TPOT, ITL, throughput, and goodput under an objective.

    Args:
        url: Address of any server of the OpenAI API.
        requests: Number of requests.
        rate: Requests that arrive in a second, as a Poisson process. 0 sends all at once.
        prompt: Smallest and largest number of tokens in a prompt.
        tokens: Smallest and largest number of tokens of an output.
        trace_file: JSONL with `at`, `prompt` and `tokens`, instead of the four above.
        ttft: Objective: seconds to the first token.
        tpot: Objective: seconds for each further token.
        key: API key.
        seed: Random seed of arrivals and prompts.
        out: Folder for report.json, requests.jsonl and latency.png.
    """
    import httpx

    try:
        models = httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"} if key else {}).json()
    except (httpx.HTTPError, ValueError) as error:
        raise ValueError(f"no server answers at {url}: {error}") from error
    if "data" not in models:
        raise ValueError(f"{url} says: {models.get('error', models)}")
    arrivals = trace(trace_file) if trace_file else poisson(requests, rate, prompt, tokens, seed)
    with progress(f"{len(arrivals)} requests"):
        measured = asyncio.run(load(url, models["data"][0]["id"], arrivals, key=key, seed=seed))
    summary = report(measured, ttft, tpot)
    print(table(summary, ttft, tpot))
    if errors := [x.error for x in measured if x.error]:
        print(f"first error: {errors[0]}")
    if out:
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.json").write_text(json.dumps(asdict(summary), indent=2) + "\n")
        (out / "requests.jsonl").write_text("".join(json.dumps(asdict(x)) + "\n" for x in measured))
        draw(measured, out / "latency.png")
        print(f"wrote {out}/report.json, requests.jsonl and latency.png")


def table(summary: LoadReport, ttft: float, tpot: float) -> str:
    """The report as text."""
    rows: list[tuple[str, object]] = [
        ("requests", f"{summary.answered} of {summary.requests} answered; statuses "
                     + ", ".join(f"{k}: {n}" for k, n in sorted(summary.statuses.items()))),
        ("seconds", f"{summary.seconds:.1f}"),
        ("throughput", f"{summary.throughput:.1f} tokens/s, {summary.requests_per_second:.2f} requests/s"),
        ("goodput", f"{summary.goodput:.2f} requests/s (first token in {ttft * 1e3:.0f} ms, then {tpot * 1e3:.0f} ms)"),
    ]  # fmt: skip
    for name, values in (("TTFT", summary.ttft), ("TPOT", summary.tpot), ("ITL", summary.itl)):
        rows.append((name, "  ".join(f"{k} {v * 1e3:.1f} ms" for k, v in values.items()) or "-"))
    return "\n".join(f"{name:<12}{text}" for name, text in rows)
