"""Bodies of requests, in the words of the OpenAI API, and what they mean to the engine.

Fields that the OpenAI API lacks have the names of other servers: `top_k`, `min_p`, `repetition_penalty`, `min_tokens`,
`ignore_eos`, `stop_token_ids`, `best_of`, `regex`, `grammar`, `priority`, `prompt_logprobs`, `deadline`. Fields that
have no meaning here are refused, except those that change no answer (`user`, `metadata`, `store`, `service_tier`).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tutti.serve.request import Sampling
from tutti.serve.server.errors import Refused


class Body(BaseModel):
    """A body in which unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class StreamOptions(Body):
    """include_usage: a last event with the numbers of tokens."""

    include_usage: bool = False
    include_obfuscation: bool = False


class ResponseFormat(BaseModel):
    """What the answer must match."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: dict[str, Any] | None = None


class Common(Body):
    """What completions and chats have in common."""

    model: str
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = 1
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    response_format: ResponseFormat | None = None
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = Field(default_factory=list)
    best_of: int | None = None
    regex: str | None = None
    grammar: str | None = None
    priority: int = 0
    prompt_logprobs: int | None = None
    deadline: float | None = None

    def sampling(self, max_tokens: int | None, logprobs: int | None, schema: Any = None) -> Sampling:
        """How tokens are chosen. Raises Refused for impossible values."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        try:
            bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        except ValueError as error:
            raise Refused(400, f"logit_bias: {error}", "logit_bias") from error
        if schema is None:
            schema = self._schema()
        try:
            return Sampling(
                max_tokens=max_tokens, min_tokens=self.min_tokens, temperature=self.temperature,
                top_k=max(self.top_k, 0), top_p=self.top_p, min_p=self.min_p,
                repetition_penalty=self.repetition_penalty, presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty, logit_bias=bias, n=self.n, best_of=self.best_of,
                seed=self.seed, stop=tuple(stop), stop_tokens=tuple(self.stop_token_ids), ignore_end=self.ignore_eos,
                logprobs=logprobs, prompt_logprobs=self.prompt_logprobs, schema=schema, regex=self.regex,
                grammar=self.grammar,
            )  # fmt: skip
        except ValueError as error:
            raise Refused(400, str(error), str(error).split()[0]) from error

    def _schema(self) -> Any:
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return {"type": "object"}
        found = (wanted.json_schema or {}).get("schema")
        if not isinstance(found, dict):
            raise Refused(400, "response_format.json_schema.schema must be a JSON schema", "response_format")
        return found


class CompletionBody(Common):
    """Body of `/v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool = False
    suffix: str | None = None

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts of the body."""
        given: Any = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            return [given]
        if not given:
            raise Refused(400, "prompt is empty", "prompt")
        return given


class Function(BaseModel):
    """A function that the model may call. parameters: a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool of a chat."""

    type: Literal["function"] = "function"
    function: Function


class ChatBody(Common):
    """Body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class EmbeddingBody(Body):
    """Body of `/v1/embeddings`."""

    model: str
    input: str | list[str] | list[int] | list[list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None


class ResponseBody(Body):
    """Body of `/v1/responses`, of which text in and out is supported."""

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    stream: bool = False
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
