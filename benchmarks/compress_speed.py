"""Decoding with quantized weights beside llama.cpp, OpenVINO and torchao: the same model, in turns.

A Llama of 104M parameters with random weights, vocabulary 32000, and tied embeddings, one thread, greedy: prompts of 64
tokens, then 64 (one sequence) or 32 (16 sequences). Ours are engines with recipes of `tutti.compress`; each contender
is a process of its own, and one waits while the others work. By batch and contender:

- `step, s`: of each step after the first token; `step, CPU s`: processor time of these, which other work on the machine
  changes least.
- `times faster`: our step of the same bits over the peer's, by processor time, median over rounds.

llama.cpp and torchao have their packages in folders of their own beside this environment, and use its torch
(`harness.Beside`); OpenVINO has an environment of its own. A peer that fails is left out, with its error on stderr.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import harness
import serve

THREADS, ROUNDS = 1, 3
TOKENS = {1: 64, 16: 32}
OURS = {"bf16": "", "int8": "int8-e8", "int8, a8": "int8-a8-e8", "int4": "int4-g64-e8", "int4-g32": "int4-g32-e8",
        "int3": "int3-g64-e8", "int2": "int2-g64-e8"}  # fmt: skip
# Peers, with ours of the same bits.
PEERS = {"llama.cpp q8_0": "int8", "llama.cpp q4_0": "int4", "torchao int8": "int8", "torchao int8-dynamic": "int8, a8",
         "torchao int4": "int4", "openvino int8": "int8", "openvino int4": "int4"}  # fmt: skip
LLAMA = {"CMAKE_ARGS": "-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON "
                       "-DGGML_AVX512_BF16=ON -DLLAVA_BUILD=OFF"}  # its AMX buffers crash  # fmt: skip
PACKAGES = {
    "llama.cpp": (("llama-cpp-python==0.3.36", "diskcache"), LLAMA),
    "torchao": (("torchao==0.18.0",), {}),
}  # fmt: skip


def load_of(batch: int) -> list[tuple[list[int], int]]:
    return [(prompt, TOKENS[batch]) for prompt, _ in serve.load_of(f"batch {batch}", "104M")]


def work(turns: harness.Turns, recipe: str, batch: int) -> None:
    """An engine of ours. Each turn is [seconds to the first token, of a step, CPU seconds of a step]."""
    torch.set_num_threads(THREADS)
    import tutti
    from tutti.serve import Engine, Request, Sampling

    model = serve.model_of("104M")
    engine = Engine(tutti.compress(model, recipe).model if recipe else model, plan="single", memory=512 << 20,
                    prefix_cache=False)  # fmt: skip
    engine.warm_up()
    load = load_of(batch)
    while turns.wait():
        begin, first, cpu = time.perf_counter(), 0.0, 0.0
        outputs = [engine.add(Request(x, Sampling(max_tokens=n, temperature=0, ignore_end=True))) for x, n in load]
        while engine.busy:
            engine.step()
            if not first and all(x.tokens for x in outputs):
                first, cpu = time.perf_counter() - begin, time.process_time()
        turns.done(_times(first, time.perf_counter() - begin, time.process_time() - cpu, batch))


def _times(first: float, whole: float, cpu: float, batch: int) -> list[float]:
    return [first, (whole - first) / (TOKENS[batch] - 1), cpu / (TOKENS[batch] - 1)]


class OpenVINO(harness.Peer):
    def __init__(self, name: str, batch: int, folder: Path) -> None:
        kind = name.split()[1]
        super().__init__(name, serve.OPENVINO, "serve_openvino.py", str(folder / "model"), str(folder / kind), kind,
                         str(THREADS))  # fmt: skip
        self.batch, self.load = batch, load_of(batch)

    def turn(self, steps: int) -> list[float]:
        first, whole, cpu = self.ask(self.load)
        return _times(first, whole, cpu, self.batch)


class Peer(harness.Beside):
    def __init__(self, name: str, batch: int, folder: Path) -> None:
        library, kind = name.split()
        script, *arguments = {
            "llama.cpp": ("serve_llama.py", str(folder / f"{kind}.gguf")),
            "torchao": ("serve_torchao.py", str(folder / "model"), kind),
        }[library]
        super().__init__(name, *PACKAGES[library], script, *arguments, str(THREADS))
        self.batch, self.load = batch, load_of(batch)

    def turn(self, steps: int) -> list[float]:
        first, whole, cpu = self.ask(self.load)
        return _times(first, whole, cpu, self.batch)


def compared(batch: int, rounds: int, folder: Path, quick: bool) -> dict[str, Any]:
    ours = {name: recipe for name, recipe in OURS.items() if not quick or name in ("bf16", "int8")}
    contenders: dict[str, Any] = {x: harness.Process(x, work, recipe, batch) for x, recipe in ours.items()}
    if not quick:
        contenders |= {x: (OpenVINO if x.startswith("openvino") else Peer)(x, batch, folder) for x in PEERS}
    seconds: dict[str, list[list[float]]] = {x: [] for x in contenders}
    for i in range(rounds + 1):  # the first warms up
        for name, contender in list(contenders.items()):
            try:
                timing = contender.turn(1)
            except RuntimeError as error:
                harness.say(str(error))
                del contenders[name], seconds[name]
                continue
            if i:
                seconds[name].append(timing)
        harness.say(f"batch {batch}: round {i} of {rounds}")
    for contender in contenders.values():
        contender.close()
    figures: dict[str, Any] = {}
    for name, rows in seconds.items():
        first, step, cpu = (statistics.median(x) for x in zip(*rows, strict=True))
        figures[name] = {"first token, s": first, "step, s": step, "step, CPU s": cpu, "tokens/s": batch / step}
        if name in PEERS:
            own = seconds[PEERS[name]]
            figures[name]["times faster"] = statistics.median(b[2] / a[2] for a, b in zip(own, rows, strict=True))
    harness.say(f"batch {batch}: {figures}")
    return figures


def run(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not quick:
            from tutti.compress.formats import gguf

            model = serve.model_of("104M")
            model.save_pretrained(folder / "model")
            for kind in ("q8_0", "q4_0"):
                gguf.save(model, folder / f"{kind}.gguf", kind)
        rounds = 1 if quick else ROUNDS
        return {f"batch {n}": compared(n, rounds, folder, quick) for n in ((1,) if quick else TOKENS)}


if __name__ == "__main__":
    harness.main(run, __file__, ["transformers"])
