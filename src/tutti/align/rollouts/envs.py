"""Environments that a model converses with: games, simulated users, tools.

A trainer with `env` makes one environment for each completion. It gives the prompt; then model and environment take
turns, those of all completions of a round together, until the environment is done or there is no room for more tokens.
The completion is all that follows the prompt. Only what the model has written is learned, and the sum of the
environment's rewards is the reward `environment` of the completion, beside those of `reward_funcs`.

    class Guess:
        def reset(self, row):
            self.number = row["number"]
            return "Guess a digit: "

        def step(self, completion):
            right = completion.strip() == str(self.number)
            return " Wrong. Again: ", float(right), right

    GRPOTrainer(model, env=Guess, args=args, train_dataset=[{"number": 3}, {"number": 7}])
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from tutti.align.chat import Encoder, Messages, is_conversation
from tutti.align.rollouts.rollout import Rollout, Sampler
from tutti.exec.runtimes.runtime import from_rank_0

BEGUN, REWARD = "environment_row", "environment_reward"  # columns: the row as it was, and the reward
CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class Environment(Protocol):
    """One episode. It may have `tools`, JSON schemas for the chat template."""

    def reset(self, row: Mapping[str, Any]) -> str | Messages:
        """Begin with a row of the dataset. Returns the prompt, a text or messages, the same for the same row."""
        ...

    def step(self, completion: str) -> tuple[str | Messages, float, bool]:
        """Answer what the model has written in its turn. Returns a text, or messages if the prompt is some, which the
        model continues; a reward; and whether the episode is over, after which nobody reads the answer."""
        ...


Factory = Callable[[], Environment]


def begun(make: Factory, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with the `prompt` of an environment."""
    env = make()
    prompt, tools = env.reset(row), getattr(env, "tools", None)
    return {**row, **({"tools": tools} if tools else {}), "prompt": prompt, BEGUN: row}


def with_environment(functions: Any, make: Factory | None) -> list[Any]:
    """Reward functions, with the one of the environment if there is one."""
    rewards = list(functions) if isinstance(functions, list | tuple) else [] if functions is None else [functions]
    return rewards if make is None else [*rewards, environment]


def environment(environment_reward: Sequence[float]) -> list[float]:
    """The rewards of environments."""
    return list(environment_reward)


@dataclass
class Episode:
    """A completion that is being written. tokens, logprobs, written: as those of `Rollout`."""

    env: Environment
    row: Mapping[str, Any]
    encoder: Encoder
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    reward: float = 0.0
    turns: int = 0
    done: bool = False
    over: bool = False  # done, or without room

    @property
    def ids(self) -> list[int]:
        """All tokens so far."""
        return [*self.row["prompt_ids"], *self.tokens]

    def take(self, turn: Rollout, answered: tuple[str | Messages, float, bool], room: int) -> None:
        """Add a turn of the model, and the answer of the environment, if it and one more token fit into the room."""
        self._add(turn.tokens, turn.logprobs, True)
        self.messages.append({"role": "assistant", "content": turn.text})
        self.turns += 1
        answer, reward, self.done = answered
        self.reward += float(reward)
        if self.done:
            self.over = True
            return
        conversation = is_conversation(self.row["prompt"])
        if conversation != is_conversation(answer):
            kinds = ("messages", "text") if conversation else ("a text", "messages")
            raise ValueError(f"the prompt of {type(self.env).__name__} is {kinds[0]} and its answer {kinds[1]}")
        ids = self.encoder.reply(answer)
        ids = ids[1:] if ids and turn.tokens and ids[0] == turn.tokens[-1] else ids  # the end of its message
        self.over = len(self.tokens) + len(ids) >= room or not (ids or turn.tokens)
        if not self.over:
            self._add(ids, [0.0] * len(ids), False)
            if conversation:
                self.messages.extend(dict(x) for x in answer)  # pyright: ignore

    def _add(self, tokens: Sequence[int], logprobs: Sequence[float], written: bool) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.written += [written] * len(tokens)

    def rollout(self) -> Rollout:
        """The completion."""
        text = self.encoder.tokenizer.decode(self.tokens, skip_special_tokens=True)
        messages = self.messages if is_conversation(self.row["prompt"]) else None
        return Rollout(list(self.row["prompt_ids"]), self.tokens, self.logprobs, self.done, text, self.written,
                       self.reward, messages, self.turns)  # fmt: skip


