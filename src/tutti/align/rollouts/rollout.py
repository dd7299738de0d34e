"""Completions of prompts by the model that is trained, from an engine with its weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tutti.align.arguments import is_adapted
from tutti.align.sequences import IGNORED
from tutti.serve import Engine, Request, Sampling

BLOCK = 16  # tokens in a block of the engine's cache
MAX_SEQUENCES = 64  # sequences that an engine writes at once


@dataclass
class Rollout:
    """A completion. prompt, tokens: token ids of the prompt and of the completion. logprobs: log-probability of each
    token at the temperature, among all tokens. ended: whether the model ended it itself. text: text of the tokens,
    without special ones.

    A completion with an environment (`envs`) also has: written, which tokens the model has written (None: all; the
    log-probabilities of others are 0); reward, the environment's; messages, all behind the prompt, if that is a
    conversation; turns, how often the model wrote."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    ended: bool
    text: str
    written: list[bool] | None = None
    reward: float | None = None
    messages: list[dict[str, Any]] | None = None
    turns: int = 1

    @property
    def labels(self) -> list[int]:
        """The tokens that the model has written, elsewhere -100."""
        if self.written is None:
            return self.tokens
        return [x if on else IGNORED for x, on in zip(self.tokens, self.written, strict=True)]


Groups = list[list[Rollout]]  # of each request


class Sampler:
    """Generates with the weights of a model that is trained.

    model: the causal language model, maybe with adapters; the engine shares its frozen parameters. tokenizer:
    tokenizer of the model. sampling: sampling parameters of all completions; `max_tokens` says how long they may be.
    longest: number of tokens of a prompt and its completion, at most. most: number of sequences at once, at most.
    """

    def __init__(self, model: Any, tokenizer: Any, sampling: Sampling, longest: int, most: int, **options: Any):
        self.sampling = sampling
        served = model.get_base_model() if is_adapted(model) else model  # its layers have the adapters
        blocks = most * math.ceil((longest + 1) / BLOCK) + 8
        defaults = {"plan": "auto", "self_check": False, "share_frozen": is_adapted(model)}
        self.engine = Engine(served, tokenizer=tokenizer, block=BLOCK, blocks=blocks, most=most,
                             budget=max(512, most), longest=longest, **{**defaults, **options})  # fmt: skip

    def update(self, weights: Any) -> int:
        """Take the weights of a step. Returns the bytes received."""
        return self.engine.update(weights)

    def generate(self, prompts: Sequence[Sequence[int]], count: int, seed: int) -> Groups:
        """`count` completions of each prompt, which share its cache. Every process of a job gets all of them.

        seed: random seed of this call; equal weights, prompts and seeds give equal completions.
        """
        return self.begin(self.requests(prompts, count, seed))()

    def requests(self, prompts: Sequence[Sequence[int]], count: int, seed: int) -> list[Request]:
        """The requests of `generate`, for `begin`."""
        return [Request(list(x), self._sampling(count, seed + i)) for i, x in enumerate(prompts)]

    def each(self, prompts: Sequence[Sequence[int]], limits: Sequence[int], seed: int) -> list[Rollout]:
        """A completion of each prompt, of at most so many tokens."""
        requests = [Request(list(x), replace(self._sampling(1, seed + i), max_tokens=limit))
                    for i, (x, limit) in enumerate(zip(prompts, limits, strict=True))]  # fmt: skip
        return [x for (x,) in self.begin(requests)()]

    def begin(self, requests: Sequence[Request]) -> Callable[[], Groups]:
        """Begin the completions of requests with the weights of the moment. Returns a function that gives them."""
        groups: Groups = []
        for output in self.engine.generate(requests):
            if output.error:
                raise RuntimeError(f"a prompt of {len(output.prompt)} tokens was not completed: {output.error}")
            groups.append([_rollout(output.prompt, x) for x in output.completions])
        return lambda: groups

    def _sampling(self, count: int, seed: int) -> Sampling:
        return replace(self.sampling, n=count, seed=seed, logprobs=0, scaled_logprobs=True)


def _rollout(prompt: list[int], completion: Any) -> Rollout:
    logprobs = [x.logprob for x in completion.logprobs]
    return Rollout(prompt, list(completion.tokens), logprobs, completion.finish == "stop", completion.text)
