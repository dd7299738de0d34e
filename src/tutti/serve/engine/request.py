"""Requests to the engine, how their tokens are chosen, and what comes back."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from itertools import count

import torch
from torch import Tensor

from tutti.serve.values import EncoderInputs, JsonValue, JsonView

FINISHES = ("stop", "length", "cancelled", "deadline", "error")
MOST = sys.float_info.max
STOPS, STOP_LENGTH, BAD, LARGEST_BIAS = 16, 256, 1024, 1e4
_numbers = count()


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Names and meanings are those of the OpenAI API and of `transformers`.

    max_tokens: at most so many tokens; None: as many as the model has positions left. min_tokens: no end token before.
    temperature: 0 takes the most likely token. top_k, top_p, min_p: which tokens may be drawn: the k most likely (0:
        all), the most likely ones that have a probability of p together, those with at least p times the probability of
        the most likely one.
    repetition_penalty: divides positive and multiplies negative logits of tokens that occurred, in prompt or output
        (Keskar et al., "CTRL", 2019). presence_penalty, frequency_penalty: subtracted from logits of tokens in the
        output, once or as often as they occurred.
    logit_bias: token -> number added to its logit. allowed: the only tokens that may be chosen.
    n: number of continuations. best_of: number of sampled continuations, of which the `n` with the largest mean
        log-probability are returned.
    beams: width of a beam search; 1 samples. length_penalty: exponent of the length that divides a beam's score.
    seed: the same seed gives the same tokens, whatever else the engine does. None: a new one.
    stop: texts that end the output, which then ends before them. stop_tokens: tokens that end it. include_stop: whether
        the text ends after them instead. ignore_end: whether to go on after the model's own end token.
    bad: sequences of tokens that the output may not contain.
    skip_special: whether the text leaves special tokens out.
    logprobs: number of most likely tokens reported with each token; None reports none. scaled_logprobs: whether the
        log-probabilities are those at the temperature; otherwise they are the model's own. Neither knows of top_k,
        top_p, min_p and penalties. prompt_logprobs: as logprobs, for the tokens of the prompt. logprob_tokens: tokens
        that are reported besides, wherever tokens are.
    schema, regex, grammar: what the output must match: a JSON schema (a dict, or {} for any JSON), a regular
        expression, or a Lark grammar.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed: Sequence[int] | None = None
    n: int = 1
    best_of: int | None = None
    beams: int = 1
    length_penalty: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_tokens: Sequence[int] = ()
    include_stop: bool = False
    ignore_end: bool = False
    bad: Sequence[Sequence[int]] = ()
    skip_special: bool = True
    logprobs: int | None = None
    scaled_logprobs: bool = False
    prompt_logprobs: int | None = None
    logprob_tokens: Sequence[int] = ()
    schema: JsonView | None = None
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        self._between("max_tokens", 1, None)
        self._between("min_tokens", 0, None)
        self._between("temperature", 0, 100)
        self._between("top_k", 0, 1 << 30)
        self._between("top_p", 0, 1)
        self._between("min_p", 0, 1)
        self._between("presence_penalty", -2, 2)
        self._between("frequency_penalty", -2, 2)
        self._between("n", 1, 128)
        self._between("best_of", self.n, 128)
        self._between("beams", 1, 64)
        self._between("logprobs", 0, 64)
        self._between("prompt_logprobs", 0, 64)
        self._between("repetition_penalty", 0.01, 100)
        if self.allowed is not None and not len(self.allowed):
            raise ValueError("allowed is empty; give at least one token")
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if any(not text for text in self.stop):
            raise ValueError("stop contains an empty text, which would end every output")
        if len(self.stop) > STOPS or any(len(text) > STOP_LENGTH for text in self.stop):
            raise ValueError(f"stop has more than {STOPS} texts, or one of more than {STOP_LENGTH} characters")
        if len(self.bad) > BAD or any(not x for x in self.bad):
            raise ValueError(f"bad has more than {BAD} sequences of tokens, or an empty one")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}; it must be at most max_tokens, {self.max_tokens}")
        if any(not abs(x) <= LARGEST_BIAS for x in self.logit_bias.values()):
            raise ValueError(f"logit_bias has a number beyond {LARGEST_BIAS:g}")
        if sum(x is not None for x in (self.schema, self.regex, self.grammar)) > 1:
            raise ValueError("give one of schema, regex and grammar")
        if self.beams > 1 and (self.best_of or self.n > self.beams):
            raise ValueError(f"a beam search of {self.beams} beams returns at most as many; n is {self.n}, "
                             f"best_of {self.best_of}")  # fmt: skip
        if self.beams > 1 and (self.constraint or self.stop or self.logprobs is not None):
            raise ValueError("a beam search takes neither schema, regex and grammar nor stop texts nor logprobs")

    @cached_property
    def adjusts_nothing(self) -> bool:
        """Whether logits stay as they are: no bias, penalty, allowed or bad tokens."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty
        return not (penalties or self.logit_bias or self.bad or self.allowed is not None)

    def _between(self, name: str, low: float, high: float | None) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if not isinstance(value, (int, float)) or not low <= value <= (MOST if high is None else high):
            limits = f"at least {low}" if high is None else f"from {low} to {high}"
            raise ValueError(f"{name} is {value!r}; it must be {limits}")

    @property
    def sequences(self) -> int:
        """Number of sequences that are computed."""
        return self.beams if self.beams > 1 else self.best_of or self.n

    @cached_property
    def allowed_tokens(self) -> Tensor | None:
        """`allowed`, each token once: made once and read in every step."""
        return None if self.allowed is None else torch.tensor(list(dict.fromkeys(self.allowed)))

    @cached_property
    def biases(self) -> tuple[Tensor, Tensor]:
        """The tokens of `logit_bias` and their numbers, float32."""
        return torch.tensor(list(self.logit_bias)), torch.tensor(list(self.logit_bias.values()), dtype=torch.float32)

    @property
    def constraint(self) -> tuple[str, JsonValue] | None:
        """The kind and text of what the output must match."""
        kinds = (("schema", self.schema), ("regex", self.regex), ("grammar", self.grammar))
        return next(((kind, x) for kind, x in kinds if x is not None), None)


