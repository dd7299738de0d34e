"""The application: routes of the OpenAI API over a service."""

from __future__ import annotations

import asyncio
import base64
import inspect
import struct
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any
from uuid import uuid4

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from transformers import PreTrainedTokenizerBase

import tutti
from tutti.serve import media
from tutti.serve.engine.protocols import Serving
from tutti.serve.engine.request import BAD, Completion, Output, Sampling
from tutti.serve.engine.request import Request as Ask
from tutti.serve.server import messages as chats
from tutti.serve.server.answers import ChatAnswer, Sent, TextAnswer, event, usage
from tutti.serve.server.errors import Refused, answer, body_of
from tutti.serve.server.fields import unknown
from tutti.serve.server.hosts import Hosts
from tutti.serve.server.limits import Access, BodyLimit
from tutti.serve.server.meanings import TRANSCRIPTION
from tutti.serve.server.metrics import Metrics
from tutti.serve.server.prompts import GONE, LOOK, Prompts, connected
from tutti.serve.server.protocol import (
    FIELDS,
    ChatBody,
    Common,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    ResponseBody,
    TokenizeBody,
)
from tutti.serve.server.responses import ResponseAnswer, turns
from tutti.serve.server.service import FAILED, Answers, Draining, Full, Service
from tutti.serve.server.tools import chosen, forced
from tutti.serve.values import EncoderInputs, Json, JsonValue, JsonView

UNBUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # headers of a stream
TEMPLATE = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "tokenizer", "messages"}


@dataclass
class Options:
    """Options of a server.

    model: its name in the API. keys, rate: as for `Access`. body: largest body in bytes. queue: unfinished requests.
    host, hosts: as for `Hosts`, without keys. logprobs: most likely tokens that are reported with a token, at most.
    templates: whether requests may give a chat template, which is a program.
    """

    model: str
    keys: Sequence[str] = ()
    rate: float = 0
    body: int = 4 << 20
    queue: int = 256
    adapters: Sequence[str] = field(default_factory=tuple)
    host: str = "127.0.0.1"
    hosts: Sequence[str] = ()
    logprobs: int = 20
    templates: bool = False


def application(engine: Serving, options: Options) -> FastAPI:
    """The application that serves an engine. It starts the engine's thread, and drains it when it ends."""
    metrics = Metrics()
    service = Service(engine, options.queue, metrics.observe)
    server = Server(engine, service, metrics, options)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        await asyncio.to_thread(server.warm_up)
        yield
        await service.drain()
        await asyncio.to_thread(service.stop)
        server.prompts.stop()

    app = FastAPI(title="Tutti", lifespan=lifespan, docs_url="/docs", redoc_url=None)
    app.add_middleware(BodyLimit, most=options.body)
    if not options.keys:
        app.add_middleware(Hosts, bound=options.host, allowed=options.hosts)
    for kind in (Refused, RequestValidationError, ValueError, Full, Draining, Exception):
        app.add_exception_handler(kind, server.fail)
    app.add_exception_handler(HTTPException, server.fail_http)
    app.add_api_route("/", server.page, methods=["GET"], response_class=HTMLResponse)
    app.add_api_route("/live", server.live, methods=["GET"])
    app.add_api_route("/health", server.health, methods=["GET"])
    app.add_api_route("/ping", server.ping, methods=["GET"])
    app.add_api_route("/ping", server.ping, methods=["POST"], include_in_schema=False)  # one name is one operation
    app.add_api_route("/version", server.version, methods=["GET"])
    app.add_api_route("/metrics", server.metrics_text, methods=["GET"])
    app.add_api_route("/v1/models", server.models, methods=["GET"])
    app.add_api_route("/v1/models/{name}", server.one_model, methods=["GET"])
    app.add_api_route("/v1/completions", server.completions, methods=["POST"])
    app.add_api_route("/v1/chat/completions", server.chat, methods=["POST"])
    app.add_api_route("/v1/audio/transcriptions", server.transcriptions, methods=["POST"])
    app.add_api_route("/v1/embeddings", server.embeddings, methods=["POST"])
    app.add_api_route("/v1/responses", server.responses, methods=["POST"])
    app.add_api_route("/tokenize", server.tokenize, methods=["POST"])
    app.add_api_route("/detokenize", server.detokenize, methods=["POST"])
    app.state.server = server
    return app


