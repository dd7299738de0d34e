"""Training speed on one CPU: tutti against transformers.Trainer, and a bare loop, on the same Llama, in turns.

All contenders train the same model from the same weights on the same random tokens with AdamW and gradient
clipping, and must agree on the first loss. A step is everything from batch to updated weights.

Of ours in the fastest precision it is also told where the time goes at O1, by kind of operator, and what the machine
would need for that at the speed of its products of a layer's size, and of copies from memory to memory.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import fx
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import harness
import trainers
import tutti
from tutti.ir.costs import FREE
from tutti.ir.spec import Spec
from tutti.observe import recording
from tutti.observe.calls import calls_of


@dataclass(frozen=True)
class Case:
    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocab: int
    sequence: int
    batch: int
    rounds: int
    steps: int

    def model(self) -> LlamaForCausalLM:
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            intermediate_size=self.intermediate,
            vocab_size=self.vocab,
            max_position_embeddings=self.sequence,
            use_cache=False,
        )
        return LlamaForCausalLM(config).train()

    @property
    def tokens(self) -> int:
        """Tokens in a step."""
        return self.batch * self.sequence


FULL = Case(512, 8, 8, 1408, 8192, sequence=256, batch=8, rounds=6, steps=3)
QUICK = Case(256, 2, 4, 704, 4096, sequence=128, batch=4, rounds=3, steps=3)


class RandomTokens(Dataset):
    """Sequences of random tokens, a function of their index."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(self.case.vocab, (self.case.sequence,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def train_with_trainer(turns: harness.Turns, case: Case, arguments: dict[str, Any]) -> None:
    trainers.train_with_trainer(turns, case.model(), RandomTokens(case), case.batch, arguments)


def train_with_tutti(turns: harness.Turns, case: Case, level: str, dtype: torch.dtype) -> None:
    """``tutti.parallelize`` on one device; low precision with float32 masters."""
    step, batches = prepared(case, level, dtype)
    trainers.pass_turns(turns, lambda: step(next(batches)))


def prepared(case: Case, level: str, dtype: torch.dtype) -> tuple[tutti.Step, Iterator[dict[str, torch.Tensor]]]:
    model = case.model().to(dtype)
    model.config.use_cache = True  # transformers then leaves causality to the kernel; the capture drops the cache
    batches = iter(DataLoader(RandomTokens(case), batch_size=case.batch))
    first = next(batches)
    step = tutti.parallelize(model, trainers.adamw(model), first, level=level, clip_norm=trainers.CLIP_NORM,
                             fp32_master_weights=dtype != torch.float32)  # fmt: skip
    return step, itertools.chain([first], batches)


def train_in_a_loop(turns: harness.Turns, case: Case) -> None:
    """The shortest program: parameters and optimizer state in bfloat16, torch.compile, torch's fused AdamW."""
    model = case.model().to(torch.bfloat16)
    compiled, batches = torch.compile(model), iter(DataLoader(RandomTokens(case), batch_size=case.batch))
    trainers.train_in_a_loop(turns, model, batches, lambda model, batch: compiled(**batch).loss)


def profile(turns: harness.Turns, case: Case, level: str, dtype: torch.dtype) -> None:
    """In one turn of so many steps: seconds, FLOPs and bytes of each kind of operator, and what they would take at the
    machine's ceilings."""
    step, batches = prepared(case, level, dtype)
    step(next(batches))
    with tempfile.TemporaryDirectory() as folder:
        step.record(folder)
        for _ in range(turns.wait()):
            step(next(batches))
        seconds, rows = where(step, recording.read(Path(folder)))
    peak, bandwidth = ceilings(case, dtype)
    for row in rows.values():
        row["at_ceilings"] = max(row["flops"] / peak, row["bytes"] / bandwidth)
    facts = {"seconds": seconds, "product_flops_per_second": peak, "copied_bytes_per_second": bandwidth, "kinds": rows}
    turns.done([seconds], profile=facts)


def where(step: tutti.Step, recorded: recording.Recording) -> tuple[float, dict[str, dict[str, float]]]:
    """Median seconds of a step, and those of its kinds of calls with their FLOPs and bytes, the longest first."""
    taken, whole = defaultdict[int, list[float]](list), []
    for number in recorded.steps:
        ((_, run),) = recorded.of(number)
        whole.append(run.seconds)
        for block in run.blocks:
            taken[block.number].append(block.end - block.begin)
    rows: dict[str, dict[str, float]] = defaultdict(lambda: {"seconds": 0.0, "flops": 0, "bytes": 0})
    for i, (node, call) in enumerate(calls_of(step.program).items()):
        row = rows[kind(node)]
        row["seconds"] += median(taken[i])
        row["flops"] += call.flops
        if node.target not in FREE:
            row["bytes"] += sum(map(size, {*node.all_input_nodes, node}))
    rest = median(whole) - sum(row["seconds"] for row in rows.values())
    rows["between operators"] = {"seconds": rest, "flops": 0, "bytes": 0}
    return median(whole), dict(sorted(rows.items(), key=lambda item: -item[1]["seconds"]))


