"""The application: routes of the OpenAI API over a service."""

from __future__ import annotations

import asyncio
import base64
import inspect
import struct
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import resources
from typing import Any
from uuid import uuid4

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from transformers import PreTrainedTokenizerBase

from tutti.serve import media
from tutti.serve.request import Output, Sampling
from tutti.serve.request import Request as Ask
from tutti.serve.server.answers import ChatAnswer, Sent, TextAnswer, event, usage
from tutti.serve.server.errors import Refused, answer, body_of
from tutti.serve.server.limits import Access, BodyLimit
from tutti.serve.server.metrics import Metrics
from tutti.serve.server.protocol import ChatBody, Common, CompletionBody, EmbeddingBody, ResponseBody
from tutti.serve.server.tools import forced
from tutti.serve.service import FAILED, Answers, Draining, Full, Service

TEMPLATE = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "tokenizer"}
GONE = 499  # status of a request whose client has left
CUT = "incomplete"  # status of a response that has reached its length
LOOK = 0.25  # seconds between looks whether a client is still there


@dataclass
class Options:
    """Options of a server.

    model: its name in the API. keys, rate: as for `Access`. body: largest body in bytes. queue: unfinished requests.
    """

    model: str
    keys: Sequence[str] = ()
    rate: float = 0
    body: int = 4 << 20
    queue: int = 256
    adapters: Sequence[str] = field(default_factory=tuple)


def application(engine: Any, options: Options) -> FastAPI:
    """The application that serves an engine. It starts the engine's thread, and drains it when it ends."""
    metrics = Metrics()
    service = Service(engine, options.queue, metrics.observe)
    server = Server(engine, service, metrics, options)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        server.spell(0)  # it takes a second to begin, for large vocabularies
        yield
        await service.drain()
        await asyncio.to_thread(service.stop)

    app = FastAPI(title="Tutti", lifespan=lifespan, docs_url="/docs", redoc_url=None)
    app.add_middleware(BodyLimit, most=options.body)
    for kind in (Refused, RequestValidationError, ValueError, Full, Draining, Exception):
        app.add_exception_handler(kind, server.fail)
    app.add_exception_handler(HTTPException, server.fail_http)
    app.add_api_route("/", server.page, methods=["GET"], response_class=HTMLResponse)
    app.add_api_route("/live", server.live, methods=["GET"])
    app.add_api_route("/health", server.health, methods=["GET"])
    app.add_api_route("/metrics", server.metrics_text, methods=["GET"])
    app.add_api_route("/v1/models", server.models, methods=["GET"])
    app.add_api_route("/v1/models/{name}", server.one_model, methods=["GET"])
    app.add_api_route("/v1/completions", server.completions, methods=["POST"])
    app.add_api_route("/v1/chat/completions", server.chat, methods=["POST"])
    app.add_api_route("/v1/audio/transcriptions", server.transcriptions, methods=["POST"])
    app.add_api_route("/v1/embeddings", server.embeddings, methods=["POST"])
    app.add_api_route("/v1/responses", server.responses, methods=["POST"])
    app.state.server = server
    return app


