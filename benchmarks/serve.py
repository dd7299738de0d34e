"""The engine beside `transformers`: decoding one and 16 sequences, and a mixed load of 32 requests, in turns.

Random weights, bfloat16, two threads, greedy. Each contender is a process of its own; one waits while the other works.
OpenVINO GenAI has the same weights, converted, and an environment of its own. By model:

- `batch 1`, `batch 16`: prompts of 64 tokens, then 64 (32 for the larger model): seconds to the first token, and of
  each further step. Peers: `generate`, with its dynamic cache; OpenVINO.
- the same with `int8` and `int4` weights; peers: OpenVINO, and our bfloat16.
- `mixed`: 32 requests at once, prompts of 16 to 256 tokens, outputs of 16 to 128: output tokens per second. Peers:
  `generate` with static batches of 16, left-padded, of which useful tokens count; its continuous batching; OpenVINO
  (for the larger model, OpenVINO alone).
- `times faster`: ours over the peer, median over turns.
- A run that is stopped goes on with the next row when it is started again.
- `memory, bytes/s`: what two threads read from memory, the median over turns. A virtual machine may change between two
  speeds, as its host places its cores: ratios are of turns that follow each other.
- `bytes/s`: of the weights in a step of one sequence, and what this machine reads from memory.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import harness

SIZES = {
    "104M": dict(hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
                 num_key_value_heads=12),
    "1B": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
               num_key_value_heads=8),
}  # fmt: skip
PROMPT, TOKENS, ROUNDS = 64, {"104M": 64, "1B": 32}, 5
KINDS = "int8", "int4"
CONTENDERS = {
    "batch 1": ("tutti", "generate", "openvino"),
    "batch 16": ("tutti", "generate", "openvino"),
    "mixed": ("tutti", "static batches", "continuous batching", "openvino"),
    **{f"batch {n} {kind}": (f"tutti {kind}", "tutti", f"openvino {kind}") for n in (1, 16) for kind in KINDS},
}
LARGE = {"mixed": ("tutti", "openvino")}  # contenders of the larger model, where they are fewer: others take an hour
OPENVINO = "openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0", "torch==2.13.0"


def model_of(size: str) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=32000, tie_word_embeddings=True, max_position_embeddings=1024, eos_token_id=None,
                         bos_token_id=None, pad_token_id=0, **SIZES[size])  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def load_of(case: str, size: str) -> list[tuple[list[int], int]]:
    """(prompt, number of tokens) of each request."""
    draw = random.Random(0)

    def tokens(n: int) -> list[int]:
        return [draw.randrange(3, 32000) for _ in range(n)]

    if case == "mixed":
        return [(tokens(draw.randint(16, 256)), draw.randint(16, 128)) for _ in range(32)]
    return [(tokens(PROMPT), TOKENS[size]) for _ in range(int(case.split()[1]))]


def work(turns: harness.Turns, whose: str, case: str, size: str) -> None:
    torch.set_num_threads(2)
    model, load = model_of(size), load_of(case, size)
    name, _, kind = whose.partition(" ")
    run = {
        "tutti": lambda model: ours(model, kind),
        "generate": theirs,
        "static batches": static,
        "continuous batching": continuous,
    }[name if name == "tutti" else whose](model)
    while steps := turns.wait():
        times = []
        for _ in range(steps):
            times += run(load, case == "mixed")
        turns.done(times)


def ours(model: Any, kind: str) -> Any:
    from tutti.serve import Engine, Request, Sampling

    engine = Engine(model, plan="single", memory=512 << 20, prefix_cache=False, quantize=kind)  # pyright: ignore
    engine.warm_up()

    def run(load: list[tuple[list[int], int]], mixed: bool) -> list[float]:
        begin = time.perf_counter()
        outputs = [engine.add(Request(x, Sampling(max_tokens=n, temperature=0, ignore_end=True))) for x, n in load]
        first = 0.0
        while engine.busy:
            engine.step()
            if not first and all(x.tokens for x in outputs):
                first = time.perf_counter() - begin
        return _times(begin, first, load, mixed)

    return run


def _times(begin: float, first: float, load: list[tuple[list[int], int]], mixed: bool) -> list[float]:
    whole = time.perf_counter() - begin
    return [whole] if mixed else [first, (whole - first) / (load[0][1] - 1)]


def theirs(model: Any) -> Any:
    def run(load: list[tuple[list[int], int]], mixed: bool) -> list[float]:
        ids = torch.tensor([x for x, _ in load])
        begin = time.perf_counter()
        model.generate(ids, max_new_tokens=1, do_sample=False)
        first = time.perf_counter() - begin
        begin = time.perf_counter()
        model.generate(ids, max_new_tokens=load[0][1], min_new_tokens=load[0][1], do_sample=False)
        return _times(begin, first, load, mixed)

    return run


def static(model: Any) -> Any:
    def run(load: list[tuple[list[int], int]], mixed: bool) -> list[float]:
        begin = time.perf_counter()
        for i in range(0, len(load), 16):
            part = load[i : i + 16]
            longest, most = max(len(x) for x, _ in part), max(n for _, n in part)
            ids = torch.tensor([[0] * (longest - len(x)) + x for x, _ in part])
            mask = torch.tensor([[0] * (longest - len(x)) + [1] * len(x) for x, _ in part])
            model.generate(ids, attention_mask=mask, max_new_tokens=most, min_new_tokens=most, do_sample=False)
        return _times(begin, 0.0, load, True)

    return run


def continuous(model: Any) -> Any:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    batching = ContinuousBatchingConfig(num_blocks=256, max_batch_tokens=512)
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=128)

    def run(load: list[tuple[list[int], int]], mixed: bool) -> list[float]:
        begin = time.perf_counter()
        manager = model.init_continuous_batching(generation_config=greedy, continuous_batching_config=batching)
        manager.start()
        try:
            for x, n in load:
                manager.add_request(x, max_new_tokens=n)
            left = len(load)
            while left:
                output = manager.get_result(timeout=60)
                left -= bool(output and output.is_finished())
        finally:
            manager.stop(block=True)
        return _times(begin, 0.0, load, True)

    return run


class OpenVINO(harness.Peer):
    """OpenVINO GenAI with the weights of a model, in `folder` once they are converted."""

    def __init__(self, whose: str, case: str, size: str, folder: Path) -> None:
        if not (source := folder / size).exists():
            model_of(size).save_pretrained(source)
        kind = whose.partition(" ")[2] or "bf16"
        super().__init__(whose, OPENVINO, "serve_openvino.py", str(source), str(folder / f"{size}-{kind}"), kind)
        self.load, self.mixed = load_of(case, size), case == "mixed"

    def turn(self, steps: int) -> list[float]:
        first, whole, _ = self.ask(self.load)
        return [whole] if self.mixed else [first, (whole - first) / (self.load[0][1] - 1)]


def bandwidth() -> float:
    """Bytes read in a second, by two threads that sum 256 MB."""
    x = torch.ones(64 << 20)
    x.sum()
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        x.sum()
        times.append(time.perf_counter() - begin)
    return x.nbytes / min(times)


def compared(case: str, size: str, rounds: int, folder: Path) -> dict[str, Any]:
    names = LARGE.get(case, CONTENDERS[case]) if size == "1B" else CONTENDERS[case]
    contenders = {x: OpenVINO(x, case, size, folder) if x.startswith("openvino") else
                  harness.Process(x, work, x, case, size) for x in names}  # fmt: skip
    own = names[0]
    seconds: dict[str, list[list[float]]] = {x: [] for x in contenders}
    speeds = []
    for i in range(rounds + 1):
        speeds.append(bandwidth())
        for name, contender in list(contenders.items()):
            try:
                timing = contender.turn(1)
            except RuntimeError as error:
                harness.say(str(error))
                del contenders[name]
                continue
            if i:
                seconds[name].append(timing)
    for contender in contenders.values():
        contender.close()
    figures: dict[str, Any] = {}
    for name, rows in seconds.items():
        if not rows:
            continue
        if case == "mixed":
            tokens = sum(n for _, n in load_of(case, size))
            figures[name] = {"tokens per second": tokens / statistics.median(x[0] for x in rows)}
        else:
            figures[name] = {"first token, s": statistics.median(x[0] for x in rows),
                             "step, s": statistics.median(x[1] for x in rows)}  # fmt: skip
        if name != own:
            figures[name]["times faster"] = statistics.median(
                b[-1] / a[-1] for a, b in zip(seconds[own], rows, strict=False)
            )
    figures["memory, bytes/s"] = statistics.median(speeds)
    harness.say(f"{size}, {case}: {figures}")
    return figures


def run(quick: bool) -> dict[str, Any]:
    sizes = ["104M"] if quick else list(SIZES)
    rounds = 1 if quick else ROUNDS
    cases = [case for case in CONTENDERS if not quick or not case.endswith(KINDS)]
    figures: dict[str, Any] = {}
    rows = harness.Rows("serve-quick" if quick else "serve", ["transformers"])
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            figures[size] = {
                case: rows.row(f"{size}, {case}", partial(compared, case, size, rounds, Path(folder))) for case in cases
            }
        weights = sum(p.numel() * 2 for p in model_of(size).parameters())
        figures[size]["bytes/s"] = {"decoding": weights / figures[size]["batch 1"]["tutti"]["step, s"],
                                    "memory": bandwidth()}  # fmt: skip
    return figures


if __name__ == "__main__":
    harness.main(run, __file__, ["transformers"])
