"""The verbs `tutti serve`, `tutti generate` and `tutti chat`."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from tutti.launch.launch import rank
from tutti.launch.progress import progress, told_by
from tutti.serve import media
from tutti.serve.cache.attention import CacheDtype
from tutti.serve.engine.engine import Engine
from tutti.serve.engine.request import Request, Sampling
from tutti.serve.quantize import Quantize
from tutti.serve.values import Json

if TYPE_CHECKING:
    from types import ModuleType

    from starlette.types import ASGIApp

    from tutti.serve.server.router import Worker


def serve(
    model: Annotated[str, tyro.conf.Positional],
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str = "",
    workers: int = 1,
    plan: str = "auto",
    cluster: str = "auto",
    level: Literal["O0", "O1", "O2"] = "O0",
    memory: float = 1.0,
    cache_dtype: CacheDtype = "",
    budget: int = 512,
    most: int = 32,
    longest: int | None = None,
    speculate: int = 0,
    adapters: tuple[str, ...] = (),
    quantize: Quantize = "",
    keys: tuple[str, ...] = (),
    rate: float = 0,
    queue: int = 256,
    body: int = 4 << 20,
    allowed_hosts: tuple[str, ...] = (),
    max_logprobs: int = 20,
    trust_request_chat_template: bool = False,
    self_check: bool = True,
    replicas: tuple[str, ...] = (),
) -> None:
    """Serve a model over HTTP, as the OpenAI API does. Open http://127.0.0.1:8000 to chat with it.

    Args:
        model: Folder of a training run, of a checkpoint, or of a transformers model; or a file in GGUF.
        host: Address to bind to. 0.0.0.0 lets other machines in: give --keys then.
        port: Port to bind to.
        name: Name of the model in the API. By default the name of its folder.
        workers: Processes with an engine each, behind this port. A worker that ends is started again.
        plan: How the model is split over devices, such as tp2.
        cluster: The devices, such as cpu:2. By default those of this job.
        level: How steps are compiled: O0 runs operator by operator, O1 compiles groups of operators, O2 whole layers.
        memory: GiB of the KV cache, of each worker.
        cache_dtype: "int8" rounds keys and values of the cache, which then has room for about twice as many; "int4" for
            more than three times as many, with larger errors.
        budget: Tokens computed in a step.
        most: Sequences that run at once.
        longest: Tokens of a sequence, prompt included.
        speculate: Tokens to guess by prompt look-up.
        adapters: LoRA adapters of peft as name=folder. Requests choose one by giving its name as the model.
        quantize: Round the weights of linear layers to int8 or int4.
        keys: API keys. Without any, everybody may ask.
        rate: Requests of a key, or an address, in a minute; 0 is no limit.
        queue: Requests that a worker may have unfinished at once; more are answered with 429.
        body: Largest body of a request in bytes.
        allowed_hosts: Further names that the server answers to without keys, besides localhost and --host; * is any.
        max_logprobs: Most likely tokens that a request may have reported with each token.
        trust_request_chat_template: Let requests give a chat template, which is a program that the server runs.
        self_check: Compare the engine's logits with those of the model's own forward pass before serving.
        replicas: Servers of the same model that run elsewhere, such as http://node-1:8001: requests are shared out
            among them, and the model is not loaded here.
    """
    arguments = dict(locals())
    import uvicorn

    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            free.bind((host, port))
        except OSError as error:
            raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}") from error

    from tutti.serve.server.app import Options, application
    from tutti.serve.server.limits import Access
    from tutti.serve.server.router import Remote, end_with_the_router, processes, worker_command

    Access(keys, rate)  # checks the keys before the model is loaded
    name = name or Path(model).resolve().name
    if workers > 1 and replicas:
        raise ValueError("--workers are processes here, and --replicas are elsewhere: give one of them")
    if workers > 1 or replicas:
        behind: Sequence[Worker] = [Remote(url) for url in replicas]
        behind = behind or processes(worker_command(arguments_of_worker(arguments)), workers)
        route_to(behind, arguments, f"{name} by {len(behind)} {'replicas' if replicas else 'workers'}")
        return
    end_with_the_router()
    with told_by(_stages()), progress(f"loading {model}"):
        engine = Engine(model, plan=plan, cluster=cluster, level=level, memory=round(memory * 2**30), budget=budget,
                        most=most, longest=longest, speculate=speculate, adapters=dict(map(_pair, adapters)),
                        quantize=quantize, cache_dtype=cache_dtype, self_check=self_check)  # fmt: skip
        if engine.runner.leads:
            engine.warm_up()
    if not engine.runner.leads:
        engine.runner.follow()
        return
    try:
        options = Options(name, keys, rate, body, queue, tuple(dict(map(_pair, adapters))), host, allowed_hosts,
                          max_logprobs, trust_request_chat_template)  # fmt: skip
        _listen(uvicorn, application(engine, options), host, port, name)
    finally:
        engine.runner.release(None)


def arguments_of_worker(arguments: Json) -> list[str]:
    """The arguments of a server behind a router. arguments: those of `serve`."""
    name = arguments["name"] or Path(arguments["model"]).resolve().name
    return [arguments["model"], "--name", name, *_arguments(arguments, OF_ROUTER)]


def arguments_of_router(arguments: Json) -> list[str]:
    """The arguments of a router, to be followed by --replicas."""
    model, name = arguments["model"], arguments["name"] or Path(arguments["model"]).resolve().name
    more = ("host", "port", "keys", "rate", "body", "allowed_hosts")
    return [model, "--name", name, *_arguments({key: arguments[key] for key in more}, ())]


OF_ROUTER = "model", "host", "port", "name", "workers", "rate", "allowed_hosts", "replicas"


def route_to(workers: Sequence[Worker], arguments: Json, what: str) -> None:
    """Serve with workers behind one port, until SIGTERM or Ctrl-C. arguments: those of `serve`."""
    import uvicorn

    from tutti.serve.server.limits import Access
    from tutti.serve.server.router import Router

    access = Access(arguments["keys"], arguments["rate"])
    app = Router(workers, arguments["body"], access, arguments["host"], arguments["allowed_hosts"]).application()
    _listen(uvicorn, app, arguments["host"], arguments["port"], what)


def _stages() -> Callable[[str], None]:
    """Prints a line to stderr when a stage of the start begins, on rank 0. A stage is a text of progress up to a
    colon; it is printed once, however often it comes again."""
    begun: set[str] = set()

    def show(text: str) -> None:
        stage = text.partition(":")[0]
        if stage and stage not in begun and not rank():
            begun.add(stage)
            print(f"tutti serve: {text}", file=sys.stderr, flush=True)

    return show


def _pair(text: str) -> tuple[str, str]:
    name, sign, folder = text.partition("=")
    if not sign:
        raise ValueError(f"adapter {text!r}: expected name=folder")
    return name, folder


def _arguments(arguments: Json, apart: Sequence[str]) -> list[str]:
    """Options as arguments of the command line, except some and those that have their default."""
    words = []
    for key, value in arguments.items():
        if key in apart or value == signature(serve).parameters[key].default:
            continue
        if isinstance(value, bool):
            words += [f"--{key}" if value else f"--no-{key.replace('_', '-')}"]
        elif value not in (None, (), ""):
            words += [f"--{key}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return words


def _listen(uvicorn: ModuleType, app: ASGIApp, host: str, port: int, what: str) -> None:
    """Serve an application until SIGTERM or Ctrl-C; requests that run are finished then."""
    server = uvicorn.Server(uvicorn.Config(app, host=host, port=port, log_level="warning", proxy_headers=False,
                                           timeout_graceful_shutdown=60))  # fmt: skip
    print(f"serving {what} on http://{host}:{port}", flush=True)
    server.run()
    if not server.started:
        raise ValueError(f"cannot listen on {host}:{port}: is another server there?")


def generate(
    model: Annotated[str, tyro.conf.Positional],
    prompt: str = "def ",
    image: tuple[Path, ...] = (),
    sound: Path | None = None,
    tokens: int = 200,
    temperature: float = 0.7,
    top_p: float = 1.0,
    n: int = 1,
    seed: int = 0,
    plan: str = "auto",
    cluster: str = "auto",
    quantize: Quantize = "",
) -> None:
    """Continue a text with a trained model, and print both; or print what an encoder-decoder model makes of it.

    Args:
        model: Folder of a run, whose newest checkpoint is used, or of a checkpoint or transformers model.
        prompt: The text to continue, or the source of an encoder-decoder model.
        image: Images that the prompt is about. A mark in it, such as <image>, says where each one belongs.
        sound: Speech to write down: a WAV file of 16 bits.
        tokens: Number of tokens to generate, unless the model ends the text before.
        temperature: Sampling temperature. 0 takes the most likely token.
        top_p: Probability of the tokens that may be drawn together.
        n: Number of continuations.
        seed: Random seed of sampling.
        plan: How the model is split over devices, such as tp2.
        cluster: The devices, such as cpu:2. By default those of this job.
        quantize: Round the weights of linear layers to int8 or int4.
    """
    if not prompt and not sound:
        raise ValueError("the prompt is empty; give at least one character to continue")
    engine = Engine(model, plan=plan, cluster=cluster, quantize=quantize)
    sampling = Sampling(max_tokens=tokens, temperature=temperature, top_p=top_p, n=n, seed=seed)
    request = Request(prompt, sampling)
    if image:
        request.prompt, request.inputs = media.seen(engine.processor, prompt, media.images(image))
    elif sound:
        request.prompt, request.inputs = media.heard(engine.processor, *media.sound(sound))
    (output,) = engine.generate([request])
    if engine.runner.leads:
        for completion in output.completions:
            print(completion.text if output.source else prompt + completion.text)


def chat(
    model: Annotated[str, tyro.conf.Positional],
    system: str = "",
    tokens: int = 512,
    temperature: float = 0.7,
    plan: str = "auto",
    cluster: str = "auto",
    quantize: Quantize = "",
) -> None:
    """Chat with a model in the terminal. An empty line ends it.

    Args:
        model: Folder of a model whose tokenizer has a chat template.
        system: Instructions for the whole chat.
        tokens: Most tokens of an answer.
        temperature: Sampling temperature. 0 takes the most likely token.
        plan: How the model is split over devices, such as tp2.
        cluster: The devices, such as cpu:2.
        quantize: Round the weights of linear layers to int8 or int4.
    """
    engine = Engine(model, plan=plan, cluster=cluster, quantize=quantize)
    if not getattr(engine.tokenizer, "chat_template", None):
        raise ValueError(f"the tokenizer of {model} has no chat template; use tutti generate")
    turns = [{"role": "system", "content": system}] if system else []
    while text := _read("> "):
        turns.append({"role": "user", "content": text})
        prompt = engine.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
        output = engine.add(Request(prompt, Sampling(max_tokens=tokens, temperature=temperature)))
        printed = ""
        while not output.finished:
            engine.step()
            print(output.text[len(printed) :], end="", flush=True)
            printed = output.text
        print()
        turns.append({"role": "assistant", "content": output.text})


def _read(mark: str) -> str:
    try:
        return input(mark if sys.stdin.isatty() else "")
    except EOFError:
        return ""
