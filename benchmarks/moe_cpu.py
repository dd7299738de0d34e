"""Experts on one CPU: a training step of a small Mixtral with our experts and with those of transformers, in turns.

All contenders train the same model from the same weights on the same random tokens with AdamW, and must agree on the
first loss. In plain loops only the implementation of the experts differs; "tutti" goes through `tutti.parallelize`.
`batched_mm` copies the experts' weights for every token: it takes part where that fits.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import MixtralConfig, MixtralForCausalLM

import harness
import tutti
import tutti.models.experts

LR = 1e-3
FITS = 4 << 30  # bytes of copies


@dataclass(frozen=True)
class Case:
    hidden: int
    layers: int
    heads: int
    intermediate: int
    experts: int
    top_k: int
    vocab: int
    sequence: int
    batch: int
    rounds: int
    steps: int

    def model(self, dtype: torch.dtype) -> MixtralForCausalLM:
        torch.manual_seed(0)
        config = MixtralConfig(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            intermediate_size=self.intermediate,
            num_local_experts=self.experts,
            num_experts_per_tok=self.top_k,
            vocab_size=self.vocab,
            max_position_embeddings=self.sequence,
        )
        return MixtralForCausalLM(config).train().to(dtype)

    def tokens(self) -> dict[str, torch.Tensor]:
        ids = torch.randint(self.vocab, (self.batch, self.sequence), generator=torch.Generator().manual_seed(1))
        return {"input_ids": ids, "labels": ids}

    def copied(self, dtype: torch.dtype) -> int:
        """Bytes of weights that `batched_mm` copies in a forward pass, and keeps."""
        weights = 3 * self.hidden * self.intermediate * dtype.itemsize
        return self.layers * self.batch * self.sequence * self.top_k * weights


FULL = Case(512, 4, 8, 1024, experts=8, top_k=2, vocab=4096, sequence=256, batch=4, rounds=5, steps=2)
QUICK = Case(128, 2, 4, 256, experts=8, top_k=2, vocab=1024, sequence=64, batch=4, rounds=3, steps=3)


def in_a_loop(turns: harness.Turns, case: Case, implementation: str, dtype: torch.dtype) -> None:
    model, batch = case.model(dtype), case.tokens()
    model.set_experts_implementation(implementation)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step() -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    _measure(turns, step)


def with_tutti(turns: harness.Turns, case: Case, level: str, dtype: torch.dtype) -> None:
    model, batch = case.model(dtype), case.tokens()
    step = tutti.parallelize(model, torch.optim.AdamW(model.parameters(), lr=LR), batch, cluster="auto", level=level)
    _measure(turns, lambda: step(batch))


def _measure(turns: harness.Turns, step) -> None:
    first = None
    while steps := turns.wait():
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            loss = step()
            seconds.append(time.perf_counter() - start)
            first = loss.item() if first is None else first
        turns.done(seconds, first_loss=first)


def compare(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Figures of one dtype."""
    theirs = ["eager", "grouped_mm"] + (["batched_mm"] if case.copied(dtype) <= FITS else [])
    peers = [harness.Process(f"transformers {name}", in_a_loop, case, name, dtype) for name in theirs]
    loop = harness.Process("tutti's experts in the same loop", in_a_loop, case, "tutti", dtype)
    ours = [harness.Process(f"tutti {level}", with_tutti, case, level, dtype) for level in ("O0", "O2")]
    contenders = [loop, *ours, *peers]
    times = harness.take_turns(contenders, case.rounds, case.steps)
    for contender in contenders:
        contender.close()
    losses = {c.name: c.facts["first_loss"] for c in contenders}
    if max(losses.values()) - min(losses.values()) > 0.01 * min(losses.values()):
        raise RuntimeError(f"the contenders do not train the same model: first losses {losses}")
    figures = {
        c.name: {
            "seconds_per_step": harness.summary(times[c.name]),
            "peak_rss_bytes": c.facts["peak_rss_bytes"],
            "first_loss": losses[c.name],
        }
        for c in contenders
    }
    rivals = [c.name for c in peers]
    ratios = {
        "experts": harness.ratio(times, [loop.name], rivals),
        "step": harness.ratio(times, [c.name for c in ours], rivals),
    }
    for what, row in ratios.items():
        harness.say(f"{dtype}, {what}: {row['ours']} is {row['times_faster']:.2f} x as fast as {row['peer']}")
    left_out = {} if len(theirs) == 3 else {"batched_mm": f"would copy {case.copied(dtype) / 2**30:.0f} GiB of weights"}
    return {"contenders": figures, "left_out": left_out, "ratios": ratios}


def run(quick: bool) -> dict[str, Any]:
    case = QUICK if quick else FULL
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return {"case": vars(case), **{name: compare(case, dtype) for name, dtype in dtypes.items()}}


if __name__ == "__main__":
    harness.main(run, __file__, packages=("transformers",))
