"""Tokens of texts and conversations, and which of them a model is to learn.

A conversation is a list of messages, `{"role": "user", "content": "..."}`, rendered by the chat template of the
tokenizer. A template writes the tokens that begin a text itself, so none is added when its result is tokenized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

Messages = Sequence[Mapping[str, Any]]
MARKER = "{% generation %}"  # in templates that say themselves what an assistant writes


class Tokens(NamedTuple):
    """A sequence. ids: token ids. learned: for each, whether it has a loss."""

    ids: list[int]
    learned: list[bool]


def is_conversation(value: Any) -> bool:
    """Whether a value is a list of messages."""
    return isinstance(value, Sequence) and not isinstance(value, str) and bool(value) and isinstance(value[0], Mapping)


def without_none(value: Any) -> Any:
    """A value without the entries of mappings that are None: `datasets` adds such for the keys of other rows."""
    if isinstance(value, Mapping):
        return {key: without_none(x) for key, x in value.items() if x is not None}
    return [without_none(x) for x in value] if isinstance(value, list | tuple) else value


@dataclass
class Encoder:
    """Makes tokens of texts and conversations.

    tokenizer: with a chat template, for conversations. tools: JSON schemas of functions, for templates that name them.
    options: further arguments of the template. Of messages, tools and options, entries that are None are left out.

    Raises ValueError for a tokenizer without an end-of-text token, which a model must learn to write.
    """

    tokenizer: Any
    tools: Sequence[Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tools, self.options = without_none(self.tools), without_none(self.options)
        if self.tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no end-of-text token, which the model must learn to write: set "
                             "tokenizer.eos_token")  # fmt: skip

    def prompt(self, prompt: str | Messages) -> list[int]:
        """The tokens of a prompt that a model continues."""
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt, verbose=False)["input_ids"])
        return self._ids(self._prompt_text(prompt))

    def reply(self, reply: str | Messages) -> list[int]:
        """The tokens between what a model has written and what it writes next: the end of its message as the template
        writes it, and then messages, or a text."""
        if isinstance(reply, str):
            return list(self.tokenizer(reply, add_special_tokens=False, verbose=False)["input_ids"])
        context = repr((reply, self.tools, self.options, self._template()))
        answer = next(x for x in (f"ANSWER{i}" for i in count()) if x not in context)
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}, *reply]
        text = self._render(messages, add_generation_prompt=True)
        return self._ids(text[text.index(answer) + len(answer) :])

    def text(self, text: str) -> Tokens:
        """All of a text, and the end-of-text token."""
        ids = self._ended(list(self.tokenizer(text, verbose=False)["input_ids"]))
        return Tokens(ids, [True] * len(ids))

    def pair(self, prompt: str | Messages, completion: str | Messages) -> Tokens:
        """A prompt and its completion, of which the completion is learned.

        Where tokens of the two together are not those of the prompt and more, the completion begins with the first
        token that differs.
        """
        if isinstance(prompt, str) != isinstance(completion, str):
            raise ValueError("the prompt and the completion must both be texts, or both be messages")
        before = self.prompt(prompt)
        if isinstance(prompt, str):
            ids = list(self.tokenizer(prompt + completion, verbose=False)["input_ids"])  # pyright: ignore
        else:
            ids = self._ids(self._render([*prompt, *completion]))  # pyright: ignore
        ids = self._ended(ids)
        begin = next(
            (i for i, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b), min(len(before), len(ids))
        )
        return Tokens(ids, [i >= begin for i in range(len(ids))])

    def conversation(self, messages: Messages, assistant_only: bool = False) -> Tokens:
        """A whole conversation. assistant_only: only what the assistant writes is learned, with the tokens that end it.

        Raises ValueError if the template does not tell what the assistant writes.
        """
        if not assistant_only:
            ids = self._ids(self._render(messages))
            ids = self._ended(ids) if messages[-1].get("role") == "assistant" else ids
            return Tokens(ids, [True] * len(ids))
        if MARKER in self._template() or MARKER.replace("{% ", "{%- ") in self._template():
            encoded = self.tokenizer.apply_chat_template(
                without_none(list(messages)), tools=self.tools, tokenize=True, return_dict=True,
                return_assistant_tokens_mask=True, **self.options,
            )  # fmt: skip
            ids, learned = list(encoded["input_ids"]), [bool(x) for x in encoded["assistant_masks"]]
        else:
            text = self._render(messages)
            spans = self._spans(messages, text)
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            ids = list(encoded["input_ids"])
            places = encoded["offset_mapping"]
            learned = [any(a <= begin < b for a, b in spans) and end > begin for begin, end in places]
        if not any(learned):
            raise ValueError("the conversation has no message of role 'assistant', so there is nothing to learn")
        if learned[-1] and ids != (ended := self._ended(ids)):
            ids, learned = ended, [*learned, True]
        return Tokens(ids, learned)

    # -- parts -----------------------------------------------------------------------------------------------------

    def _template(self) -> str:
        template = self.tokenizer.chat_template
        if not template:
            raise ValueError("the data is conversations, and the tokenizer has no chat template: set "
                             "tokenizer.chat_template")  # fmt: skip
        return template if isinstance(template, str) else str(template)

    def _render(self, messages: Messages, **options: Any) -> str:
        self._template()
        return self.tokenizer.apply_chat_template(
            without_none(list(messages)), tools=self.tools, tokenize=False, **{**self.options, **options}
        )

    def _prompt_text(self, messages: Messages) -> str:
        """The text of messages that an assistant answers, or whose last message it continues."""
        if messages[-1].get("role") == "assistant":
            return self._render(messages, continue_final_message=True)
        return self._render(messages, add_generation_prompt=True)

    def _ids(self, rendered: str) -> list[int]:
        return list(self.tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"])

    def _ended(self, ids: list[int]) -> list[int]:
        """Tokens that end with a special one, such as that of the end of a text or of a turn, before white space."""
        special = set(self.tokenizer.all_special_ids) | {
            i for i, x in self.tokenizer.added_tokens_decoder.items() if x.special
        }
        last = next((x for x in reversed(ids) if x in special or self.tokenizer.decode([x]).strip()), None)
        return ids if last in special else [*ids, self.tokenizer.eos_token_id]

    def _spans(self, messages: Messages, text: str) -> list[tuple[int, int]]:
        """Spans (begin, end) of the assistant's turns in the text of messages, from what each message adds to it."""
        if not getattr(self.tokenizer, "is_fast", False):
            raise ValueError("assistant_only_loss needs a fast tokenizer, which knows where tokens "
                             f"begin, or a template with {MARKER}")  # fmt: skip
        spans = []
        for i, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before, after = self._prompt_text(messages[:i]) if i else "", self._render(messages[: i + 1])
            if not after.startswith(before) or not text.startswith(after):
                raise ValueError(f"the chat template writes the messages before message {i} in another way once it is "
                                 f"there: mark what the assistant writes with {MARKER} in the template")  # fmt: skip
            end = len(after)
            shorter = after.rstrip()
            if any(shorter.endswith(x) for x in self._special_texts()):
                end = len(shorter)  # the white space behind the end of a turn
            spans.append((len(before), end))
        return spans

    def _special_texts(self) -> set[str]:
        added = self.tokenizer.added_tokens_decoder.values()
        return {str(x.content) for x in added if x.special} | set(self.tokenizer.all_special_tokens)
