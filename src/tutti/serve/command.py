"""The verbs `tutti serve`, `tutti generate` and `tutti chat`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from tutti.serve.engine import Engine
from tutti.serve.replicas import Replicas
from tutti.serve.request import Request, Sampling


def serve(
    model: Annotated[str, tyro.conf.Positional],
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str = "",
    plan: str = "auto",
    cluster: str = "auto",
    level: Literal["O0", "O1", "O2"] = "O0",
    replicas: int = 1,
    memory: float = 1.0,
    budget: int = 512,
    most: int = 32,
    longest: int | None = None,
    speculate: int = 0,
    keys: tuple[str, ...] = (),
    rate: float = 0,
    queue: int = 256,
    body: int = 4 << 20,
) -> None:
    """Serve a model over HTTP, as the OpenAI API does. Open http://127.0.0.1:8000 to chat with it.

    Args:
        model: Folder of a training run, of a checkpoint, or of a transformers model; or a hub id.
        host: Address to bind to. 0.0.0.0 lets other machines in: set `keys` then.
        port: Port to bind to.
        name: Name of the model in the API. By default the name of its folder.
        plan: How the model is split over devices, such as tp2.
        cluster: The devices, such as cpu:2. By default those of this job.
        level: How steps are compiled.
        replicas: Number of engines in this process.
        memory: GiB of the KV cache, of each engine.
        budget: Tokens computed in a step.
        most: Sequences that run at once.
        longest: Tokens of a sequence, prompt included.
        speculate: Tokens to guess by prompt look-up.
        keys: API keys. Without any, everybody may ask.
        rate: Requests of a key, or an address, in a minute; 0 is no limit.
        queue: Requests that may be unfinished at once; more are answered with 429.
        body: Largest body of a request in bytes.
    """
    import uvicorn

    from tutti.serve.server.app import Options, application

    def make() -> Engine:
        return Engine(model, plan=plan, cluster=cluster, level=level, memory=round(memory * 2**30), budget=budget,
                      most=most, longest=longest, speculate=speculate)  # fmt: skip

    first = make()
    if not first.runner.leads:
        first.runner.follow()
        return
    engine: Any = first if replicas == 1 else Replicas([first, *(make() for _ in range(replicas - 1))])
    first.warm_up(say=print)
    app = application(engine, Options(name or Path(model).name, keys, rate, body, queue))
    print(f"serving {name or Path(model).name} on http://{host}:{port}", flush=True)
    try:
        uvicorn.run(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=60)
    finally:
        first.runner.release(None)


def generate(
    model: Annotated[str, tyro.conf.Positional],
    prompt: str = "def ",
    tokens: int = 200,
    temperature: float = 0.7,
    top_p: float = 1.0,
    n: int = 1,
    seed: int = 0,
    plan: str = "auto",
    cluster: str = "auto",
) -> None:
    """Continue a text with a trained model, and print both.

    Args:
        model: Folder of a run, whose newest checkpoint is used, or of a checkpoint or transformers model.
        prompt: The text to continue.
        tokens: Number of tokens to generate, unless the model ends the text before.
        temperature: Sampling temperature. 0 takes the most likely token.
        top_p: Probability of the tokens that may be drawn together.
        n: Number of continuations.
        seed: Random seed of sampling.
        plan: How the model is split over devices, such as tp2.
        cluster: The devices, such as cpu:2. By default those of this job.
    """
    if not prompt:
        raise ValueError("the prompt is empty; give at least one character to continue")
    engine = Engine(model, plan=plan, cluster=cluster)
    sampling = Sampling(max_tokens=tokens, temperature=temperature, top_p=top_p, n=n, seed=seed)
    (output,) = engine.generate([Request(prompt, sampling)])
    if engine.runner.leads:
        for completion in output.completions:
            print(prompt + completion.text)


def chat(
    model: Annotated[str, tyro.conf.Positional],
    system: str = "",
    tokens: int = 512,
    temperature: float = 0.7,
    plan: str = "auto",
    cluster: str = "auto",
) -> None:
    """Chat with a model in the terminal. An empty line ends it.

    Args:
        model: Folder of a model whose tokenizer has a chat template.
        system: Instructions for the whole chat.
        tokens: Most tokens of an answer.
        temperature: Sampling temperature. 0 takes the most likely token.
        plan: How the model is split over devices, such as tp2.
        cluster: The devices, such as cpu:2.
    """
    engine = Engine(model, plan=plan, cluster=cluster)
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