class Server:
    """The routes."""

    def __init__(self, engine: Any, service: Service, metrics: Metrics, options: Options):
        self.engine, self.service, self.metrics, self.options = engine, service, metrics, options
        first = getattr(engine, "engines", [engine])[0]
        self.processor = first.processor
        self.tokenizer, self.spell = first.tokenizer, first.constraints.bytes_of
        self.access = Access(options.keys, options.rate)
        self.started = int(time.time())

    # -- about the server -----------------------------------------------------------------------------------------

    async def page(self) -> HTMLResponse:
        """The page for people."""
        return HTMLResponse(resources.files("tutti.serve.server").joinpath("page.html").read_text())

    async def live(self) -> dict[str, Any]:
        """What the page draws: the last minute."""
        self.metrics.sample()
        return {"model": self.options.model, "recent": list(self.metrics.recent)}

    async def health(self) -> JSONResponse:
        """200 while requests are served, 503 otherwise."""
        state = "ended" if self.service.ended else "draining" if self.service.draining else "ok"
        return JSONResponse({"status": state}, 200 if state == "ok" else 503)

    async def metrics_text(self) -> PlainTextResponse:
        """Prometheus metrics."""
        return PlainTextResponse(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> dict[str, Any]:
        """The names that requests may give as `model`."""
        self.access.check(request)
        names = [self.options.model, *self.options.adapters]
        return {"object": "list", "data": [{"id": x, "object": "model", "created": self.started, "owned_by": "tutti"}
                                           for x in names]}  # fmt: skip

    async def one_model(self, request: Request, name: str) -> dict[str, Any]:
        """One of the names."""
        self._begin(request, name)
        return next(x for x in (await self.models(request))["data"] if x["id"] == name)

    async def fail(self, request: Request, error: Exception) -> JSONResponse:
        """The answer to an error."""
        made = await answer(request, error)
        self.metrics.refused.labels(status=made.status_code).inc()
        return made

    async def fail_http(self, request: Request, error: Exception) -> JSONResponse:
        """The answer to an unknown path or method."""
        assert isinstance(error, HTTPException)
        return await self.fail(request, Refused(error.status_code, f"{request.url.path}: {error.detail}"))

    # -- completions ----------------------------------------------------------------------------------------------

    async def completions(self, request: Request, body: CompletionBody) -> Any:
        """`/v1/completions`"""
        who = self._begin(request, body.model)
        if body.suffix:
            raise Refused(400, "suffix is not supported", "suffix")
        if body.echo and body.prompt_logprobs is None:
            body.prompt_logprobs = body.logprobs
        sampling = body.sampling(body.max_tokens, body.logprobs)
        given = body.prompts()
        if len(given) > self.options.queue:
            raise Refused(400, f"{len(given)} prompts; the server holds {self.options.queue} at once", "prompt")
        prompts = [await self._tokens(x) for x in given]
        made = TextAnswer(body.model, self.tokenizer, self.spell, body.n, echo=body.echo)
        return await self._answer(request, body, made, [self._ask(x, sampling, body, *who) for x in prompts])

    async def chat(self, request: Request, body: ChatBody) -> Any:
        """`/v1/chat/completions`"""
        who = self._begin(request, body.model)
        tools = [] if body.tool_choice == "none" else body.tools or []
        if body.top_logprobs is not None and not body.logprobs:
            raise Refused(400, "top_logprobs needs logprobs", "top_logprobs")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        if refused := TEMPLATE & body.chat_template_kwargs.keys():
            raise Refused(400, f"chat_template_kwargs cannot set {', '.join(sorted(refused))}", "chat_template_kwargs")
        sampling = body.sampling(most, logprobs, forced(tools, body.tool_choice))
        prompt, inputs = await self._chat_prompt(body.messages, tools, body.chat_template_kwargs)
        made = ChatAnswer(body.model, self.tokenizer, self.spell, body.n, tools=tools)
        return await self._answer(request, body, made, [self._ask(prompt, sampling, body, *who, inputs)])

    async def transcriptions(self, request: Request) -> Any:
        """`/v1/audio/transcriptions`: what a model of speech hears in a WAV file."""
        async with request.form() as form:
            return await self._transcribed(request, form)

    async def _transcribed(self, request: Request, form: FormData) -> Any:
        account, _ = self._begin(request, str(form.get("model")))
        if unknown := sorted(form.keys() - {"file", "model", "temperature", "response_format"}):
            raise Refused(400, f"unknown field {unknown[0]!r}", unknown[0])
        file, kind = form.get("file"), form.get("response_format", "json")
        if not isinstance(file, UploadFile):
            raise Refused(400, "file is missing", "file")
        if kind not in ("json", "text"):
            raise Refused(400, f"response_format is {kind!r}; expected json or text", "response_format")
        contents = await file.read()
        prompt, inputs = await asyncio.to_thread(lambda: media.heard(self.processor, *media.sound(contents)))
        sampling = Sampling(temperature=float(str(form.get("temperature", 0))))
        ask = Ask(prompt, sampling, account=account, inputs=inputs, id=uuid4().hex)
        output = [x[0] async for x in self._changes(request, self.service.submit([ask]))][-1]
        text = output.text.strip()
        return PlainTextResponse(text) if kind == "text" else {"text": text, "usage": usage([output])}

    def _begin(self, request: Request, model: str) -> tuple[str, str]:
        """Check who asks, and for which model. Returns the account, and the name of an adapter or an empty text."""
        account = self.access.check(request)
        if model == self.options.model:
            return account, ""
        if model in self.options.adapters:
            return account, model
        known = ", ".join([self.options.model, *self.options.adapters])
        raise Refused(404, f"there is no model {model!r}; there is {known}", "model")

    def _ask(self, prompt: list[int], sampling: Sampling, body: Common, account: str, adapter: str,
             inputs: Mapping[str, Any] | None = None) -> Ask:  # fmt: skip
        if body.priority < 0:
            raise Refused(400, f"priority is {body.priority}; it must be at least 0, the first", "priority")
        if body.stream and sampling.best_of and sampling.best_of > sampling.n:
            raise Refused(400, "best_of cannot be streamed", "best_of")
        return Ask(prompt, sampling, priority=body.priority, account=account, user=body.user or "",
                   deadline=body.deadline, adapter=adapter, inputs=inputs or {}, id=uuid4().hex)  # fmt: skip

    async def _tokens(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        try:
            return await asyncio.to_thread(lambda: self.tokenizer(prompt)["input_ids"])
        except (TypeError, UnicodeError) as error:
            raise Refused(400, f"the prompt cannot be tokenized: {error}", "prompt") from error

    async def _chat_prompt(
        self, messages: list[dict[str, Any]], tools: Sequence[Any], more: dict[str, Any]
    ) -> tuple[list[int], dict[str, Any]]:
        """The tokens of a chat, and the inputs of its images."""
        if not messages:
            raise Refused(400, "messages is empty", "messages")
        reader = self.processor if getattr(self.processor, "chat_template", None) else self.tokenizer
        if not getattr(reader, "chat_template", None):
            other = "audio/transcriptions" if hasattr(self.processor, "feature_extractor") else "completions"
            raise Refused(400, f"the model's tokenizer has no chat template; use /v1/{other}", "messages")
        given = [{**x, "content": _joined(x.get("content"))} for x in messages]
        shown: Any = [x.model_dump(exclude_none=True) for x in tools] or None

        def prompt() -> tuple[list[int], dict[str, Any]]:
            shaped, images = given, []
            if reader is self.processor or any(isinstance(x["content"], list) for x in given):
                shaped, images = media.messages_with_images(given)
            if reader is not self.processor:
                mark = getattr(self.processor, "image_token", "")
                shaped = [{**x, "content": media.in_line(x["content"], mark)} for x in shaped]
            text = reader.apply_chat_template(shaped, tools=shown, add_generation_prompt=True, tokenize=False, **more)
            if images:
                return media.seen(self.processor, text, images)
            special = reader is self.processor and media.begins(reader, text)
            return self.tokenizer(text, add_special_tokens=special)["input_ids"], {}

        try:
            return await asyncio.to_thread(prompt)
        except ValueError as error:
            raise Refused(400, str(error), "messages") from error
        except Exception as error:  # a template raises what it likes
            raise Refused(400, f"the chat template refuses these messages: {error}", "messages") from error

    async def _answer(self, request: Request, body: Common, made: TextAnswer | ChatAnswer, asks: list[Ask]) -> Any:
        """The answer, whole or as a stream."""
        answers = self.service.submit(asks)
        if not body.stream:
            last = {}
            async for changed in self._changes(request, answers):
                last |= changed
            return made.whole([last[i] for i in range(len(asks))])
        shown = bool(body.stream_options and body.stream_options.include_usage)
        events = self._events(self._changes(request, answers), made, shown)
        first = await anext(events)  # a request that is refused has a status
        return StreamingResponse(_after(first, events), media_type="text/event-stream",
                                 headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})  # fmt: skip

    async def _changes(self, request: Request, answers: Answers) -> AsyncIterator[dict[int, Output]]:
        """The outputs that change, by their number, until all are finished or the client has left."""
        try:
            looked = time.monotonic()
            while answers.open:
                if changed := await answers.changed(LOOK):
                    for output in changed.values():
                        if output.error:
                            raise Refused(500 if output.error.startswith(FAILED) else 400, output.error)
                    yield changed
                if time.monotonic() - looked >= LOOK:
                    looked = time.monotonic()
                    if await request.is_disconnected():
                        raise Refused(GONE, "the client has left")
        finally:
            answers.close()

    async def _events(
        self, changes: AsyncIterator[dict[int, Output]], made: TextAnswer | ChatAnswer, shown: bool
    ) -> AsyncIterator[str]:
        """The events of a stream."""
        last: dict[int, Output] = {}
        sent: dict[int, Sent] = {}
        try:
            async for changed in changes:
                last |= changed
                for i, output in changed.items():
                    for j, completion in enumerate(output.completions):
                        number = i * made.n + j
                        known = sent.setdefault(number, Sent())
                        for piece in () if known.done else made.piece(number, output, completion, known):
                            known.begun = True
                            yield event(piece)
                        known.done = bool(completion.finish)
            if shown:
                yield event({**made.frame([]), "usage": usage([last[i] for i in sorted(last)])})
            yield event("[DONE]")
        except Exception as error:
            if not sent:
                raise
            if not (isinstance(error, Refused) and error.status == GONE):
                yield event(body_of(error)[1])

    # -- embeddings and responses ---------------------------------------------------------------------------------

    async def embeddings(self, request: Request, body: EmbeddingBody) -> dict[str, Any]:
        """`/v1/embeddings`: the mean of the last hidden states, of length one."""
        if self._begin(request, body.model)[1]:
            raise Refused(400, "embeddings are those of the model without an adapter", "model")
        given: Any = body.input
        texts = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
        if not texts:
            raise Refused(400, "input is empty", "input")
        if len(texts) > self.options.queue:
            raise Refused(400, f"{len(texts)} inputs; the server takes {self.options.queue} at once", "input")
        tokens = [await self._tokens(x) for x in texts]
        found = [await self.service.call(lambda engine, x=x: getattr(engine, "engines", [engine])[0].embed([x])[0])
                 for x in tokens]  # fmt: skip
        if body.dimensions is not None:
            if not 1 <= body.dimensions <= len(found[0]):
                raise Refused(
                    400, f"dimensions is {body.dimensions}; it must be from 1 to {len(found[0])}", "dimensions"
                )
            found = [x[: body.dimensions] / x[: body.dimensions].norm() for x in found]
        data = [{"object": "embedding", "index": i, "embedding": _written(x.tolist(), body.encoding_format)}
                for i, x in enumerate(found)]  # fmt: skip
        count = sum(map(len, tokens))
        return {"object": "list", "data": data, "model": body.model,
                "usage": {"prompt_tokens": count, "total_tokens": count}}  # fmt: skip

    async def responses(self, request: Request, body: ResponseBody) -> Any:
        """`/v1/responses`: text in, text out."""
        who = self._begin(request, body.model)
        turns = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
        system = [{"role": "system", "content": body.instructions}] if body.instructions else []
        messages = [*system, *({"role": x.get("role", "user"), "content": x.get("content")} for x in turns)]
        common = Common(model=body.model, temperature=body.temperature, top_p=body.top_p, user=body.user)
        prompt, inputs = await self._chat_prompt(messages, (), {})
        ask = self._ask(prompt, common.sampling(body.max_output_tokens, None), common, *who, inputs)
        id, made = f"resp_{uuid4().hex}", f"msg_{uuid4().hex}"

        def shown(text: str, status: str, output: Output | None) -> dict[str, Any]:
            content = [{"type": "output_text", "text": text, "annotations": []}]
            message = {"type": "message", "id": made, "role": "assistant", "status": status, "content": content}
            counts = output and {"input_tokens": len(output.prompt), "output_tokens": len(output.tokens),
                                 "total_tokens": len(output.prompt) + len(output.tokens),
                                 "input_tokens_details": {"cached_tokens": output.cached},
                                 "output_tokens_details": {"reasoning_tokens": 0}}  # fmt: skip
            return {"id": id, "object": "response", "created_at": int(time.time()), "status": status,
                    "model": body.model, "output": [message] if output else [], "usage": counts or None,
                    "parallel_tool_calls": False, "tool_choice": "auto", "tools": [],
                    "metadata": body.metadata or {}, "error": None, "instructions": body.instructions,
                    "temperature": body.temperature, "top_p": body.top_p,
                    "incomplete_details": {"reason": "max_output_tokens"} if status == CUT else None}  # fmt: skip

        changes = self._changes(request, self.service.submit([ask]))
        if not body.stream:
            output = [x[0] async for x in changes][-1]
            return shown(output.text, _status(output), output)
        first = (await anext(changes))[0]

        async def events() -> AsyncIterator[str]:
            number, text, output = 0, "", first
            begun = {"type": "response.created", "sequence_number": 0, "response": shown("", "in_progress", None)}
            yield event(begun, "response.created")
            while True:
                if len(output.text) > len(text):
                    number += 1
                    delta = {"type": "response.output_text.delta", "sequence_number": number, "item_id": made,
                             "output_index": 0, "content_index": 0, "delta": output.text[len(text) :]}  # fmt: skip
                    text = output.text
                    yield event(delta, "response.output_text.delta")
                if output.finished:
                    break
                output = (await anext(changes))[0]
            kind = f"response.{_status(output)}"
            done = {"type": kind, "sequence_number": number + 1, "response": shown(text, _status(output), output)}
            yield event(done, kind)

        return StreamingResponse(events(), media_type="text/event-stream")


def _status(output: Output) -> str:
    """The state of a finished response."""
    return CUT if output.completions[0].finish == "length" else "completed"


def _joined(content: Any) -> Any:
    """The text of a message whose content is a list of texts."""
    if isinstance(content, list) and all(isinstance(x, dict) and x.get("type") in media.TEXTS for x in content):
        return "".join(x["text"] for x in content)
    return content


def _written(numbers: list[float], encoding: str) -> Any:
    if encoding == "base64":
        return base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()
    return numbers


async def _after(first: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for x in rest:
        yield x