class Server:
    """The routes."""

    def __init__(self, engine: Serving, service: Service, metrics: Metrics, options: Options):
        self.engine, self.service, self.metrics, self.options = engine, service, metrics, options
        first = engine.engines[0]
        self.processor = first.processor
        self.tokenizer, self.spell = first.tokenizer, first.constraints.bytes_of
        self.prompts = Prompts(self.tokenizer, first.longest, options.queue)
        self.access = Access(options.keys, options.rate)
        self.started = int(time.time())

    def warm_up(self) -> None:
        """Begin what takes a second for large vocabularies, so that no request waits for it."""
        with suppress(ValueError):  # there is no tokenizer, or one without constraints
            assert self.engine.constraints.vocabulary
            self.service.compiler.warm_up()

    # -- about the server -----------------------------------------------------------------------------------------

    async def page(self) -> HTMLResponse:
        """The page for people."""
        return HTMLResponse(resources.files("tutti.serve.server").joinpath("page.html").read_text())

    async def live(self) -> Json:
        """What the page draws: the last minute."""
        self.metrics.sample()
        return {"model": self.options.model, "recent": list(self.metrics.recent)}

    async def health(self) -> JSONResponse:
        """200 while requests are served, 503 otherwise."""
        state = "ended" if self.service.ended else "draining" if self.service.draining else "ok"
        return JSONResponse({"status": state}, 200 if state == "ok" else 503)

    async def ping(self) -> Response:
        """The status of `/health`, without a body."""
        return Response(status_code=(await self.health()).status_code)

    async def version(self) -> dict[str, str]:
        """The version of Tutti."""
        return {"version": tutti.__version__}

    async def metrics_text(self) -> PlainTextResponse:
        """Prometheus metrics."""
        return PlainTextResponse(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Json:
        """The names that requests may give as `model`."""
        self.access.check(request)
        names = [self.options.model, *self.options.adapters]
        return {"object": "list", "data": [{"id": x, "object": "model", "created": self.started, "owned_by": "tutti"}
                                           for x in names]}  # fmt: skip

    async def one_model(self, request: Request, name: str) -> Json:
        """One of the names."""
        self._begin(request, name)
        return next(x for x in (await self.models(request))["data"] if x["id"] == name)

    async def fail(self, request: Request, error: Exception) -> JSONResponse:
        """The answer to an error."""
        response = await answer(request, error)
        self.metrics.refused.labels(status=response.status_code).inc()
        return response

    async def fail_http(self, request: Request, error: Exception) -> JSONResponse:
        """The answer to an unknown path or method."""
        assert isinstance(error, HTTPException)
        return await self.fail(request, Refused(error.status_code, f"{request.url.path}: {error.detail}"))

    # -- completions ----------------------------------------------------------------------------------------------

    async def completions(self, request: Request, body: CompletionBody) -> Any:
        """`/v1/completions`"""
        who = self._begin(request, body.model)
        prompt_list, reported = body.prompts(), body.prompt_logprobs
        if body.echo and reported is None:
            body.prompt_logprobs = body.logprobs
        if len(prompt_list) > self.options.queue:
            raise Refused(400, f"{len(prompt_list)} prompts; the server holds {self.options.queue} at once", "prompt")
        if body.stream and body.prompt_logprobs is not None and not body.echo:
            raise Refused(400, "prompt_logprobs are streamed with echo only", "prompt_logprobs")
        scores = body.max_tokens == 0  # a token is computed, and left out
        sampling = await self._sampling(request, body, 1 if scores else body.max_tokens, body.logprobs)
        prompts = [await self._tokens(request, x, "prompt", body, body.max_tokens) for x in prompt_list]
        if "max_tokens" in body.model_fields_set:  # by default, an output is as long as there is room
            self._check_room(max(map(len, prompts)), body.max_tokens, "max_tokens")
        echo = () if not body.echo else prompt_list if body.truncate_prompt_tokens is None else prompts
        reply = TextAnswer(body.model or self.options.model, self.tokenizer, self.spell, body.n,
                          numbers=body.return_tokens_as_token_ids, ids=body.return_token_ids,
                          prompts=reported is not None, echo=echo,
                          logprobs=(sampling.logprobs, sampling.prompt_logprobs) != (None, None))  # fmt: skip
        return await self._answer(request, body, reply, [self._ask(x, sampling, body, *who) for x in prompts], scores)

    async def chat(self, request: Request, body: ChatBody) -> Any:
        """`/v1/chat/completions`"""
        who = self._begin(request, body.model)
        tools, must = chosen(body.tools or [], body.tool_choice)
        if body.top_logprobs is not None and not body.logprobs:
            raise Refused(400, "top_logprobs needs logprobs", "top_logprobs")
        if body.stream and body.prompt_logprobs is not None:
            raise Refused(400, "prompt_logprobs are not streamed", "prompt_logprobs")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        limit, most = body.limit
        names = {**FIELDS, "logprobs": "top_logprobs", "max_tokens": limit}
        messages = chats.shaped(body.messages)
        sampling = await self._sampling(request, body, most, logprobs, forced(tools) if must else None, names)
        more, special = self._template(body), body.add_special_tokens
        prompt, inputs = await self._chat_prompt(request, messages, tools, more, special, body, most)
        self._check_room(len(prompt), most, limit)
        role = "assistant" if body.add_generation_prompt else messages[-1]["role"]
        prefix = "".join(chats.texts(messages[-1])) if body.echo and messages[-1]["role"] == role else ""
        reply = ChatAnswer(body.model or self.options.model, self.tokenizer, self.spell, body.n,
                          numbers=body.return_tokens_as_token_ids, ids=body.return_token_ids,
                          prompts=body.prompt_logprobs is not None, tools=tools, must=must,
                          parallel=body.parallel_tool_calls, legacy=body.functions is not None, role=role,
                          prefix=prefix)  # fmt: skip
        return await self._answer(request, body, reply, [self._ask(prompt, sampling, body, *who, inputs)])

    def _template(self, body: ChatBody) -> Json:
        """Arguments of the chat template. Raises Refused for what requests may not set."""
        self._check_template(body.chat_template_kwargs)
        if body.chat_template is not None and not self.options.templates:
            raise Refused(400, "chat_template is a program, which this server does not run for requests; leave it out, "
                               "or start the server with --trust-request-chat-template", "chat_template")  # fmt: skip
        if (
            body.continue_final_message
            and body.add_generation_prompt
            and "add_generation_prompt" in body.model_fields_set
        ):
            raise Refused(400, "continue_final_message excludes add_generation_prompt", "continue_final_message")
        if body.continue_final_message:
            body.add_generation_prompt = False
        own = {"chat_template": body.chat_template} if body.chat_template is not None else {}
        return {**body.template(), **own, "add_generation_prompt": body.add_generation_prompt,
                "continue_final_message": body.continue_final_message}  # fmt: skip

    def _check_template(self, options: JsonView) -> None:
        """Raise Refused for variables of the chat template that are arguments of its function."""
        if refused := TEMPLATE & options.keys():
            raise Refused(400, f"chat_template_kwargs cannot set {', '.join(sorted(refused))}", "chat_template_kwargs")

    async def _sampling(self, request: Request, body: Common, most: int | None, logprobs: int | None,
                        schema: JsonValue = None, names: Mapping[str, str] = FIELDS) -> Sampling:  # fmt: skip
        """How the tokens of an answer are chosen. names: as for `Common.sampling`."""
        limit = self.options.logprobs
        for name, count in ((names.get("logprobs", "logprobs"), logprobs), ("prompt_logprobs", body.prompt_logprobs),
                            ("logprob_token_ids", len(body.logprob_token_ids))):  # fmt: skip
            if count is not None and count > limit:
                raise Refused(400, f"{name} is {count}; this server reports {limit} (--max-logprobs)", name)
        bad = []
        if len(words := body.bad_words) > BAD // 2:
            raise Refused(400, f"bad_words has {len(words)} texts; at most {BAD // 2} are taken", "bad_words")
        if words:
            bad = await self.prompts.run(request, sum(map(len, words)), lambda: self._bad(words))
        return body.sampling(most, logprobs, schema, bad, names)

    def _bad(self, words: Sequence[str]) -> list[list[int]]:
        """The tokens of words that may not occur: as they begin a text, and after a space if they differ there."""
        bad = []
        for word in words:
            first = self.prompts.encode(word.lstrip(), special=False)
            other = self.prompts.encode(" " + word.lstrip(), special=False)
            if not first:
                raise Refused(400, f"bad_words has {word!r}, which has no tokens", "bad_words")
            bad += [first] if not (other[0] != first[0] and len(other) == len(first)) else [first, other]
        return bad

    async def transcriptions(self, request: Request) -> Any:
        """`/v1/audio/transcriptions`: what a model of speech hears in a WAV file."""
        async with request.form() as form:
            return await self._transcribed(request, form)

    async def _transcribed(self, request: Request, form: FormData) -> Any:
        account, _ = self._begin(request, str(form.get("model") or ""))
        if others := sorted(form.keys() - TRANSCRIPTION.keys()):
            raise unknown(others[0], TRANSCRIPTION)
        file, kind = form.get("file"), form.get("response_format", "json")
        if not isinstance(file, UploadFile):
            raise Refused(400, "file is missing", "file")
        if kind not in ("json", "text"):
            raise Refused(400, f"response_format is {kind!r}; expected json or text", "response_format")
        contents = await file.read()
        prompt, inputs = await self.prompts.run(request, 0, lambda: media.heard(self.processor, *media.sound(contents)))
        sampling = Sampling(temperature=_number(form.get("temperature", "0"), "temperature"))
        ask = Ask(prompt, sampling, account=account, inputs=inputs, id=uuid4().hex)
        output = [x[0] async for x in self._changes(request, self.service.submit([ask]))][-1]
        text = output.text.strip()
        return PlainTextResponse(text) if kind == "text" else {"text": text, "usage": usage([output])}

    def _begin(self, request: Request, model: str) -> tuple[str, str]:
        """Check who asks, and for which model. Returns the account, and the name of an adapter or an empty text."""
        account = self.access.check(request)
        if not model or model == self.options.model:
            return account, ""
        if model in self.options.adapters:
            return account, model
        names = ", ".join([self.options.model, *self.options.adapters])
        raise Refused(404, f"there is no model {model!r}; there is {names}", "model")

    def _ask(self, prompt: list[int], sampling: Sampling, body: Common, account: str, adapter: str,
             inputs: EncoderInputs | None = None) -> Ask:  # fmt: skip
        if body.priority < 0:
            raise Refused(400, f"priority is {body.priority}; it must be at least 0, the first", "priority")
        if body.stream and sampling.best_of and sampling.best_of > sampling.n:
            raise Refused(400, "best_of cannot be streamed", "best_of")
        return Ask(prompt, sampling, priority=body.priority, account=account, user=body.user or "",
                   deadline=body.deadline, adapter=adapter, salt=body.cache_salt, inputs=inputs or {},
                   id=uuid4().hex)  # fmt: skip

    def _check_room(self, prompt: int, most: int | None, name: str) -> None:
        """Raise Refused if a prompt of so many tokens leaves no room for `most`. name: the field that asks for them."""
        if getattr(self.engine.engines[0].config, "is_encoder_decoder", False):
            prompt = 1  # the encoder reads it, and the output begins with a start token
        room = self.prompts.longest - prompt
        if most is not None and most > room > 0:  # the engine refuses a prompt that leaves no room at all
            raise Refused(400, f"{name} is {most}; the prompt has {prompt} tokens, and the engine holds "
                               f"{self.prompts.longest} with the output: ask for at most {room}, or shorten the prompt",
                          name)  # fmt: skip

    async def _tokens(self, request: Request, prompt: str | list[int], name: str, body: JsonValue,
                      most: int | None = None) -> list[int]:  # fmt: skip
        """The tokens of a prompt, truncated as the body says. most: tokens of the output."""
        limit = body.truncate_prompt_tokens
        tokens = await self.prompts.tokens(request, prompt, name, body.add_special_tokens, whole=limit is None)
        return self._truncated(tokens, limit, body.truncation_side, most)

    def _truncated(self, tokens: list[int], limit: int | None, side: str, most: int | None) -> list[int]:
        if limit is None:
            return tokens
        if limit < 1 and limit != -1:
            raise Refused(400, f"truncate_prompt_tokens is {limit}; it must be at least 1, or -1 for as many as fit",
                          "truncate_prompt_tokens")  # fmt: skip
        if limit == -1:  # as many as leave room for the output
            limit = max(1, self.prompts.longest - max(1, most or 1))
        return tokens[-limit:] if side == "left" else tokens[:limit]

    async def _chat_prompt(
        self, request: Request, messages: list[Json], tools: Sequence[BaseModel], more: Json,
        special: bool, body: Common, most: int | None, name: str = "messages",
    ) -> tuple[list[int], Json]:  # fmt: skip
        """The tokens of a chat, and the inputs of its images. messages: as `messages.shaped` returns them."""
        reader = self.processor if getattr(self.processor, "chat_template", None) else self.tokenizer
        if reader is None or not (getattr(reader, "chat_template", None) or "chat_template" in more):
            other = "audio/transcriptions" if hasattr(self.processor, "feature_extractor") else "completions"
            raise Refused(400, f"the model's tokenizer has no chat template; use /v1/{other}", "messages")
        shown = [x.model_dump(exclude_none=True) for x in tools] or None
        whole = body.truncate_prompt_tokens is None

        def prompt() -> tuple[list[int], Json]:
            shaped, images = messages, []
            if reader is self.processor or any(isinstance(x["content"], list) for x in shaped):
                shaped, images = media.messages_with_images(shaped)
            if reader is not self.processor:
                mark = getattr(self.processor, "image_token", "")
                shaped = [{**x, "content": media.in_line(x["content"], mark)} for x in shaped]
            text = reader.apply_chat_template(shaped, tools=shown, tokenize=False, **more)
            if whole:  # a template may leave parts of messages out
                self.prompts.check(text, name)
            if images:
                if not whole:
                    raise ValueError("truncate_prompt_tokens cannot be used with images")
                return media.seen(self.processor, text, images)
            begins = reader is self.processor and media.begins(reader, text)
            return self.prompts.encode(text, special or begins), {}

        try:
            tokens, inputs = await self.prompts.run(request, chats.characters(messages), prompt)
        except (Refused, Full):
            raise
        except ValueError as error:
            raise Refused(400, str(error), name) from error
        except Exception as error:  # a template raises what it likes
            raise Refused(400, f"the chat template refuses these messages: {error}", name) from error
        return self._truncated(tokens, body.truncate_prompt_tokens, body.truncation_side, most), inputs

    async def _answer(self, request: Request, body: Common, reply: TextAnswer | ChatAnswer, asks: list[Ask],
                      scores: bool = False) -> Any:  # fmt: skip
        """The answer, whole or as a stream. scores: whether it is about the prompts only."""
        changes = self._changes(request, self.service.submit(asks))
        if scores:
            changes = _scores(changes)
        if not body.stream:
            last = {}
            async for changed in changes:
                last |= changed
            return reply.whole([last[i] for i in range(len(asks))])
        options = body.stream_options
        events = self._events(changes, reply, bool(options and options.include_usage),
                              bool(options and options.continuous_usage_stats))  # fmt: skip
        first = await anext(events)  # a request that is refused has a status
        return StreamingResponse(_after(first, events), media_type="text/event-stream",
                                 headers=UNBUFFERED)  # fmt: skip

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
        self, changes: AsyncIterator[dict[int, Output]], reply: TextAnswer | ChatAnswer, shown: bool, each: bool
    ) -> AsyncIterator[str]:
        """The events of a stream. shown, each: whether a last event has the usage, and whether each has it so far."""
        last: dict[int, Output] = {}
        sent: dict[int, Sent] = {}
        try:
            async for changed in changes:
                last |= changed
                for i, output in changed.items():
                    for j, completion in enumerate(output.completions):
                        number = i * reply.n + j
                        sent_before = sent.setdefault(number, Sent())
                        for piece in () if sent_before.done else reply.piece(number, output, completion, sent_before):
                            sent_before.begun = True
                            yield event({**piece, "usage": usage([output])} if each else piece)
                        sent_before.done = bool(completion.finish)
            if shown:
                yield event({**reply.frame([]), "usage": usage([last[i] for i in sorted(last)])})
            yield event("[DONE]")
        except Exception as error:
            if not sent:
                raise
            if not (isinstance(error, Refused) and error.status == GONE):
                yield event(body_of(error)[1])

    # -- embeddings and responses ---------------------------------------------------------------------------------

    async def embeddings(self, request: Request, body: EmbeddingBody) -> Json:
        """`/v1/embeddings`: the mean of the last hidden states, of length one."""
        if self._begin(request, body.model)[1]:
            raise Refused(400, "embeddings are those of the model without an adapter", "model")
        inputs: JsonValue = body.input
        texts = [inputs] if isinstance(inputs, str) or (inputs and isinstance(inputs[0], int)) else inputs
        if not texts:
            raise Refused(400, "input is empty", "input")
        if len(texts) > self.options.queue:
            raise Refused(400, f"{len(texts)} inputs; the server takes {self.options.queue} at once", "input")
        tokens = [await self._tokens(request, x, "input", body) for x in texts]
        vectors = [await connected(request, self.service.call(lambda engine, x=x: engine.engines[0].embed([x])[0]))
                 for x in tokens]  # fmt: skip
        if body.dimensions is not None:
            if not 1 <= body.dimensions <= len(vectors[0]):
                raise Refused(
                    400, f"dimensions is {body.dimensions}; it must be from 1 to {len(vectors[0])}", "dimensions"
                )
            vectors = [x[: body.dimensions] / x[: body.dimensions].norm() for x in vectors]
        data = [{"object": "embedding", "index": i, "embedding": _written(x.tolist(), body.encoding_format)}
                for i, x in enumerate(vectors)]  # fmt: skip
        count = sum(map(len, tokens))
        return {"object": "list", "data": data, "model": body.model or self.options.model,
                "usage": {"prompt_tokens": count, "total_tokens": count}}  # fmt: skip

    async def responses(self, request: Request, body: ResponseBody) -> Any:
        """`/v1/responses`: text in, text out."""
        who = self._begin(request, body.model)
        common, effort = body.common(), body.reasoning.effort
        more = {"add_generation_prompt": True, **({} if effort is None else {"reasoning_effort": effort})}
        prompt, inputs = await self._chat_prompt(request, turns(body), (), more, False, common, None, "input")
        self._check_room(len(prompt), body.max_output_tokens, "max_output_tokens")
        names = {**FIELDS, "max_tokens": "max_output_tokens"}
        ask = self._ask(prompt, common.sampling(body.max_output_tokens, None, names=names), common, *who, inputs)
        reply = ResponseAnswer(body, body.model or self.options.model)
        changes = self._changes(request, self.service.submit([ask]))
        if not body.stream:
            return reply.whole([x[0] async for x in changes][-1])
        first = (await anext(changes))[0]
        return StreamingResponse(reply.events(first, changes), media_type="text/event-stream", headers=UNBUFFERED)

    # -- tokens ---------------------------------------------------------------------------------------------------

    async def tokenize(self, request: Request, body: TokenizeBody) -> Json:
        """`/tokenize`: the tokens of a text or of a chat."""
        self._begin(request, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise Refused(400, "give one of prompt and messages", "prompt")
        if body.prompt is not None:
            tokens = await self.prompts.tokens(request, body.prompt, "prompt", body.add_special_tokens is not False)
        else:
            more = {**body.chat_template_kwargs, "add_generation_prompt": body.add_generation_prompt}
            self._check_template(body.chat_template_kwargs)
            messages, special = chats.shaped(body.messages), bool(body.add_special_tokens)
            tokens, _ = await self._chat_prompt(request, messages, body.tools or [], more, special, Common(), None)
        texts = {"token_strs": self.tokenizer.convert_ids_to_tokens(tokens)} if body.return_token_strs else {}
        return {"tokens": tokens, "count": len(tokens), "max_model_len": self.prompts.longest, **texts}

    async def detokenize(self, request: Request, body: DetokenizeBody) -> Json:
        """`/detokenize`: the text of tokens."""
        engine = self.engine.engines[0]
        self._begin(request, body.model)
        tokens = engine.tokens(body.tokens) if body.tokens else []
        return {"prompt": self.tokenizer.decode(tokens, skip_special_tokens=False)}


async def _scores(changes: AsyncIterator[dict[int, Output]]) -> AsyncIterator[dict[int, Output]]:
    """Outputs without what was generated."""
    async for changed in changes:
        yield {i: replace(x, completions=[Completion(finish="length" if y.finish else "") for y in x.completions])
               for i, x in changed.items()}  # fmt: skip


def _number(text: JsonValue, name: str) -> float:
    try:
        return float(text)
    except (TypeError, ValueError) as error:
        raise Refused(400, f"{name} is {text!r}; expected a number", name) from error


def _written(numbers: list[float], encoding: str) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()
    return numbers


async def _after(first: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for x in rest:
        yield x
