"""Bodies of requests, in the words of the OpenAI API and of vLLM, and what they mean to the engine.

A null means the default, for every field. What fields mean is in `meanings`; those without a meaning are in `fields`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator

from tutti.serve.constraints.expansion import nested
from tutti.serve.engine.request import Sampling
from tutti.serve.server.errors import Refused
from tutti.serve.server.fields import REFUSED, RESPONSES, without
from tutti.serve.server.meanings import described
from tutti.serve.values import Json, JsonValue, JsonView

T = TypeVar("T")


class First(FailFast):
    """A million wrong items are one error. Unlike its parent, it can be in a union."""

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]


List = Annotated[list[T], First()]
DEEPEST = 200  # levels of a body


class Body(BaseModel):
    """A body. Unknown fields are errors; nulls are left out."""

    model_config = ConfigDict(protected_namespaces=(), json_schema_extra=described)
    absent: ClassVar[Mapping[str, tuple[JsonValue, str]]] = REFUSED

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, body: JsonValue) -> JsonValue:
        if not isinstance(body, dict):
            return body
        for name, value in body.items():
            if name not in cls.model_fields:
                without(name, value, cls.absent, [x.alias or key for key, x in cls.model_fields.items()])
        return {name: x for name, x in body.items() if x is not None and name in cls.model_fields}


class Whole(Body):
    """A whole body, as it is sent."""

    @model_validator(mode="before")
    @classmethod
    def _readable(cls, body: JsonValue) -> JsonValue:
        nested(body, "the body", DEEPEST)
        _check_values(body)
        return body


def _check_values(body: JsonValue) -> None:
    """Raise Refused for a text that is no Unicode (half of a surrogate pair), and a number that is none."""
    rest = [body]
    while rest:
        one = rest.pop()
        if isinstance(one, dict):
            rest += one.keys()
            rest += one.values()
        elif isinstance(one, list):
            rest += (x for x in one if isinstance(x, (str, float, list, dict)))
        elif isinstance(one, float) and not math.isfinite(one):
            raise Refused(400, f"the body has the number {one}, which is not JSON")
        elif isinstance(one, str) and not one.isascii():
            try:
                one.encode()
            except UnicodeEncodeError as error:
                raise Refused(400, f"a text of the body is not Unicode: {error.reason}") from error


class StreamOptions(Body):
    """include_usage: a last event with the numbers of tokens. continuous_usage_stats: in each event, those so far."""

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False


class ResponseFormat(Body):
    """What the answer must match."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: Json | None = None