@dataclass
class Request:
    """A prompt to continue.

    prompt: tokens, or a text if the engine has a tokenizer. An encoder-decoder model of text encodes it. sampling: how
        tokens are chosen.
    inputs: what the model's processor makes besides tokens, by name: `pixel_values` of the images whose tokens are in
        the prompt, `input_features` of speech; `decoder_input_ids` with which a decoder of text begins.
    priority: requests of smaller numbers go first.
    account, user: among equal priorities, accounts that were served least go first; within one, users.
    deadline: in seconds from arrival, after which the request ends with what it has.
    adapter: name of a LoRA adapter of the engine.
    salt: requests share blocks of the prefix cache only with those of the same salt.
    """

    prompt: Sequence[int] | str
    sampling: Sampling = Sampling()
    priority: int = 0
    account: str = ""
    user: str = ""
    deadline: float | None = None
    adapter: str = ""
    salt: str = ""
    inputs: EncoderInputs = field(default_factory=dict)
    id: str = ""
    arrival: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.id = self.id or f"request-{next(_numbers)}"

    @property
    def prefix(self) -> bytes:
        """What distinguishes its blocks in the prefix cache from those of others with equal tokens."""
        salt = blake2b(self.salt.encode(), digest_size=16).digest()  # a client cannot imitate what follows it
        return self.adapter.encode() + (b"\0" + salt if self.salt else b"")


@dataclass
class TokenLogprobs:
    """The log-probability of a token, and the most likely tokens at its position with theirs. rank: 1 is the most
    likely."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)
    rank: int = 0


@dataclass
class Completion:
    """One continuation of a prompt. finish: why it ended (`FINISHES`), "" while it goes on. score: score of a beam,
    or the sum of log-probabilities where they were asked for."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    score: float = 0.0


@dataclass
class Output:
    """What a request has so far. source: number of positions that an encoder has read. cached: number of prompt tokens
    found in the prefix cache. error: why it failed."""

    id: str
    prompt: list[int]
    completions: list[Completion]
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    source: int = 0
    cached: int = 0
    error: str = ""
    arrival: float = 0.0
    times: list[float] = field(default_factory=list)  # when tokens came, of all completions

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return bool(self.error) or all(x.finish for x in self.completions)

    @property
    def text(self) -> str:
        """The text of the first continuation."""
        return self.completions[0].text

    @property
    def tokens(self) -> list[int]:
        """The tokens of the first continuation."""
        return self.completions[0].tokens
