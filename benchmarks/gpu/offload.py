"""The largest Llama that trains on one GPU under a budget of its memory, with what lies outside of it on the host.

For each plan the largest depth that fits by prediction is trained for real (bfloat16, float32 masters, AdamW, one
sequence): a depth counts when its steps run and the runtime's accounting keeps the budget. Where it does not, the depth
is lowered until it does, else raised as long as it does. The table holds predicted peak and step time against what is
measured then. The host's memory bounds what can be tried. Without a GPU the same runs on the CPU, with files outside.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))

import harness
import tutti
from tutti.exec.stores.memory_budget import OverBudget, bytes_of
from tutti.hardware.local import local
from tutti.lower.variants.vary import vary
from tutti.plan.planner import Planner
from tutti.plan.textbook import parse_name
from tutti.sim.dryrun import dry_run

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
PLANS = ("single", "recompute", "offload", "recomputexoffload", "recomputexoffload2", "offload3")
STEPS = 4
VOCABULARY = 4096


class Case:
    """Sizes of a model, and what it may take. most: layers."""

    def __init__(self, quick: bool):
        small = quick or not GPU
        self.budget = "128MiB" if small else "32GiB"
        self.width, self.inner, self.heads, self.seq = (256, 704, 4, 128) if small else (4096, 11008, 32, 2048)
        self.most = 24 if small else 56

    def model(self, layers: int) -> torch.nn.Module:
        config = transformers.LlamaConfig(
            hidden_size=self.width, num_hidden_layers=layers, num_attention_heads=self.heads,
            num_key_value_heads=self.heads, intermediate_size=self.inner, vocab_size=VOCABULARY,
            max_position_embeddings=self.seq,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config).to(torch.bfloat16)

    def batch(self, device: torch.device | str) -> dict[str, torch.Tensor]:
        ids = torch.arange(self.seq).remainder(VOCABULARY).reshape(1, -1).to(device)
        return {"input_ids": ids, "labels": ids}

    def predict(self, layers: int, plan: str) -> tutti.DryRun:
        """A step that nobody runs."""
        with torch.device("meta"):
            model = self.model(layers)
        graph = tutti.capture(
            model, self.batch("meta"), torch.optim.AdamW(model.parameters(), lr=1e-4), fp32_master_weights=True
        )
        variant, cluster = parse_name(plan, 1).variant, local(1)
        planner = Planner(vary(graph, variant), cluster, variant=variant)
        return dry_run(planner.step, planner.named(plan), cluster, "O0")

    def train(self, layers: int, plan: str) -> dict[str, Any] | None:
        """Real steps; None where the budget does not do."""
        gc.collect()
        torch.manual_seed(0)
        with DEVICE:
            model = self.model(layers)
        count = sum(p.numel() for p in model.parameters())
        try:
            step = tutti.parallelize(model, torch.optim.AdamW(model.parameters(), lr=1e-4), self.batch(DEVICE),
                                     plan=plan, level="O0", fp32_master_weights=True, memory=self.budget)  # fmt: skip
            step.model.to("cpu")  # the step has copies of its own
            losses, seconds = [], []
            for i in range(STEPS):
                if GPU and i == 1:
                    torch.cuda.reset_peak_memory_stats()
                start = time.perf_counter()
                losses.append(step(self.batch(DEVICE)).item())
                seconds.append(time.perf_counter() - start)
        except (OverBudget, torch.OutOfMemoryError) as error:
            harness.say(f"{plan}, {layers} layers: {str(error).partition(',')[0]}")
            return None
        measured, counted = (
            (torch.cuda.max_memory_allocated() if GPU else step.budgets[0].most),
            step.budgets[0].most,
        )
        figures = {
            "layers": layers, "parameters": count, "losses": losses, "step_seconds": statistics.median(seconds[1:]),
            "peak_bytes": measured, "counted_bytes": counted, "host_bytes": step.offload_store.bytes,
        }  # fmt: skip
        harness.say(f"{plan}, {layers} layers: {count / 1e9:.2f}B, {figures['step_seconds']:.2f} s, peak "
                    f"{measured / 2**30:.2f} GiB, outside {step.offload_store.bytes / 2**30:.2f} GiB")  # fmt: skip
        return figures

    def fits(self, layers: int, plan: str) -> bool:
        return self.predict(layers, plan).prediction().peak_bytes <= bytes_of(self.budget)

    def largest(self, plan: str) -> dict[str, Any] | None:
        """What is found for the largest depth."""
        low, high = 0, self.most + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle, plan) else (low, middle)
        if not low:
            return None
        predicted, at = low, low
        figures = self.train(at, plan)
        while figures is None and at > 1:
            at -= 1
            figures = self.train(at, plan)
        while figures and predicted <= at < self.most and (more := self.train(at + 1, plan)):
            figures, at = more, at + 1
        if figures is None:
            return None
        expected = self.predict(at, plan).prediction()
        return {**figures, "predicted_layers": predicted, "predicted_peak_bytes": expected.peak_bytes,
                "predicted_step_seconds": expected.step_seconds}  # fmt: skip


def run(quick: bool) -> dict[str, Any]:
    case = Case(quick)
    plans = {plan: case.largest(plan) for plan in (PLANS[:3] if quick else PLANS)}
    base = plans["single"]
    equal = {}
    if base:
        equal = {plan: (trained := case.train(base["layers"], plan)) and trained["losses"] == base["losses"]
                 for plan in list(plans)[1:]}  # fmt: skip
    rows = {plan: row for plan, row in plans.items() if row}

    def ratios(above: str, below: str) -> dict[str, float]:
        return {plan: row[above] / row[below] for plan, row in rows.items()}

    return {
        "budget_bytes": bytes_of(case.budget), "most_layers": case.most, "plans": plans, "same_losses_as_single": equal,
        "times_the_parameters": {p: row["parameters"] / base["parameters"] for p, row in rows.items() if base},
        "predicted_peak_over_measured": ratios("predicted_peak_bytes", "peak_bytes"),
        "predicted_time_over_measured": ratios("predicted_step_seconds", "step_seconds"),
    }  # fmt: skip


if __name__ == "__main__":
    harness.main(run, __file__, packages=("transformers",))