class StructuredOutputs(Body):
    """What the answer must match, in the words of vLLM. One of the first five."""

    json_: Json | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: List[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    disable_fallback: bool = False
    disable_any_whitespace: bool = True

    @model_validator(mode="before")
    @classmethod
    def _named(cls, body: JsonValue) -> JsonValue:
        return {("json_" if k == "json" else k): x for k, x in body.items()} if isinstance(body, dict) else body

    model_config = ConfigDict(populate_by_name=True)


# Fields from which options of `Sampling` with other names come.
FIELDS: Mapping[str, str] = {"allowed": "allowed_token_ids", "bad": "bad_words", "beams": "n"}


class Common(Whole):
    """What completions and chats have in common."""

    model: str = ""
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = 1
    stop: str | List[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Json | None = None
    seed: int | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: List[int] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: List[int] | None = None
    bad_words: List[str] = Field(default_factory=list)
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    regex: str | None = None
    grammar: str | None = None
    guided_json: Json | str | None = None
    guided_regex: str | None = None
    guided_choice: List[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool = False
    structured_outputs: StructuredOutputs | None = None
    priority: int = 0
    cache_salt: str = ""
    prompt_logprobs: int | None = None
    logprob_token_ids: List[int] = Field(default_factory=list)
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "left"
    deadline: float | None = None

    def sampling(self, max_tokens: int | None, logprobs: int | None, schema: JsonValue = None,
                 bad: list[list[int]] | None = None, names: Mapping[str, str] = FIELDS) -> Sampling:  # fmt: skip
        """How tokens are chosen. schema: schema of a forced call. bad: tokens of `bad_words`. names: fields that
        options of `Sampling` come from, where their names differ. Raises Refused for impossible values."""
        self._check(logprobs)
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        constraint = self._constraint(schema)
        if self.logprob_token_ids and logprobs is None:
            logprobs = 0
        beams: Json = {"beams": self.n, "length_penalty": self.length_penalty} if self.use_beam_search else {}
        greedy = self.use_beam_search and self.n == 1
        try:
            return Sampling(
                max_tokens=max_tokens, min_tokens=self.min_tokens, temperature=0 if greedy else self.temperature,
                top_k=0 if self.top_k == -1 else self.top_k, top_p=self.top_p, min_p=self.min_p,
                repetition_penalty=self.repetition_penalty, presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty, logit_bias=self._bias(), n=self.n, best_of=self.best_of,
                seed=self.seed, stop=tuple(stop), stop_tokens=tuple(self.stop_token_ids), ignore_end=self.ignore_eos,
                include_stop=self.include_stop_str_in_output, skip_special=self.skip_special_tokens,
                allowed=self.allowed_token_ids, bad=bad or (), logprobs=logprobs,
                prompt_logprobs=self.prompt_logprobs, logprob_tokens=tuple(self.logprob_token_ids), **constraint,
                **beams,
            )  # fmt: skip
        except ValueError as error:
            text = re.sub(r"^\w+|max_tokens", lambda option: names.get(option[0], option[0]), str(error))
            field = text.split()[0]
            raise Refused(400, text, field if hasattr(self, field) or field in names.values() else None) from error

    def _check(self, logprobs: int | None) -> None:
        """Raise Refused for fields that contradict one another."""
        if self.stream_options is not None and not self.stream:
            raise Refused(400, "stream_options needs stream", "stream_options")
        if self.stream and self.use_beam_search:
            raise Refused(400, "a beam search cannot be streamed", "stream")
        if self.length_penalty != 1 and not self.use_beam_search:
            raise Refused(400, "length_penalty needs use_beam_search", "length_penalty")
        if self.deadline is not None and not 0 < self.deadline < math.inf:
            raise Refused(400, f"deadline is {self.deadline}; it must be a number of seconds above 0", "deadline")

    def _bias(self) -> dict[int, float]:
        """The logit bias, by token."""
        try:
            return {int(token): float(value) for token, value in (self.logit_bias or {}).items() if value is not None}
        except (ValueError, TypeError, OverflowError) as error:
            raise Refused(400, f"logit_bias: {error}; expected numbers by token", "logit_bias") from error

    def _constraint(self, schema: JsonValue) -> Json:
        """What the answer must match: `schema`, `regex` or `grammar`, or nothing."""
        outputs = self.structured_outputs or StructuredOutputs.model_validate({})
        wanted = {
            "tool_choice": ("schema", schema),
            "response_format": ("schema", self._format()),
            "regex": ("regex", self.regex),
            "grammar": ("grammar", self.grammar),
            "guided_json": ("schema", _schema(self.guided_json, "guided_json")),
            "guided_regex": ("regex", self.guided_regex),
            "guided_choice": ("grammar", _choice(self.guided_choice, "guided_choice")),
            "guided_grammar": ("grammar", self.guided_grammar),
            "guided_json_object": ("schema", {"type": "object"} if self.guided_json_object else None),
            "structured_outputs.json": ("schema", _schema(outputs.json_, "structured_outputs.json")),
            "structured_outputs.regex": ("regex", outputs.regex),
            "structured_outputs.choice": ("grammar", _choice(outputs.choice, "structured_outputs.choice")),
            "structured_outputs.grammar": ("grammar", outputs.grammar),
            "structured_outputs.json_object": ("schema", {"type": "object"} if outputs.json_object else None),
        }
        constraints = {field: x for field, x in wanted.items() if x[1] is not None}
        if len(constraints) > 1:
            raise Refused(
                400, f"{' and '.join(constraints)} exclude one another; give one of them", list(constraints)[1]
            )
        return dict(constraints.values())

    def _format(self) -> JsonValue:
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return {"type": "object"}
        schema = (wanted.json_schema or {}).get("schema")
        if not isinstance(schema, dict):
            raise Refused(400, "response_format.json_schema.schema must be a JSON schema", "response_format")
        return schema


def _schema(schema: Json | str | None, field: str) -> JsonValue:
    """A JSON schema that may be given as its text."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise Refused(400, f"{field} is not JSON: {error}", field) from error
        if not isinstance(schema, dict):
            raise Refused(400, f"{field} must be a JSON schema", field)
    return schema


def _choice(choices: list[str] | None, field: str) -> str | None:
    """The grammar of some texts."""
    if choices is None:
        return None
    if not choices:
        raise Refused(400, f"{field} is empty; give at least one text", field)
    return "start: " + " | ".join(json.dumps(x, ensure_ascii=False) for x in choices)


class CompletionBody(Common):
    """Body of `/v1/completions`."""

    prompt: str | List[str] | List[int] | List[List[int]]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = True

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts of the body."""
        prompt: JsonValue = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        if not prompt:
            raise Refused(400, "prompt is empty", "prompt")
        return prompt


class Function(Body):
    """A function that the model may call. parameters: a JSON schema."""

    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool of a chat."""

    type: Literal["function"] = "function"
    function: Function


class ChatBody(Common):
    """Body of `/v1/chat/completions`."""

    messages: JsonValue  # they are read by `messages.shaped`
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: List[Tool] | None = None
    tool_choice: str | Json | None = None
    functions: List[Function] | None = None
    function_call: str | Json | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    documents: List[Json] | None = None
    chat_template: str | None = None
    chat_template_kwargs: Json = Field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    echo: bool = False

    @property
    def limit(self) -> tuple[str, int | None]:
        """The field that limits the tokens of the output, and its value."""
        name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return name, getattr(self, name)

    @model_validator(mode="after")
    def _legacy(self) -> ChatBody:
        """Read functions as tools."""
        if self.functions is not None or self.function_call is not None:
            if self.tools is not None or self.tool_choice is not None:
                raise Refused(400, "functions and function_call exclude tools and tool_choice", "functions")
            self.tools = [Tool(function=x) for x in self.functions or []]
            name = self.function_call
            self.tool_choice = {"type": "function", "function": name} if isinstance(name, dict) else name
        return self

    def template(self) -> Json:
        """Variables of the chat template."""
        more: JsonView = {"reasoning_effort": self.reasoning_effort, "documents": self.documents}
        return {**self.chat_template_kwargs, **{name: x for name, x in more.items() if x is not None}}


class EmbeddingBody(Whole):
    """Body of `/v1/embeddings`."""

    model: str = ""
    input: str | List[str] | List[int] | List[List[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "left"


class TokenizeBody(Whole):
    """Body of `/tokenize`. add_special_tokens: by default for a prompt, not for messages."""

    model: str = ""
    prompt: str | None = None
    messages: JsonValue = None
    tools: List[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: Json = Field(default_factory=dict)
    return_token_strs: bool = False


class DetokenizeBody(Whole):
    """Body of `/detokenize`."""

    model: str = ""
    tokens: List[int]


class TextFormat(Body):
    """What a response must match."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Json | None = Field(None, alias="schema")

    @model_validator(mode="before")
    @classmethod
    def _named(cls, body: JsonValue) -> JsonValue:
        return {("schema_" if k == "schema" else k): x for k, x in body.items()} if isinstance(body, dict) else body

    model_config = ConfigDict(populate_by_name=True)


class TextOptions(Body):
    """How a response is written."""

    format: TextFormat = Field(default_factory=lambda: TextFormat.model_validate({}))


class Reasoning(Body):
    """How much a model thinks. effort: a variable of the chat template."""

    effort: str | None = None
    summary: str | None = None


class ResponseBody(Whole):
    """Body of `/v1/responses`, of which text in and out is supported."""

    absent: ClassVar[Mapping[str, tuple[JsonValue, str]]] = {**REFUSED, **RESPONSES}
    model: str = ""
    input: JsonValue
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    stream: bool = False
    metadata: Json | None = None
    user: str | None = None
    tools: List[Json] = Field(default_factory=list)
    tool_choice: JsonValue = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = Field(default_factory=TextOptions)
    reasoning: Reasoning = Field(default_factory=Reasoning)

    def common(self) -> Common:
        """The same fields in the words of chats. Raises Refused for tools."""
        if self.tools or self.tool_choice not in ("auto", "none"):
            raise Refused(400, "responses call no tools; use /v1/chat/completions", "tools")
        wanted = self.text.format
        form = {"type": wanted.type, **({"json_schema": {"schema": wanted.schema_}} if wanted.schema_ else {})}
        return Common.model_validate({"model": self.model, "temperature": self.temperature, "top_p": self.top_p,
                                      "user": self.user, "response_format": form})  # fmt: skip
