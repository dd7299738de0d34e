"""The engine on one GPU beside `transformers`: decoding of 1, 16 and 64 sequences, and the first token of 64 prompts.

Random weights of the shapes of Llama 1B (and of 8B, without the peer), bfloat16, greedy, prompts of 64 tokens. Each
contender is a process of its own; they take turns. By model and case:

- `seconds per step`: median of the decoding steps after the first.
- `first token`: seconds until all sequences have their first token.
- `start`: seconds from the model to a warm engine, and the number of recorded steps.
- `memory share`: bytes of the weights over the seconds of a step of one sequence, as a share of what a copy of 4 GB on
  the device moves.

    python benchmarks/gpu/serve.py [--quick]
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

import harness

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
SIZES: dict[str, dict[str, Any]] = {
    "1B": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
               num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=True),
    "8B": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
               num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False),
    "small": dict(hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=4,
                  num_key_value_heads=2, vocab_size=512, tie_word_embeddings=True),
}  # fmt: skip
PROMPT, TOKENS, BATCHES, ROUNDS = 64, 128, (1, 16, 64), 3
PEER_TOKENS = 24  # of a turn: `generate` takes ten times as long


def model_of(size: str) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(max_position_embeddings=4096, eos_token_id=None, bos_token_id=None, pad_token_id=0,
                         **SIZES[size])  # fmt: skip
    with DEVICE:
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
    return model


def prompts_of(count: int, size: str) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(3, SIZES[size]["vocab_size"], (count, PROMPT), generator=generator).tolist()


def wait() -> float:
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def ours(turns: harness.Turns, size: str) -> None:
    from tutti.serve import Engine, Request, Sampling

    model, begin = model_of(size), wait()
    engine = Engine(model, plan="single", memory=4 << 30 if GPU else 1 << 26, most=max(BATCHES), prefix_cache=False)
    engine.warm_up()
    start = wait() - begin
    recorded = float(len(engine.runner.recorded))

    def run(count: int, tokens: int) -> list[float]:
        sampling = Sampling(max_tokens=tokens, temperature=0, ignore_end=True)
        begin = wait()
        outputs = [engine.add(Request(x, sampling)) for x in prompts_of(count, size)]
        while not all(x.tokens for x in outputs):
            engine.step()
        times = [wait()]
        while engine.busy:
            engine.step()
            times.append(time.perf_counter())  # a step ends when the host has its tokens
        return [times[0] - begin, statistics.median(b - a for a, b in itertools.pairwise(times))]

    while steps := turns.wait():
        seconds = [x for count in BATCHES for x in run(count, TOKENS if steps > 1 else 8)]
        turns.done(seconds, start=start, recorded=recorded, weight_bytes=weights(model), **peak())


def theirs(turns: harness.Turns, size: str) -> None:
    model = model_of(size)

    def run(count: int, tokens: int) -> list[float]:
        ids = torch.tensor(prompts_of(count, size), device=DEVICE)
        begin = wait()
        model.generate(ids, max_new_tokens=1, do_sample=False)
        first = wait() - begin
        begin = wait()
        model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        return [first, (wait() - begin - first) / (tokens - 1)]

    while steps := turns.wait():
        seconds = [x for count in BATCHES for x in run(count, PEER_TOKENS if steps > 1 else 4)]
        turns.done(seconds, weight_bytes=weights(model), **peak())


def weights(model: Any) -> float:
    return float(sum(x.nbytes for x in model.parameters()))


def peak() -> dict[str, float]:
    return {"device_peak_bytes": float(torch.cuda.max_memory_reserved())} if GPU else {}


def copied_per_second() -> float | None:
    """Bytes read and written in a second by a copy on the device."""
    if not GPU:
        return None
    a, times = torch.empty(4 << 30, dtype=torch.uint8, device=DEVICE), []
    b = torch.empty_like(a)
    for _ in range(5):
        begin = wait()
        b.copy_(a)
        times.append(wait() - begin)
    return 2 * a.nbytes / min(times)


def measure(size: str, rounds: int, copied: float | None) -> dict[str, Any]:
    harness.say(size)
    contenders = [harness.Process("tutti", ours, size)]
    if size != "8B":
        contenders.append(harness.Process("generate", theirs, size))
    times = harness.take_turns(contenders, rounds, 2, warmup=1)
    for contender in contenders:
        contender.close()
    result: dict[str, Any] = {"facts": {x.name: x.facts for x in contenders}}
    for i, count in enumerate(BATCHES):
        for j, what in enumerate(("first token", "seconds per step")):
            row = {x.name: statistics.median(turn[2 * i + j] for turn in times[x.name]) for x in contenders}
            if "generate" in row:
                row["times faster"] = row["generate"] / row["tutti"]
            result[f"batch {count}, {what}"] = row
    if copied:
        step = result["batch 1, seconds per step"]["tutti"]
        result["memory share"] = contenders[0].facts["weight_bytes"] / step / copied
    harness.say(f"{size}: {result}")
    return result


def run(quick: bool) -> dict[str, Any]:
    copied = copied_per_second()
    sizes = ("small",) if not GPU else ("1B",) if quick else ("1B", "8B")
    models = {size: measure(size, 1 if quick else ROUNDS, copied) for size in sizes}
    return {"copied bytes per second": copied, "models": models}


if __name__ == "__main__":
    harness.main(run, __file__, packages=("transformers",))
