"""lm-eval's tasks (EleutherAI's Language Model Evaluation Harness) on a saved model.

`Scorer` computes what the harness asks for: log-likelihoods of continuations and of texts, and continuations up to a
stop text. `harness_model` is the `lm_eval.api.model.LM` around it, and `run_harness` runs tasks from files on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

import tutti
from tutti.checkpoint.model import load_model
from tutti.data import bucket_lengths
from tutti.models import register
from tutti.train.scores.text import library
from tutti.train.values import NamedValues

NONE = -100


class Scorer:
    """Log-likelihoods and continuations of a causal model in a folder, with its tokenizer.

    batch: rows that are computed together. length: longest input in tokens, by default the model's positions. What is
        longer loses its beginning.
    cluster, plan, level: how to distribute log-likelihoods, as in `tutti.function`.
    """

    def __init__(self, folder: str | Path, batch: int = 8, length: int | None = None, cluster: str = "auto",
                 plan: str = "auto", level: str = "O0"):  # fmt: skip
        from transformers import AutoTokenizer

        register(folder)
        self.model, self.tokenizer = load_model(Path(folder)), AutoTokenizer.from_pretrained(folder)
        self.batch, self.length = batch, length or getattr(self.model.config, "max_position_embeddings", 1024)
        self.options: NamedValues = {"cluster": cluster, "plan": plan, "level": level}
        self.buckets = bucket_lengths(self.length)
        self._function: tutti.Function | None = None

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, without special tokens."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text else []

    @property
    def first(self) -> int:
        """The token in front of a text without context."""
        candidates = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        token = next((x for x in candidates if x is not None), None)
        if token is None:
            raise ValueError("the tokenizer has neither a begin nor an end token to put in front of a text")
        return token

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokens of a context and of its continuation, cut where the tokens of both together are.

        Spaces at the end of the context belong to the continuation.
        """
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        if not context:
            return [self.first], self.encode(continuation)
        both, before = self.encode(context + continuation), self.encode(context)
        return before, both[len(before) :]

    def loglikelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """For each (context, continuation): log P(continuation | context) in nats, and whether greedy decoding gives
        it."""
        return self.of_tokens([self.pair(*pair) for pair in pairs])

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """log P of each text in nats.

        A text longer than `length` is cut into windows: each token is predicted once, from the tokens of its window
        before it. The last window is filled up with tokens that are predicted before.
        """
        windows, owner = [], []
        for number, text in enumerate(texts):
            ids = [self.first, *self.encode(text)]
            for begin in range(1, len(ids), self.length):
                end = min(begin + self.length, len(ids))
                start = max(0, end - 1 - self.length)
                windows.append((ids[start:begin], ids[begin:end]))
                owner.append(number)
        totals = [0.0] * len(texts)
        for number, (value, _) in zip(owner, self.of_tokens(windows), strict=True):
            totals[number] += value
        return totals

    def of_tokens(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """`loglikelihoods` of token ids, in the order given. Rows of similar length are computed together."""
        scores: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        order = sorted((i for i, (_, after) in enumerate(pairs) if after), key=lambda i: -sum(map(len, pairs[i])))
        for begin in range(0, len(order), self.batch):
            chosen = order[begin : begin + self.batch]
            sums, greedy = self._scored([pairs[i] for i in chosen])
            for i, value, best in zip(chosen, sums.tolist(), greedy.tolist(), strict=False):
                scores[i] = value, bool(best)
        return scores

    def _scored(self, pairs: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
        rows = []
        for before, after in pairs:
            if len(after) > self.length:
                raise ValueError(f"a continuation of {len(after)} tokens is longer than the model's {self.length}")
            ids, labels = [*before, *after], [NONE] * len(before) + after
            rows.append((ids[:-1][-self.length :], labels[1:][-self.length :]))
        most = max(len(ids) for ids, _ in rows)
        size = next(n for n in self.buckets if n >= most)
        ids, labels = torch.zeros(self.batch, size, dtype=torch.int64), torch.full((self.batch, size), NONE)
        mask = torch.zeros_like(ids)
        mask[:, 0] = 1  # rows that fill up the batch
        for r, (x, y) in enumerate(rows):
            ids[r, : len(x)], labels[r, : len(x)], mask[r, : len(x)] = torch.tensor(x), torch.tensor(y), 1
        batch = {"input_ids": ids, "attention_mask": mask, "wanted": labels}
        batch = {name: x.to(self.model.device) for name, x in batch.items()}
        if self._function is None:
            self._function = self._distributed(batch)
        return self._function(batch)

    def _distributed(self, example: dict[str, Tensor]) -> tutti.Function:
        model = self.model

        @torch.no_grad()
        def score(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
            counts = batch["wanted"] != NONE
            wanted = batch["wanted"].clamp(min=0)
            chosen = logits.float().log_softmax(-1).gather(2, wanted[:, :, None])[:, :, 0]
            missed = ((logits.argmax(-1) != wanted) & counts).to(chosen.dtype).sum(1)
            return (chosen * counts.to(chosen.dtype)).sum(1), missed == 0

        return tutti.function(score, example, store=tutti.Store(model=model), **self.options)

    @torch.no_grad()
    def continued(self, context: str, until: Sequence[str] = (), tokens: int = 256, temperature: float = 0.0) -> str:
        """The text that follows a context, up to the first of the stop texts, without it. temperature: 0 is greedy."""
        ids = (self.encode(context) or [self.first])[-max(1, self.length - tokens) :]
        prompt = torch.tensor([ids], device=self.model.device)
        choice = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        room = min(tokens, self.length - len(ids))
        if room < 1:
            raise ValueError(f"the model's {self.length} positions leave no room for new tokens")
        generated = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=room,
                                   pad_token_id=self.tokenizer.pad_token_id, **choice)  # fmt: skip
        text = self.tokenizer.decode(generated[0, len(ids) :], skip_special_tokens=True)
        ends = [text.find(stop) for stop in until if stop and stop in text]
        return text[: min(ends)] if ends else text


def harness_model(scorer: Scorer) -> Answers:
    """An `lm_eval.api.model.LM` for `lm_eval.simple_evaluate(model=...)`. Raises ImportError without lm_eval."""
    base = library("lm_eval.api.model").LM

    class TuttiLM(Answers, base):
        """Answers of a `Scorer`."""

    return TuttiLM(scorer)


class Request(Protocol):
    """A request of lm-eval."""

    args: tuple


class Answers:
    """The methods that lm-eval calls, with its requests: objects with a tuple `args`."""

    def __init__(self, scorer: Scorer):
        super().__init__()
        self.scorer = scorer

    @property
    def tokenizer_name(self) -> str:
        return str(self.scorer.tokenizer.name_or_path).replace("/", "__")

    def loglikelihood(self, requests: Sequence[Request], **_: object) -> list[tuple[float, bool]]:
        """args: (context, continuation)."""
        return self.scorer.loglikelihoods([request.args for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Request], **_: object) -> list[float]:
        """args: (text,)."""
        return self.scorer.rolling([request.args[0] for request in requests])

    def generate_until(self, requests: Sequence[Request], **_: object) -> list[str]:
        """args: (context, options): `until`, `max_gen_toks`, `do_sample` and `temperature`."""
        texts = []
        for request in requests:
            context, options = request.args
            until = options.get("until") or []
            samples = options.get("do_sample", False) or options.get("temperature", 0.0) > 0
            warmth = options.get("temperature", 1.0) if samples else 0.0
            stops = [until] if isinstance(until, str) else list(until)
            texts.append(self.scorer.continued(context, stops, options.get("max_gen_toks", 256), warmth))
        return texts


def run_harness(folder: str | Path, tasks: Sequence[str], tasks_from: str | Path | None = None,
                few_shot: int | None = None, limit: int | None = None,
                **options: Any) -> dict[str, NamedValues]:  # fmt: skip
    """Scores of lm-eval's tasks, task -> metric -> value.

    tasks_from: a folder of task files (YAML). Without it, lm-eval's own tasks, whose data it downloads.
    few_shot: examples in front of each question; None: as the task says. limit: questions of each task.
    options: options of `Scorer`.
    """
    model = harness_model(Scorer(folder, **options))
    manager = library("lm_eval.tasks").TaskManager(include_path=None if tasks_from is None else str(tasks_from),
                          include_defaults=tasks_from is None)  # fmt: skip
    report = library("lm_eval").simple_evaluate(model=model, tasks=list(tasks), num_fewshot=few_shot, limit=limit,
                                 task_manager=manager, bootstrap_iters=0, log_samples=False)  # fmt: skip
    return {task: {k: v for k, v in values.items() if isinstance(v, int | float)}
            for task, values in report["results"].items()}  # fmt: skip
