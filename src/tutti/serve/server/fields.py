"""Fields of requests that have no meaning here: which are ignored, and which are refused, with the remedy."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from tutti.serve.server.errors import Refused
from tutti.serve.values import JsonValue

logger = logging.getLogger("tutti.serve")
_noted: set[str] = set()

# Fields that change no answer.
IGNORED = {
    "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "safety_identifier", "verbosity", "store",
    "metadata", "service_tier", "request_id", "prediction", "guided_decoding_backend", "spaces_between_special_tokens",
    "kv_transfer_params", "moderation",
}  # fmt: skip

# Fields that would change an answer: the value that changes nothing, and what to do instead.
REFUSED: dict[str, tuple[JsonValue, str]] = {
    "prompt_embeds": (None, "give the prompt as text or tokens"),
    "suffix": ("", "put it into the prompt, with the model's tokens for filling in the middle"),
    "audio": (None, "the model writes text; leave the field out"),
    "modalities": (["text"], "the model writes text; ask for ['text']"),
    "mm_processor_kwargs": ({}, "images are read as the model's processor is configured; leave the field out"),
    "media_io_kwargs": ({}, "images are read as the model's processor is configured; leave the field out"),
    "vllm_xargs": ({}, "give the fields by name"),
    "logits_processors": ([], "use logit_bias, bad_words, allowed_token_ids or structured_outputs"),
    "detokenize": (True, "the text is always part of the answer; leave the field out"),
    "guided_whitespace_pattern": (None, "JSON is written without free white space; leave the field out"),
    "include_reasoning": (True, "the server does not separate reasoning from the answer; leave the field out"),
    "separate_reasoning": (False, "the server does not separate reasoning from the answer; leave the field out"),
    "thinking_token_budget": (None, "use max_tokens"),
    "repetition_detection": (None, "use repetition_penalty or frequency_penalty"),
    "web_search_options": (None, "the server searches nothing; leave the field out"),
    "structural_tag": (None, "use structured_outputs.grammar"),
}
# Those of responses.
RESPONSES: dict[str, tuple[JsonValue, str]] = {
    "previous_response_id": (None, "the server keeps no responses; send the whole conversation as input"),
    "conversation": (None, "the server keeps no conversations; send the whole conversation as input"),
    "prompt": (None, "the server keeps no prompt templates; send the text as input"),
    "background": (False, "the server keeps no responses; wait for the answer, or stream it"),
    "max_tool_calls": (None, "responses call no tools; use /v1/chat/completions"),
    "top_logprobs": (0, "responses have no logprobs; use /v1/chat/completions"),
    "include": ([], "responses have nothing to include; leave the field out"),
    "truncation": ("disabled", "shorten the input"),
    "stream_options": ({}, "the last event of a response has its usage; leave the field out"),
}


def unknown(field: str, names: Iterable[str]) -> Refused:
    """The refusal of a field that nobody reads. names: names of fields that are read; the nearest is suggested."""
    near = get_close_matches(field, names, 1, 0.7)
    return Refused(400, f"unknown field {field!r}" + (f"; did you mean {near[0]!r}?" if near else ""), field)


def without(field: str, value: JsonValue, refused: Mapping[str, tuple[JsonValue, str]], names: Iterable[str]) -> None:
    """Take note of a field that a body does not have. names: names of the fields that it has. Raises Refused, unless it
    can be ignored."""
    if field in refused:
        nothing, remedy = refused[field]
        if value is not None and value != nothing:
            raise Refused(400, f"{field} is not supported: {remedy}", field)
    elif field not in IGNORED:
        raise unknown(field, names)
    elif field not in _noted:
        _noted.add(field)
        logger.warning("requests have the field %s, which is ignored: it changes no answer", field)
