"""Tokens of texts and conversations, and which of them are learned."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from align_models import tokenizer
from tutti.align.chat import Encoder, is_conversation

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2+2?"},
    {"role": "assistant", "content": "4"},
]


def learned(tokens) -> str:
    return tokenizer().decode([x for x, on in zip(tokens.ids, tokens.learned, strict=True) if on])


def text(ids) -> str:
    return tokenizer().decode(ids)


def test_a_text_ends_with_the_end_token_once():
    encoder = Encoder(tokenizer())
    assert text(encoder.text("ab").ids) == "<s>ab</s>"
    assert text(encoder.text("ab</s>").ids) == "<s>ab</s>"
    assert all(encoder.text("ab").learned)


def test_a_completion_is_learned_with_its_end():
    encoded = Encoder(tokenizer()).pair("1+1=", "2")
    assert text(encoded.ids) == "<s>1+1=2</s>"
    assert learned(encoded) == "2</s>"


def test_the_beginning_of_text_is_not_doubled_by_a_template():
    encoder = Encoder(tokenizer())
    bos = tokenizer().bos_token_id
    for ids in (encoder.prompt(CHAT[:2]), encoder.conversation(CHAT).ids, encoder.pair(CHAT[:2], CHAT[2:3]).ids):
        assert ids.count(bos) == 1 and ids[0] == bos


def test_messages_of_an_assistant_are_learned_with_the_ends_of_their_turns():
    encoded = Encoder(tokenizer()).conversation(CHAT, assistant_only=True)
    assert learned(encoded) == "2<|end|>4<|end|>"
    assert text(encoded.ids) == tokenizer().apply_chat_template(CHAT, tokenize=False)


def test_a_template_with_markers_says_the_same():
    other = copy.deepcopy(tokenizer())
    other.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] + '<|end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|end|>' }}"
        "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    encoded = Encoder(other).conversation(CHAT, assistant_only=True)
    assert learned(encoded) == "2<|end|>4<|end|>"
    assert encoded == Encoder(tokenizer()).conversation(CHAT, assistant_only=True)


def test_a_completion_of_messages_begins_behind_the_prompt_that_the_model_continues():
    encoded = Encoder(tokenizer()).pair(CHAT[:2], CHAT[2:3])
    prompt = Encoder(tokenizer()).prompt(CHAT[:2])
    assert encoded.ids[: len(prompt)] == prompt
    assert learned(encoded) == "2<|end|>\n"


def test_a_template_without_an_end_of_turns_gets_the_end_of_text():
    other = copy.deepcopy(tokenizer())
    other.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    encoded = Encoder(other).conversation(CHAT, assistant_only=True)
    assert encoded.ids[-1] == other.eos_token_id and encoded.learned[-1]


def test_a_prompt_whose_last_message_is_continued():
    ids = Encoder(tokenizer()).prompt([*CHAT[:2], {"role": "assistant", "content": "The answer"}])
    assert text(ids).endswith("<|assistant|>The answer")


@pytest.mark.parametrize("word", ["ANSWER", "ANSWER0 ANSWER1"])
def test_what_is_between_turns_does_not_depend_on_the_words_of_others(word):
    other = copy.deepcopy(tokenizer())
    other.chat_template = "{{ tools | tojson }}" + other.chat_template
    reply = [{"role": "user", "content": f"Give the {word}."}]
    encoder = Encoder(other, [{"name": word}])
    assert text(encoder.reply(reply)) == f"<|end|>\n<|user|>Give the {word}.<|end|>\n<|assistant|>"


def test_keys_that_datasets_adds_are_not_rendered():
    from datasets import Dataset

    other = copy.deepcopy(tokenizer())
    other.chat_template = "{{ tools | tojson if tools }}{% for m in messages %}{{ m | tojson }}{% endfor %}"
    rows: list[Any] = [
        {"messages": CHAT[:1], "tools": [{"name": "f", "parameters": {"x": {"type": "string"}}}]},
        {"messages": [{**CHAT[1], "name": "a"}], "tools": [{"name": "g", "parameters": {"y": {"type": "string"}}}]},
    ]
    table: Any = Dataset.from_list(rows)
    for plain, row in zip(rows, table, strict=True):
        assert row != plain
        expected = Encoder(other, plain["tools"]).conversation(plain["messages"])
        assert Encoder(other, row["tools"], {"enable_thinking": None}).conversation(row["messages"]) == expected


def test_errors():
    bare = copy.deepcopy(tokenizer())
    bare.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        Encoder(bare).prompt(CHAT[:2])
    with pytest.raises(ValueError, match="no message of role 'assistant'"):
        Encoder(tokenizer()).conversation(CHAT[:2], assistant_only=True)
    with pytest.raises(ValueError, match="both be texts"):
        Encoder(tokenizer()).pair("a", CHAT[2:3])
    rewriting = copy.deepcopy(tokenizer())
    rewriting.chat_template = (
        "{% for m in messages %}{% if loop.last or m['role'] != 'assistant' %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    with pytest.raises(ValueError, match="mark what the assistant writes"):
        Encoder(rewriting).conversation(CHAT, assistant_only=True)
    endless = copy.deepcopy(tokenizer())
    endless.eos_token = None
    with pytest.raises(ValueError, match="no end-of-text token"):
        Encoder(endless)
    assert (
        is_conversation(CHAT) and not is_conversation("text") and not is_conversation([]) and not is_conversation([1])
    )