def kind(node: Any) -> str:
    name = str(node.target)
    if "adam" in name:
        return "update"
    if "logsumexp" in name:
        return "loss and its linear layer"
    if "inside" in node.meta:
        return "compiled functions with products" if node.meta["flops"] else "compiled kernels"
    if "attention" in name:
        return "attention"
    if any(product in name for product in ("aten.mm", "aten.addmm", "aten.bmm")):
        return "products"
    return "other operators"


def size(node: fx.Node) -> int:
    """Bytes of what a node makes."""
    value = node.meta.get("val")
    return sum(x.bytes for x in (value if isinstance(value, tuple) else [value]) if isinstance(x, Spec))


def ceilings(case: Case, dtype: torch.dtype) -> tuple[float, float]:
    """FLOP/s of a product of a layer's size; bytes/s, read and written, of copies that no cache holds."""
    x, weight = torch.randn(case.tokens, case.hidden).to(dtype), torch.randn(case.intermediate, case.hidden).to(dtype)
    source, target = torch.ones(1 << 26), torch.ones(1 << 26)
    product = shortest(lambda: torch.mm(x, weight.t()))
    copy = shortest(lambda: target.copy_(source))
    return 2 * case.tokens * case.hidden * case.intermediate / product, 2 * source.nbytes / copy


def shortest(call: Any) -> float:
    """Seconds."""
    taken = []
    for _ in range(30):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return min(taken)


def run(quick: bool) -> dict[str, Any]:
    case = QUICK if quick else FULL
    trainer, bf16, float32 = train_with_trainer, torch.bfloat16, torch.float32
    peers = [
        harness.Process("Trainer float32", trainer, case, {"bf16": False}),
        harness.Process("Trainer bf16", trainer, case, {"bf16": True}),
        harness.Process("Trainer bf16 compiled", trainer, case, {"bf16": True, "torch_compile": True}),
    ]
    if not quick:
        peers.append(harness.Process("loop in bf16, compiled", train_in_a_loop, case))
    levels = [("O0", float32), ("O2", bf16)]
    if not quick:
        levels += [("O2", float32), ("O0", bf16), ("O1", bf16)]
    named = {f"tutti {'bf16' if dtype is bf16 else 'float32'} {level}": (level, dtype) for level, dtype in levels}
    ours = [harness.Process(name, train_with_tutti, case, *how) for name, how in named.items()]
    contenders = [*ours, *peers]
    times = harness.take_turns(contenders, case.rounds, case.steps)
    for contender in contenders:
        contender.close()
    losses = {contender.name: contender.facts["first_loss"] for contender in contenders}
    if max(losses.values()) - min(losses.values()) > 0.01 * min(losses.values()):
        raise RuntimeError(f"the contenders do not train the same model: first losses {losses}")
    peaks = {contender.name: contender.facts["peak_rss_bytes"] for contender in contenders}
    figures = {}
    for name, seconds in times.items():
        figures[name] = {
            "tokens_per_second": case.tokens / harness.summary(seconds)["median"],
            "seconds_per_step": harness.summary(seconds),
            "first_loss": losses[name],
            "peak_rss_bytes": peaks[name],
        }
    rivals = [name for name in times if name.startswith("Trainer")]
    best = harness.ratio(times, list(named), rivals)
    harness.say(f"{best['ours']} is {best['times_faster']:.2f} x as fast as {best['peer']}")
    profiled = harness.Process("profile", profile, case, "O1", named[best["ours"]][1])
    profiled.turn(4 * case.steps)
    breakdown = profiled.facts["profile"]
    profiled.close()
    for name, row in breakdown["kinds"].items():
        harness.say(f"{name:34} {1e3 * row['seconds']:8.1f} ms, at the ceilings {1e3 * row['at_ceilings']:8.1f} ms")
    if not quick:
        draw(figures, breakdown)
    return {"case": vars(case), "contenders": figures, "ratio": best, "profile": breakdown}


def draw(figures: dict[str, Any], breakdown: dict[str, Any]) -> None:
    speeds, kinds = (figure := Figure((10, 4), layout="constrained")).subplots(1, 2)
    names = sorted(figures, key=lambda name: figures[name]["tokens_per_second"])
    speeds.barh(names, [figures[name]["tokens_per_second"] for name in names])
    speeds.set(xlabel="tokens/s")
    rows = list(breakdown["kinds"].items())[::-1]
    for shift, what, label in ((0.2, "seconds", "measured"), (-0.2, "at_ceilings", "at the machine's ceilings")):
        kinds.barh([i + shift for i in range(len(rows))], [1e3 * row[what] for _, row in rows], 0.4, label=label)
    kinds.set_yticks(range(len(rows)), [name for name, _ in rows])
    kinds.set(xlabel="ms of a step")
    kinds.legend()
    figure.savefig(harness.RESULTS / "train_cpu.svg")


if __name__ == "__main__":
    harness.main(run, __file__, packages=("transformers", "accelerate"))
