"""Environments: what of an episode is learned, what it earns, and that a model learns from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import align_models as small
from tutti.align.algorithms.grpo import GRPOConfig, GRPOTrainer
from tutti.align.chat import Encoder
from tutti.align.policy import completions_of
from tutti.align.rollouts.envs import begun, play, tools
from tutti.align.rollouts.rollout import Rollout

END = "<|end|>"


class Guess:
    """A number is guessed; the environment says whether it is larger."""

    chat = False

    def reset(self, row: Any) -> Any:
        self.number, self.tries = row["number"], 0
        return [{"role": "user", "content": "Guess:"}] if self.chat else "Guess:"

    def step(self, completion: str) -> tuple[Any, float, bool]:
        self.tries += 1
        guess = int(completion) if completion.isdigit() else -1
        answer = " more " if guess < self.number else " less "
        answered: Any = [{"role": "user", "content": answer}] if self.chat else answer
        return answered, 1.0 if guess == self.number else -0.25, guess == self.number


class GuessInChat(Guess):
    chat = True


class Says:
    """A sampler that says what a list has, by turns. It writes the end of a message where the text has it."""

    def __init__(self, *turns: list[str]):
        self.turns, self.seen, self.limits = list(turns), [], []

    def each(self, prompts: Any, limits: Any, seed: int) -> list[Rollout]:
        self.seen.append([small.tokenizer().decode(x) for x in prompts])
        self.limits.append(list(limits))
        texts, rollouts = self.turns.pop(0), []
        for prompt, text, most in zip(prompts, texts, limits, strict=True):
            ids = small.tokenizer()(text, add_special_tokens=False)["input_ids"][:most]
            rollouts.append(Rollout(list(prompt), ids, [-0.5] * len(ids), True, text.removesuffix(END)))
        return rollouts


def played(make: Any, sampler: Says, rows: Any, count: int, room: int = 60, turn: int | None = None) -> list[Rollout]:
    encoder = Encoder(small.tokenizer())
    starts = [begun(make, row) for row in rows]
    starts = [{**row, "prompt_ids": encoder.prompt(row["prompt"])} for row in starts]
    return play(make, starts, count, sampler, lambda row: encoder, 0, room, turn)  # pyright: ignore


def parts(rollout: Rollout) -> list[tuple[bool, str]]:
    """The texts of an episode, and whether the model has written them."""
    segments: list[tuple[bool, list[int]]] = []
    assert rollout.written is not None
    for token, on in zip(rollout.tokens, rollout.written, strict=True):
        if not segments or segments[-1][0] != on:
            segments.append((on, []))
        segments[-1][1].append(token)
    return [(on, small.tokenizer().decode(ids)) for on, ids in segments]


def test_turns_masks_and_rewards_of_texts():
    sampler = Says(["3", "7", "x"], ["5", "2"], ["5"])
    right, late, never = played(Guess, sampler, [{"number": 3}, {"number": 5}, {"number": 9}], 1, room=14)
    assert parts(right) == [(True, "3")] and right.reward == 1 and right.ended and right.turns == 1
    assert parts(late) == [(True, "7"), (False, " less "), (True, "5")]
    assert late.reward == 0.75 and late.ended and late.turns == 2 and late.text == "7 less 5"
    assert late.logprobs == [-0.5] + [0.0] * 6 + [-0.5]
    assert late.labels == [x if on else -100 for x, on in zip(late.tokens, late.written or [], strict=True)]
    # after 8 tokens another answer of 6 leaves no room for a guess
    assert parts(never) == [(True, "x"), (False, " more "), (True, "2")] and not never.ended and never.reward == -0.5
    assert sampler.seen == [["<s>Guess:"] * 3, ["<s>Guess:7 less ", "<s>Guess:x more "]]
    assert sampler.limits == [[14] * 3, [7, 7]]


def test_conversations_are_as_the_template_writes_them():
    for ending in (END, ""):  # with and without the end of its message
        sampler = Says(["1" + ending], ["2" + END])
        (rollout,) = played(GuessInChat, sampler, [{"number": 2}], 1)
        between = ("" if ending else END) + "\n<|user|> more <|end|>\n<|assistant|>"
        assert parts(rollout) == [(True, "1" + ending), (False, between), (True, "2" + END)]
        whole = [{"role": "user", "content": "Guess:"}, *(rollout.messages or [])]
        text = small.tokenizer().apply_chat_template(whole, tokenize=False)
        assert text == small.tokenizer().decode(rollout.prompt + rollout.tokens) + "\n"
        scored = completions_of([rollout], [{"prompt": whole[:1], "number": 2}])
        assert scored.completions == [rollout.messages] and scored.rows[0] == {"number": 2, "environment_reward": 0.75}


def test_tools():
    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: one.
            b: another.
        """
        return a + b

    calls = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    wrong = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>{"name": 3'
    sampler = Says([calls, wrong], ['{"name": "add", "arguments": {"a": "x", "b": 1}}', "no"], ["3"])
    rows = [{"prompt": "1+2?"}, {"prompt": "?"}]
    first, second = played(tools([add]), sampler, rows, 1, room=400)
    assert [text for on, text in parts(first) if not on] == [
        "\n<tool_response>3</tool_response>\n",
        '\n<tool_response>error: TypeError: can only concatenate str (not "int") to str</tool_response>\n',
    ]
    answers = [text for on, text in parts(second) if not on]
    assert "missing a required argument: 'b'" in answers[0] and answers[0].count("<tool_response>error:") == 2
    assert first.ended and first.turns == 3 and first.reward == 0
    chat = [{"prompt": [{"role": "user", "content": "1+2?"}]}]
    (rollout,) = played(tools([add], calls=1), Says([calls + END], [calls + END]), chat, 1, room=400)
    assert rollout.messages is not None and rollout.messages[1] == {"role": "tool", "name": "add", "content": "3"}
    assert rollout.turns == 2 and rollout.ended  # no more calls
    assert begun(tools([add]), rows[0])["tools"][0]["function"]["name"] == "add"


def test_errors():
    class Random(Guess):
        drawn = 0

        def reset(self, row: Any) -> Any:
            Random.drawn += 1
            return f"{Random.drawn}"

    class Mixed(Guess):
        def step(self, completion: str) -> tuple[Any, float, bool]:
            return [{"role": "user", "content": "?"}], 0.0, False

    with pytest.raises(ValueError, match="gives another prompt"):
        played(Random, Says(["1"]), [{"number": 1}], 1)
    with pytest.raises(ValueError, match="is a text and its answer messages"):
        played(Mixed, Says(["1"]), [{"number": 1}], 1)


class Digits:
    """Three turns of one token, of which those that are digits or punctuation earn something."""

    def reset(self, row: Any) -> str:
        self.turns = 0
        return row["begin"]

    def step(self, completion: str) -> tuple[str, float, bool]:
        self.turns += 1
        return f"|{self.turns}|", float(" " < completion < "A"), self.turns == 3


def test_a_model_learns_from_an_environment(tmp_path):
    args = GRPOConfig(
        str(tmp_path), max_steps=30, per_device_train_batch_size=32, num_generations=16, max_completion_length=16,
        max_turn_length=1, learning_rate=2e-2, num_iterations=2, logging_steps=1, report_to="none", save_strategy="no",
        disable_tqdm=True, level="O0", plan="single", lr_scheduler_type="constant", log_completions=True, seed=0,
    )  # fmt: skip
    trainer = GRPOTrainer(small.model(), None, args, [{"begin": "a"}, {"begin": "b"}], env=Digits,
                          processing_class=small.tokenizer())  # fmt: skip
    batch = trainer.get_train_dataloader().example(1)[0]
    trainer.train()
    log = [x for x in trainer.state.log_history if "reward" in x]
    rewards = [x["rewards/environment/mean"] for x in log]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.5, rewards
    assert all(x["completions/mean_turns"] == 3 for x in log)
    # what the engine says of the model's own tokens in later turns is what the model says of them
    assert max(x["sampling/logprob_difference/max"] for x in log) < 1e-3
    (rollout, *_) = trainer.generate([trainer.train_dataset[0]], 1)
    rollout_batch = trainer.batch_of_rollouts([rollout], torch.ones(1))
    assert int((rollout_batch["labels"] != -100).sum()) == 3 and len(rollout.tokens) == 9
    assert set(batch) >= {"input_ids", "advantages", "old_logprobs"}
