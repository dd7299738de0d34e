"""What each field of a request means, by the body that declares it.

The route `/docs` of the server and the page docs/reference/server-fields.md read this table.
"""

from __future__ import annotations

from collections.abc import Mapping

from tutti.serve.values import Json

MODEL = "the served name or that of an adapter; may be left out"
SPECIAL = "whether the tokenizer adds special tokens, such as one that begins a text"
USER = "divides the share of its API key among users; without keys, that of all requests"
MEANINGS: Mapping[str, Mapping[str, str]] = {
    "Common": {
        "model": MODEL,
        "max_tokens": "tokens of the output, at most; with less room behind the prompt, an error",
        "temperature": "from 0, which takes the most likely token, to 100",
        "top_p": "draws from the most likely tokens that have this probability together",
        "n": "continuations, up to 128; beams of a beam search",
        "stop": "up to 16 texts, of up to 256 characters, that end the output",
        "stream": "whether the answer is sent as server-sent events",
        "stream_options": "see below; needs stream",
        "presence_penalty": "subtracted from the logits of tokens in the output, from -2 to 2",
        "frequency_penalty": "the same, as often as the token occurred",
        "logit_bias": "token -> number that is added to its logit",
        "seed": "the same seed gives the same tokens, whatever else the server does",
        "user": USER,
        "response_format": "what the output must match, see below",
        "top_k": "draws from so many most likely tokens; 0 and -1 are all",
        "min_p": "draws from tokens with at least this part of the probability of the most likely one",
        "repetition_penalty": "divides positive and multiplies negative logits of tokens that occurred",
        "min_tokens": "no end token before",
        "ignore_eos": "go on after the model's own end token",
        "stop_token_ids": "tokens that end the output",
        "include_stop_str_in_output": "whether the text keeps what ended it",
        "skip_special_tokens": "whether the text leaves special tokens out",
        "allowed_token_ids": "the only tokens that may be chosen",
        "bad_words": "texts that the output may not contain, up to 512",
        "best_of": "sampled continuations, of which the n with the largest mean log-probability are returned; not with "
        "stream where it is more than n",
        "use_beam_search": "a beam search of n beams; not with stream, stop texts, logprobs or constraints",
        "length_penalty": "exponent of the length that divides the score of a beam; needs use_beam_search",
        "regex": "regular expression that the output must match",
        "grammar": "Lark or GBNF grammar that the output must match",
        "guided_json": "JSON schema that the output must match, or its text",
        "guided_regex": "as regex",
        "guided_choice": "texts of which the output must be one",
        "guided_grammar": "as grammar",
        "guided_json_object": "whether the output must be a JSON object",
        "structured_outputs": "what the output must match, see below",
        "priority": "at least 0, which goes first",
        "cache_salt": "the prefix cache is shared among requests of one salt",
        "prompt_logprobs": "most likely tokens that are reported with each token of the prompt, up to "
        "--max-logprobs; streamed with echo of a completion only",
        "logprob_token_ids": "tokens that are reported besides, wherever tokens are",
        "return_token_ids": "adds token_ids and prompt_token_ids to the answer",
        "return_tokens_as_token_ids": "tokens of logprobs are token_id:5",
        "truncate_prompt_tokens": "keep so many tokens of the prompt; -1: as many as leave room for max_tokens. Not "
        "with images",
        "truncation_side": "left keeps the last tokens, right the first",
        "deadline": "seconds after which the answer ends with what it has",
    },
    "CompletionBody": {
        "prompt": "a text or tokens, or a list of them",
        "max_tokens": "tokens of the output, at most; 0 scores the prompt only. By default as many as there is room, "
        "up to 16",
        "logprobs": "most likely tokens that are reported with each token, up to --max-logprobs",
        "echo": "the answer begins with the prompt",
        "add_special_tokens": SPECIAL,
    },
    "ChatBody": {
        "messages": "of the roles system, developer, user, assistant, tool and function; contents are texts or parts, "
        "see below",
        "max_completion_tokens": "as max_tokens, which it replaces",
        "logprobs": "whether tokens are reported with their log-probabilities",
        "top_logprobs": "most likely tokens that are reported with each token, up to --max-logprobs; needs logprobs",
        "tools": "functions that the model may call, see below",
        "tool_choice": "auto, none, required, a function, or allowed_tools with a mode",
        "functions": "tools in the words of the older API",
        "function_call": "tool_choice in the words of the older API",
        "parallel_tool_calls": "whether an answer may have more than one call",
        "reasoning_effort": "variable of the chat template",
        "documents": "variable of the chat template",
        "chat_template": "a program: refused unless the server runs with --trust-request-chat-template",
        "chat_template_kwargs": "variables of the chat template; arguments of the function that renders it are refused",
        "add_generation_prompt": "whether the template begins an answer",
        "continue_final_message": "whether the template leaves the last message open; excludes add_generation_prompt",
        "add_special_tokens": f"{SPECIAL}; templates write their own",
        "echo": "the last message is repeated if the answer continues it",
    },
    "EmbeddingBody": {
        "model": "the served name; embeddings are those of the model without an adapter",
        "input": "a text or tokens, or a list of them",
        "encoding_format": "float or base64",
        "dimensions": "the first so many numbers, of length one again",
        "add_special_tokens": SPECIAL,
        "truncate_prompt_tokens": "keep so many tokens of the input; -1: as many as fit",
        "truncation_side": "left keeps the last tokens, right the first",
    },
    "ResponseBody": {
        "model": MODEL,
        "input": "a text, or messages as in chats",
        "instructions": "a system message before the input",
        "max_output_tokens": "tokens of the output, at most",
        "temperature": "from 0, which takes the most likely token, to 100",
        "top_p": "draws from the most likely tokens that have this probability together",
        "stream": "whether the answer is sent as server-sent events",
        "metadata": "returned with the answer",
        "user": USER,
        "tools": "an empty list; others are refused: use /v1/chat/completions",
        "tool_choice": "auto or none",
        "text": "what the output must match, see below",
        "reasoning": "see below",
    },
    "TokenizeBody": {
        "model": MODEL,
        "prompt": "a text; this or messages",
        "messages": "as in chats",
        "tools": "as in chats",
        "add_special_tokens": f"{SPECIAL}: by default for a prompt, not for messages",
        "add_generation_prompt": "whether the template begins an answer",
        "chat_template_kwargs": "variables of the chat template",
        "return_token_strs": "adds token_strs to the answer",
    },
    "DetokenizeBody": {"model": MODEL, "tokens": "the tokens of a text"},
    "StreamOptions": {
        "include_usage": "a last event has the numbers of tokens",
        "continuous_usage_stats": "each event has the numbers of tokens so far",
    },
    "ResponseFormat": {
        "type": "text, json_object or json_schema",
        "json_schema": "an object whose schema is the JSON schema that the output must match",
    },
    "StructuredOutputs": {
        "json": "JSON schema, or its text",
        "regex": "regular expression",
        "choice": "texts of which the output must be one",
        "grammar": "Lark or GBNF grammar",
        "json_object": "whether the output must be a JSON object",
    },
    "Tool": {"type": "function", "function": "the function"},
    "Function": {
        "name": "its name",
        "description": "reaches the chat template",
        "parameters": "JSON schema of its arguments, which a forced call matches",
        "strict": "reaches the chat template; forced calls always match the schema",
    },
    "TextOptions": {"format": "what the output must match"},
    "TextFormat": {
        "type": "text, json_object or json_schema",
        "schema": "JSON schema that the output must match",
    },
    "Reasoning": {"effort": "variable reasoning_effort of the chat template"},
}
# Fields that bodies declare and that change no answer, with the reason.
WITHOUT_EFFECT: Mapping[str, Mapping[str, str]] = {
    "EmbeddingBody": {"user": "embeddings are not queued by account"},
    "ResponseBody": {"parallel_tool_calls": "responses call no tools"},
    "StreamOptions": {"include_obfuscation": "events are not padded"},
    "StructuredOutputs": {
        "disable_fallback": "there is one implementation of constraints",
        "disable_any_whitespace": "JSON is always written without free white space",
    },
    "TextFormat": {
        "name": "the model does not read it",
        "description": "the model does not read it",
        "strict": "the output always matches the schema",
    },
    "Reasoning": {"summary": "the server does not separate reasoning from the answer"},
}
# Fields of the form that `/v1/audio/transcriptions` reads.
TRANSCRIPTION: Mapping[str, str] = {
    "file": "WAV of 16 bits, at the sampling rate of the model, at most as long as the model hears at once",
    "model": "the served name; may be left out",
    "temperature": "0 by default, which takes the most likely token",
    "response_format": "json or text",
}


def meaning(kind: type, field: str, table: Mapping[str, Mapping[str, str]] = MEANINGS) -> str | None:
    """What a field of a body means; None if the table does not have it."""
    return next((table[x.__name__][field] for x in kind.__mro__ if field in table.get(x.__name__, ())), None)


def described(schema: Json, kind: type) -> None:
    """Add what its fields mean to the JSON schema of a body."""
    for field, about in schema.get("properties", {}).items():
        if (text := meaning(kind, field) or meaning(kind, field, WITHOUT_EFFECT)) is not None:
            about["description"] = text
