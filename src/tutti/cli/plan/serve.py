"""`tutti plan --serve`: how to serve a model on a cluster under a load."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Annotated

import tyro

from tutti.cli.plan.stopwatch import Stopwatch
from tutti.cli.tables import consoles, table, unbroken
from tutti.hardware import Cluster
from tutti.hardware.altered import altered
from tutti.launch.progress import narrated
from tutti.plan.explain import counted, figure
from tutti.serve.apart.planning import Outcome, ServingPlanner, why
from tutti.serve.bench import poisson, trace
from tutti.tracing.load import config_of


def plan_serve(
    model: Annotated[str, tyro.conf.Positional],
    cluster: str,
    rate: float = 4.0,
    requests: int = 200,
    prompt: tuple[int, int] = (64, 2048),
    tokens: tuple[int, int] = (16, 512),
    trace_file: Path | None = None,
    ttft: float = 1.0,
    tpot: float = 0.05,
    budget: int = 1024,
    most: int = 128,
    top: int = 8,
    seed: int = 0,
    search_seconds: float = 90.0,
    price: float = 0.0,
    what_if: str = "",
    save: Path | None = None,
) -> None:
    """Plan how to serve a model under a load: plans, replicas, and prompts and generation together or apart.

    Needs neither the devices nor memory for the model. Predicts what `tutti bench-serve` would measure. A placement is
    `tight` if not every cache has room for `--most` sequences of usual length at once.

    Args:
        model: Folder with a config.json of transformers, or such a file.
        cluster: The devices, such as h100:8 or h100:4x8.
        rate: Requests that arrive in a second, as a Poisson process. 0 sends all at once.
        requests: Number of requests.
        prompt: Smallest and largest number of tokens in a prompt.
        tokens: Smallest and largest number of tokens of an output.
        trace_file: JSONL with `at`, `prompt` and `tokens`, instead of the four above.
        ttft: Objective: seconds to the first token.
        tpot: Objective: seconds for each further token.
        budget: Tokens of a step. (In `tutti plan` it is seconds, which are --search-seconds here.)
        most: Sequences that an engine runs at once.
        top: Placements to print.
        seed: Random seed of arrivals and lengths.
        search_seconds: Seconds after which the best placement so far is the answer.
        price: Price of a device hour: also print what a million generated tokens cost under this load.
        what_if: Other figures of the cluster, as for `tutti plan`: memory=141GiB,link=2x.
        save: JSON file for all placements.
    """
    if save and not save.parent.is_dir():
        raise ValueError(f"--save {save}: there is no folder {save.parent}")
    check(rate, requests, prompt, tokens, ttft, tpot, budget, most, top, search_seconds, price)
    target = altered(Cluster.parse(cluster), what_if)
    load = trace(trace_file) if trace_file else poisson(requests, rate, prompt, tokens, seed)
    if not load or any(isinstance(x.prompt, str) for x in load):
        raise ValueError(f"{trace_file}: a load to simulate has requests, whose prompts are numbers of tokens")
    config = config_of(model, "give a folder with a transformers config.json, or such a file")
    console, progress = consoles()
    with narrated(progress, "reading the model") as tell:
        try:
            planner = ServingPlanner(config, target, budget, most, progress=tell, stop=Stopwatch(search_seconds).past,
                                     seen=lambda outcome: tell.result(_brief(outcome)))  # fmt: skip
        except (ValueError, AttributeError, KeyError) as error:
            raise ValueError(f"{model}: {type(config).__name__} is not served: {str(error).splitlines()[0]}; "
                             "what is served are causal language models") from error  # fmt: skip
        outcomes = planner.outcomes(load, ttft, tpot)
        fewer = planner.fewer(outcomes[0], load, ttft, tpot)
    shown = table("placement", *_cells(outcomes[0], price), left=("placement",))
    for outcome in outcomes[:top]:
        shown.add_row(str(outcome.placement), *_cells(outcome, price).values())
    unbroken(shown)
    console.print(shown, crop=False)
    if len(outcomes) > top:
        console.print(f"and {len(outcomes) - top} others that were simulated")
    meaning = (
        f"in time: within {ttft:g} s to the first token (TTFT) and {1e3 * tpot:g} ms for each further one (TPOT), of "
        "which the quantiles 50 and 90 % are shown; cached: tokens in all caches"
    )
    first, last = (f(x.at for x in load) for f in (min, max))
    period = (
        f"a second: over the {figure(outcomes[0].report.seconds)} s from the first arrival to the last answer; "
        f"{counted(len(load), 'request')} arrived within {figure(last - first)} s"
        + (f", {figure(len(load) / (last - first))} a second" if last > first else "")
    )
    for line in [meaning, period, why(outcomes), *_notes(planner, outcomes[0], fewer, search_seconds, price)]:
        console.print(line, markup=False, soft_wrap=True)
    if save:
        rows = [{"placement": str(x.placement), "devices": x.devices, "tight": x.tight, **x.report.__dict__}
                for x in outcomes]  # fmt: skip
        save.write_text(json.dumps(rows, indent=2) + "\n")
        console.print(f"saved {save}")


def check(
    rate: float, requests: int, prompt: tuple[int, int], tokens: tuple[int, int], ttft: float, tpot: float,
    budget: int, most: int, top: int, search_seconds: float, price: float,
) -> None:  # fmt: skip
    """Raise ValueError for numbers that make no load, no objective or no engine."""
    for option, (low, high) in {"prompt": prompt, "tokens": tokens}.items():
        if not 1 <= low <= high:
            raise ValueError(f"--{option} {low} {high}: the smallest number of tokens, at least 1, then the largest")
    for option, value in {"requests": requests, "budget": budget, "most": most, "top": top}.items():
        if value < 1:
            raise ValueError(f"--{option} {value}: at least 1")
    for option, value in {"ttft": ttft, "tpot": tpot, "search-seconds": search_seconds}.items():
        if not value > 0:
            raise ValueError(f"--{option} {value:g}: above 0")
    for option, value in {"rate": rate, "price": price}.items():
        if not 0 <= value < inf:
            raise ValueError(f"--{option} {value:g}: 0 or more")


def _cells(outcome: Outcome, price: float) -> dict[str, str]:
    """The line of a placement, by title of the column."""
    report = outcome.report
    first, each = ([1e3 * times.get(q, 0) for q in ("p50", "p90")] for times in (report.ttft, report.tpot))
    return {
        "in time": f"{100 * outcome.in_time:.0f} %", "tokens/s": figure(report.throughput),
        "TTFT, ms": " / ".join(f"{x:.0f}" for x in first), "TPOT, ms": " / ".join(f"{x:.1f}" for x in each),
        "cached": f"{figure(outcome.slots / 1e3)} k", "fits": "tight" if outcome.tight else "yes",
        "busy": " / ".join(f"{100 * b:.0f} %" for b in outcome.busy),
        **({"cost of 1e6": f"{_cost(outcome, price):,.3g}"} if price else {}),
    }  # fmt: skip


def _cost(outcome: Outcome, price: float) -> float:
    """The cost of a million generated tokens under this load."""
    return outcome.devices * price / 3600 / outcome.report.throughput * 1e6 if outcome.report.throughput else inf


def _brief(outcome: Outcome) -> str:
    return f"{outcome.placement}: {100 * outcome.in_time:.0f} % in time, {figure(outcome.report.throughput)} tokens/s"


def _notes(
    planner: ServingPlanner, best: Outcome, fewer: Outcome | None, search_seconds: float, price: float
) -> Iterator[str]:
    """What else to know: whether fewer devices do, what waits, and what was left out."""
    if fewer:
        cost = f", at {_cost(fewer, price):,.3g} for 1e6 tokens" if price else ""
        yield (f"{fewer.devices} of the {best.devices} devices do about as well: {fewer.placement} answers "
               f"{100 * fewer.in_time:.0f} % in time{cost}")  # fmt: skip
    if best.report.answered < best.report.requests:
        yield f"{best.report.requests - best.report.answered} requests are longer than a cache and are refused"
    if best.tight:
        yield f"tight: not every cache has room for --most {planner.most} sequences of usual length at once"
    if planner.left:
        yield f"{planner.left} other placements were left out: --search-seconds {search_seconds:g} were over"
    for name, error in planner.refused.items():
        yield f"not possible: {name}: {error}"
