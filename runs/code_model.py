"""A small code model: fill in the middle on Python's standard library, then pass@k on small functions.

1. A Llama of one million parameters learns Python from the standard library. Half of the texts have their middle
   moved to the end (Bavarian et al. 2022).
2. It learns to write the body of small functions with a docstring, of which some are held out.
3. For each function held out it writes the body, once after the docstring and once between docstring and call, where
   it sees what follows. The samples are executed in a process with limits (`tutti.train.scores.execution`); pass@k is
   the unbiased estimate of Chen et al. 2021.

    python runs/code_model.py                  # about ten minutes on two cores
    python runs/code_model.py --quick          # seconds; the model learns nothing
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from support import Results, arguments, curve, options, picture, train

import tutti
from tutti.data.tokenizer import train_tokenizer
from tutti.train.scores.execution import pass_at_k, passes
from tutti.train.tasks import get_task
from tutti.train.tasks.language.fill_in_the_middle import markers

MARKERS = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]
NAMES = ["f", "g", "change", "compute", "apply", "value"]


@dataclass(frozen=True)
class Problem:
    """A function: text before its body, the body, text after it, and tests (arguments, result)."""

    name: str
    before: str
    body: str
    after: str
    tests: list[tuple[list[Any], Any]]

    @property
    def text(self) -> str:
        return self.before + self.body + self.after


def problems() -> Iterator[tuple[str, str, str]]:
    """(docstring, expression, kind of argument) of all functions."""
    for a in range(2, 10):
        yield f"Return whether x is a multiple of {a}.", f"x % {a} == 0", "number"
        yield f"Return the items of x above {a}.", f"[y for y in x if y > {a}]", "list"
        yield f"Return how many items of x are {a}.", f"x.count({a})", "list"
        yield f"Return the sum of x, times {a}.", f"sum(x) * {a}", "list"
        for b in range(1, 10):
            yield f"Return x times {a}, plus {b}.", f"x * {a} + {b}", "number"
            yield f"Return x minus {b}, times {a}.", f"(x - {b}) * {a}", "number"
            yield f"Return the larger of x times {a} and {b}.", f"max(x * {a}, {b})", "number"
            yield f"Return each item of x times {a}, plus {b}.", f"[y * {a} + {b} for y in x]", "list"


def made_problems(seed: int = 0) -> list[Problem]:
    """All functions, shuffled, each under one of a few names."""
    draw = random.Random(seed)
    found = []
    for said, expression, kind in problems():
        name = draw.choice(NAMES)
        values: list[Any] = [0, 1, 2, 7, 12, -5] if kind == "number" else [[], [1], [3, 9, 2, 9], [5, -4, 8]]
        function = eval(f"lambda x: {expression}")
        tests = [([value], function(value)) for value in values]
        before = f'def {name}(x):\n    """{said}"""\n'
        found.append(Problem(name, before, f"    return {expression}\n", f"\n\nprint({name}({values[1]}))\n", tests))
    draw.shuffle(found)
    return found


def library_texts(most: int, size: int = 400) -> list[dict[str, str]]:
    """Pieces of the standard library of about `size` characters, cut at lines."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    pieces, draw = [], random.Random(0)
    for file in files:
        piece = ""
        for line in file.read_text(errors="replace").splitlines(keepends=True):
            piece += line
            if len(piece) >= size:
                pieces.append({"text": piece})
                piece = ""
    draw.shuffle(pieces)
    return pieces[:most]


def make_model(tokenizer: Any, quick: bool) -> Any:
    width, layers = (32, 1) if quick else (128, 4)
    end = tokenizer.eos_token_id
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256, tie_word_embeddings=True,
            bos_token_id=end, eos_token_id=end, pad_token_id=end,
        )
    )  # fmt: skip


@torch.no_grad()
def write(model: Any, tokenizer: Any, ids: list[int], samples: int, temperature: float) -> list[str]:
    """Samples of what follows some tokens."""
    given = torch.tensor([ids] * samples, device=model.device)
    made = model.eval().generate(given, attention_mask=torch.ones_like(given), max_new_tokens=40, do_sample=True,
                                 temperature=temperature, top_k=0, use_cache=True)  # fmt: skip
    return tokenizer.batch_decode(made[:, len(ids) :], skip_special_tokens=True)