def play(make: Factory, rows: Sequence[Mapping[str, Any]], count: int, sampler: Sampler,
         encoder_of: Callable[[Any], Encoder], seed: int, room: int,
         turn: int | None = None) -> list[Rollout]:  # fmt: skip
    """`count` episodes of each row; those of a row are adjacent.

    rows: rows of `begun`, with `prompt_ids`. room: number of tokens of a completion, at most. turn: number of tokens of
    a turn, at most. seed: random seed; equal weights and seeds give equal episodes, if environments do.

    Raises ValueError if an environment gives another prompt than before for a row.
    """
    episodes = []
    for row in rows:
        for _ in range(count):
            env = make()
            if env.reset(row[BEGUN]) != row["prompt"]:
                raise ValueError(f"{type(env).__name__}.reset gives another prompt than before for the same row: draw "
                                 "what is random from the row")  # fmt: skip
            episodes.append(Episode(env, row, encoder_of(row)))
    begin = seed
    while live := [x for x in episodes if not x.over]:
        limits = [min(room - len(x.tokens), turn or room) for x in live]
        turns = sampler.each([x.ids for x in live], limits, begin)
        begin += len(live)
        answers = from_rank_0(partial(_answers, live, turns))
        for episode, written, answered in zip(live, turns, answers, strict=True):
            episode.take(written, answered, room)
    return [x.rollout() for x in episodes]


def _answers(episodes: Sequence[Episode], turns: Sequence[Rollout]) -> list[tuple[str | Messages, float, bool]]:
    """Answers of the environments, which take steps on process 0 only."""
    return [x.env.step(turn.text) for x, turn in zip(episodes, turns, strict=True)]


class Tools:
    """Functions that a model calls by JSON, as in <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>.

    A completion may have several calls, or be one JSON object without the marks. Their results are answered as messages
    of the role "tool", or within <tool_response> if the prompt is a text; errors are, too. A completion without a call
    ends the episode. It has no reward of its own: give reward_funcs.

    functions: with type hints and Google docstrings, from which the chat template tells the model what they do. They
    run in this process: let none of them do harm. calls: turns with calls, at most.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], calls: int = 8):
        from transformers.utils.chat_template_utils import get_json_schema

        self.functions, self.left, self.text = {x.__name__: x for x in functions}, calls, True
        self.tools = [get_json_schema(x) for x in functions]

    def reset(self, row: Mapping[str, Any]) -> str | Messages:
        """The prompt of the row."""
        self.text = isinstance(row["prompt"], str)
        return row["prompt"]

    def step(self, completion: str) -> tuple[str | Messages, float, bool]:
        """The results of the calls in a completion."""
        calls = CALL.findall(completion)
        if not calls and completion.lstrip()[:1] == "{":
            calls = [completion]
        self.left -= 1
        if not calls or self.left < 0:
            return "", 0.0, True
        results = [self._result(x) for x in calls]
        if self.text:
            return "".join(f"\n<tool_response>{x}</tool_response>\n" for _, x in results), 0.0, False
        return [{"role": "tool", "name": name, "content": x} for name, x in results], 0.0, False

    def _result(self, call: str) -> tuple[str, str]:
        name = "unknown"
        try:
            request = json.loads(call)
            name, arguments = request["name"], request.get("arguments", {})
            function = self.functions[name]
            inspect.signature(function).bind(**arguments)
            result = function(**arguments)
            return name, result if isinstance(result, str) else json.dumps(result)
        except Exception as error:  # whatever a model writes, and a tool makes of it, is an answer
            return str(name), f"error: {type(error).__name__}: {error}"


def tools(functions: Sequence[Callable[..., Any]], calls: int = 8) -> Callable[[], Tools]:
    """A factory of `Tools`, for `env`."""
    return partial(Tools, functions, calls)