def lessons(known: list[Problem], tokenizer: Any) -> list[dict[str, list[int]]]:
    """Tokens of each function as it is, and with its body moved to the end; only the body has labels."""
    prefix, middle, suffix = markers(tokenizer)
    made = []
    for problem in known:
        before, body, after = (tokenizer(x)["input_ids"] for x in (problem.before, problem.body, problem.after))
        body = [*body, tokenizer.eos_token_id]
        for first in (before, [prefix, *before, suffix, *after, middle]):
            made.append({"input_ids": [*first, *body], "labels": [-100] * len(first) + body})
    return made


@dataclass(frozen=True)
class Pad:
    """A batch of lessons, padded to one length."""

    length: int

    def __call__(self, rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        filled = {"input_ids": 0, "labels": -100, "attention_mask": 0}
        rows = [row | {"attention_mask": [1] * len(row["labels"])} for row in rows]
        return {key: torch.tensor([(row[key] + [value] * self.length)[: self.length] for row in rows])
                for key, value in filled.items()}  # fmt: skip


def correct(problem: Problem, bodies: list[str]) -> int:
    """How many of the bodies pass the tests. Equal bodies are executed once."""
    verdict: dict[str, bool] = {}
    for body in bodies:
        if body not in verdict:
            verdict[body] = passes(problem.before + body, problem.name, problem.tests) == ""
    return sum(verdict[body] for body in bodies)


def measure(model: Any, tokenizer: Any, held_out: list[Problem], samples: int) -> dict[str, dict[str, float]]:
    """pass@k of bodies that are written after the docstring, and between docstring and call."""
    prefix, middle, suffix = markers(tokenizer)
    counts: dict[str, list[int]] = {"left to right": [], "infilling": []}
    for problem in held_out:
        before, after = (tokenizer(x)["input_ids"] for x in (problem.before, problem.after))
        plain = write(model, tokenizer, before, samples, 0.8)
        lines = ["".join(text.splitlines(keepends=True)[:1]) for text in plain]
        counts["left to right"].append(correct(problem, lines))
        filled = write(model, tokenizer, [prefix, *before, suffix, *after, middle], samples, 0.8)
        counts["infilling"].append(correct(problem, filled))
    ks = [k for k in (1, 5, 10) if k <= samples]
    return {way: {f"pass@{k}": sum(pass_at_k(samples, c, k) for c in found) / len(found) for k in ks}
            for way, found in counts.items()}  # fmt: skip


def main(argv: list[str] | None = None) -> dict[str, Any]:
    run = options(__doc__, "out/code_model", argv)
    results = Results(run.out)
    pieces, length = library_texts(200 if run.quick else 8000), 48 if run.quick else 128
    tokenizer = train_tokenizer((x["text"] for x in pieces), 400 if run.quick else 1024)
    tokenizer.add_tokens(MARKERS, special_tokens=True)
    every = made_problems()
    known, held_out = every[:-40], every[-40:]
    if run.quick:
        held_out = held_out[:2]

    model = make_model(tokenizer, run.quick)
    task = get_task("fill-in-the-middle", length=length, buckets=[length] if run.quick else None)
    args = arguments(run, "library", 4 if run.quick else 900, 2e-3, 16)
    trainer = tutti.Trainer(model, args, train_dataset=pieces, processing_class=tokenizer, task=task)
    first = train(trainer)
    results.get("library", lambda: {"texts": len(pieces), "loss": first})

    args = arguments(run, "functions", 4 if run.quick else 700, 2e-3, 32, remove_unused_columns=False)
    trainer = tutti.Trainer(model, args, Pad(64), lessons(known, tokenizer), processing_class=tokenizer)
    second = train(trainer)
    results.get("functions", lambda: {"known": len(known), "held out": len(held_out), "loss": second})
    trainer.save_model(str(run.out / "model"))

    found = results.get("pass", lambda: measure(model, tokenizer, held_out, 2 if run.quick else 20))
    results.show("pass")

    def bars(axes: Any) -> None:
        for i, (way, values) in enumerate(found.items()):
            axes.bar([x + 0.4 * i for x in range(len(values))], list(values.values()), 0.4, label=way)
            axes.set_xticks([x + 0.2 for x in range(len(values))], list(values))
        axes.set_ylim(0, 1)
        axes.legend()

    losses = {name: [tuple(x) for x in results.values[name]["loss"]] for name in ("library", "functions")}
    picture(run.out, {"losses": lambda axes: curve(axes, losses), "functions held out": bars})
    return results.values


if __name__ == "__main__":
    main()
