"""Requests that no client should send: each is answered with an error that names what is wrong, and none with 500."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import tiny
from transformers import PreTrainedTokenizerFast
from web import JSON, Running

from tutti import cli
from tutti.serve import Engine
from tutti.serve.server import prompts
from tutti.serve.server.app import Options
from tutti.serve.server.errors import Refused
from tutti.serve.server.hosts import Hosts, name_of
from tutti.serve.server.limits import Access
from tutti.serve.server.prompts import Prompts
from tutti.serve.server.router import Router, processes
from tutti.serve.server.service import Full

USER = {"role": "user", "content": "x"}
ROUTES = {
    "completions": {"prompt": "x", "max_tokens": 1},
    "chat/completions": {"messages": [USER], "max_tokens": 1},
    "embeddings": {"input": "x"},
    "responses": {"input": "x", "max_output_tokens": 1},
    "tokenize": {"prompt": "x"},
    "detokenize": {"tokens": [1]},
}
VALUES: list[Any] = [
    None, True, -1, 2**63, 10**400, 1e308, float("nan"), float("inf"), "", "\ud800", "x" * 3000, "\0", [], [[]], [None],
    [[None]], [-1], [999], [[1], "x"], [1, "x"], [{}], ["", ""], [[[[1]]]], {}, {"a": {"b": []}}, {"type": "text"},
    {"a": float("nan")}, {"type": None, "function": None}, [{"role": "user", "content": [{"type": "text"}]}],
]  # fmt: skip
BODIES = [
    b"", b"{", b"null", b"[]", b"1", b'"x"', b"NaN", b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": "\xed\xa0\x80"}',
    b'{"prompt": ' + b"[" * 9000 + b"]" * 9000 + b"}", b"[" * 19_000, b'{"a":' * 900 + b"1" + b"}" * 900,
    b'{"prompt": ' + b"1" * 9000 + b"}", b'{"prompt": "x", "prompt": [1]}', b'{"\\ud800": 1}', b'{"model": "\\ud800"}',
    b'{"input": ' + b"[" * 150 + b"]" * 150 + b"}", b'{"prompt": [' + b"1.5," * 4000 + b"1]}",
]  # fmt: skip


def field_names(path: str) -> list[str]:
    from tutti.serve.server import protocol

    bodies = {"completions": "CompletionBody", "chat/completions": "ChatBody", "embeddings": "EmbeddingBody",
              "responses": "ResponseBody", "tokenize": "TokenizeBody", "detokenize": "DetokenizeBody"}  # fmt: skip
    return list(getattr(protocol, bodies[path]).model_fields)


def address(path: str) -> str:
    return f"/{path}" if path.endswith("tokenize") else f"/v1/{path}"


def is_error(answer: httpx.Response) -> bool:
    """Whether an answer is a refusal as the API writes them."""
    return 400 <= answer.status_code < 500 and bool(answer.json()["error"]["message"])


def test_every_route_that_takes_a_body_is_tried(running):
    """A new route belongs into ROUTES, or into a test of its own, as uploads of sound have."""
    paths = httpx.get(running.url + "/openapi.json", timeout=60).json()["paths"]
    with_body = {path for path, methods in paths.items() if "post" in methods} - {"/v1/audio/transcriptions"}
    assert with_body == {address(path) for path in ROUTES}


@pytest.mark.parametrize("path", ROUTES)
def test_no_value_of_a_field_is_an_error_of_the_server(running, path):
    with httpx.Client(base_url=running.url, timeout=60) as client:
        for name in field_names(path):
            for i, value in enumerate(VALUES):
                stream = {"stream": True} if i % 2 and "stream" in field_names(path) else {}
                body = {"model": "tiny", **ROUTES[path], **stream, name: value}
                answer = client.post(address(path), content=json.dumps(body), headers=JSON)
                assert answer.status_code == 200 or is_error(answer), (name, repr(value)[:50], answer.text[:300])
                assert len(answer.text) < 60_000 and '"code": 500' not in answer.text


@pytest.mark.parametrize("path", ROUTES)
def test_no_body_is_an_error_of_the_server(running, path):
    with httpx.Client(base_url=running.url, timeout=60) as client:
        for content in BODIES:
            for headers in (JSON, {"Content-Type": "text/plain"}, {"Content-Type": "application/json; charset=utf-16"}):
                answer = client.post(address(path), content=content, headers=headers)
                assert answer.status_code == 200 or is_error(answer), (content[:50], answer.text[:300])


def test_no_path_is_an_error_of_the_server(running):
    for path in (b"/v1/models/%ff", b"/v1/models/%00", b"/v1/models/\xe9", b"/%ed%a0%80", b"//", b"/v1/models/tiny/x",
                 b"/v1/models/%2e%2e%2f", b"/v1/models?a=%ff", b"/v1/models/", b"/v1//models"):  # fmt: skip
        status = int(raw(running.port, b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n").split()[1])
        assert status == 200 or 300 <= status < 500


@pytest.mark.parametrize("content", [b"", b"RIFF", b"RIFF\x24\x00\x00\x00WAVEfmt " + b"\0" * 30, b"\xff" * 2000])
@pytest.mark.parametrize("more", [{}, {"temperature": "nan"}, {"temperature": "x"}, {"response_format": "srt"}])
def test_no_sound_is_an_error_of_the_server(running, content, more):
    answer = httpx.post(running.url + "/v1/audio/transcriptions", data={"model": "tiny", **more},
                        files={"file": ("x.wav", content)}, timeout=60)  # fmt: skip
    assert is_error(answer)
    assert is_error(httpx.post(running.url + "/v1/audio/transcriptions", content=content, headers={
        "Content-Type": "multipart/form-data; boundary=x"}))  # fmt: skip


PARTS = [
    ({"type": "text"}, "text"), ({"type": "text", "text": None}, "text"), ({"type": "text", "text": 3}, "text"),
    ({"type": "image_url"}, "image_url.url"), ({"type": "image_url", "image_url": {}}, "image_url.url"),
    ({"type": "image_url", "image_url": {"url": None}}, "image_url.url"), ({"type": "image_url", "image_url": 1}, ""),
    ({"type": None}, "type"), ({}, "type"), (None, ""), ("x", ""), ([], ""), ({"type": ["text"]}, "type"),
    ({"type": "input_audio", "input_audio": {}}, "type"),
]  # fmt: skip


@pytest.mark.parametrize("part, place", PARTS)
def test_a_malformed_part_is_named(running, part, place):
    content = [{"type": "text", "text": "a"}, part]
    messages = [USER, {"role": "user", "content": content}]
    error = running.post("/v1/chat/completions", messages=messages).json()["error"]
    assert error["code"] == 400 and error["message"].startswith("messages[1].content[1]") and place in error["message"]
    error = running.post("/v1/responses", input=messages).json()["error"]
    assert error["code"] == 400 and "input[1].content[1]" in error["message"]


@pytest.mark.parametrize(
    "message, place",
    [
        (3, "messages[0]"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "user", "content": {"type": "text"}}, "messages[0].content"),
        ({"role": "user", "content": "x", "name": 3}, "messages[0].name"),
        ({"role": "assistant", "tool_calls": 3}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": None}}]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "arguments is not JSON"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}, "arguments"),
        ({"role": "assistant", "function_call": "f"}, "messages[0].tool_calls[0]"),
    ],
)
def test_a_malformed_message_is_named(running, message, place):
    error = running.post("/v1/chat/completions", messages=[message]).json()["error"]
    assert error["code"] == 400 and place in error["message"] and error["param"] == "messages"


# -- keys, hosts and routers ------------------------------------------------------------------------------------------

ODD = [b"Bearer \xe9", "Bearer schl\u00fcssel".encode(), b"\xff\xfe", b"Basic x", b""]


def raw(port: int, head: bytes) -> bytes:
    """The answer to a request as it is written."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(head + b"Connection: close\r\n\r\n")
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def ask(app: Any, headers: list[tuple[bytes, bytes]], path: str = "/v1/models", **more: Any) -> httpx.Response:
    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.request("POST" if more else "GET", path, headers=headers, **more)

    return asyncio.run(main())


@pytest.mark.parametrize("key", ["", " ", "a ", "a\n", "a\0b"])
def test_a_key_that_opens_the_server_or_that_none_can_send_is_refused(key, capsys):
    with pytest.raises(ValueError, match="API key 1 is empty, or has spaces around it or a control character"):
        Access(("good", key))
    assert cli.main(["serve", "nowhere", "--port", "0", "--keys", key]) == 2
    assert "API key 0 is empty" in capsys.readouterr().err


@pytest.mark.parametrize("key", ODD)
def test_an_odd_key_is_401(running, key):
    access, request = Access(("schl\u00fcssel",)), [(b"authorization", key)]
    router = Router(processes([], 2), 1000, access).application()
    expected = 503 if key == ODD[1] else 401  # no worker is ready
    assert ask(router, request).status_code == expected
    head = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: " + key + b"\r\n"
    assert raw(running.port, head).startswith(b"HTTP/1.1 200")  # without keys, none is read


@pytest.fixture
def router(running) -> Router:
    """A router whose worker is the shared server."""
    router = Router(processes([], 1), 20_000, Access())
    worker = router.workers[0]
    worker.port, worker.ready, worker.process = running.port, True, SimpleNamespace(poll=lambda: None)
    return router


def through(router: Router, headers: list[tuple[bytes, bytes]], path: str, content: bytes | None) -> httpx.Response:
    async def main() -> httpx.Response:
        transport, method = httpx.ASGITransport(router.application()), "GET" if content is None else "POST"
        async with httpx.AsyncClient() as to, httpx.AsyncClient(transport=transport, base_url="http://localhost") as by:
            router.client = to
            return await by.request(method, path, headers=headers, content=content)

    return asyncio.run(main())


@pytest.mark.parametrize("key", ODD)
def test_a_router_sends_odd_headers_on(router, key):
    answer = through(router, [(b"authorization", key), (b"x-odd", b"\xe9")], "/v1/models", None)
    assert answer.status_code == 200 and answer.json()["data"][0]["id"] == "tiny"


def test_a_router_answers_no_body_with_500(router):
    for content in BODIES:
        answer = through(router, [(b"content-type", b"application/json")], "/v1/chat/completions", content)
        assert is_error(answer), (content[:50], answer.text[:300])
    assert is_error(through(router, [], "/v1/models/%ff%2e%2e", None))
    assert router.workers[0].load == 0


@pytest.mark.parametrize("host, name", [("localhost", "localhost"), ("LOCALHOST:80", "localhost"), ("[::1]:80", "::1"),
                                        ("::1", "::1"), ("a.example.", "a.example"), ("", "")])  # fmt: skip
def test_names_of_hosts(host, name):
    assert name_of(host) == name


@pytest.mark.parametrize(
    "bound, allowed, host, answers",
    [
        ("127.0.0.1", (), "localhost:8000", True),
        ("127.0.0.1", (), "127.0.0.1:8000", True),
        ("127.0.0.1", (), "[::1]:8000", True),
        ("127.0.0.1", (), "evil.example", False),
        ("127.0.0.1", (), "localhost.evil.example", False),
        ("127.0.0.1", (), "10.0.0.7", False),
        ("127.0.0.1", (), "", False),
        ("127.0.0.1", ("models.example",), "Models.example:443", True),
        ("127.0.0.1", ("*",), "evil.example", True),
        ("10.0.0.7", (), "10.0.0.7:8000", True),
        ("0.0.0.0", (), "10.0.0.7:8000", True),
        ("0.0.0.0", (), "[fe80::1]:8000", True),
        ("::", (), socket.gethostname(), True),
        ("0.0.0.0", (), "evil.example", False),
    ],
)
def test_which_hosts_a_server_answers_to(bound, allowed, host, answers):
    assert Hosts(None, bound, allowed).answers(host) is answers


def test_a_server_without_keys_refuses_other_hosts(running):
    for path in ("/", "/health", "/live", "/metrics", "/v1/models", "/docs", "/nothing"):
        answer = httpx.get(running.url + path, headers={"Host": "evil.example"})
        assert answer.status_code == 400 and "--allowed-hosts" in answer.json()["error"]["message"]
    assert (
        "evil"
        in ask(Router(processes([], 1), 1000, Access()).application(), [(b"host", b"evil.example")], "/health").text
    )
    with_keys = Router(processes([], 1), 1000, Access(("k",))).application()
    assert ask(with_keys, [(b"host", b"any.example")], "/health").json()["status"] == "starting"


# -- long prompts -----------------------------------------------------------------------------------------------------


def test_long_texts_are_refused_before_they_are_tokenized(running, monkeypatch):
    monkeypatch.setattr(Prompts, "encode", lambda *_: pytest.fail("a text was tokenized"))
    long, server = "ab " * 2000, running.app.state.server
    assert server.prompts.characters == 4  # of </s>
    part = {"type": "input_text", "text": long}
    for path, field, value in (("completions", "prompt", long), ("completions", "prompt", ["x" * 5000]),
                               ("chat/completions", "messages", [{"role": "user", "content": long}]),
                               ("embeddings", "input", [long]), ("responses", "input", [{"content": [part]}]),
                               ("responses", "input", long), ("tokenize", "prompt", long)):  # fmt: skip
        error = running.post(address(path), **{field: value}).json()["error"]
        assert error["code"] == 400 and "characters; the 256 tokens" in error["message"], error


def tokenizer(**parts: Any) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with other parts."""
    read = json.loads(tiny.tokenizer().backend_tokenizer.to_str())
    from tokenizers import Tokenizer

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(read | parts)))


SPLIT = {"type": "Split", "pattern": {"String": " "}, "invert": False}
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


@pytest.mark.parametrize(
    "parts, characters",
    [
        ({}, 4),
        ({"normalizer": {"type": "NFC"}}, 16),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}}, 16),
        ({"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}, None),
        ({"normalizer": {"type": "Replace", "pattern": {"String": "ab"}, "content": ""}}, None),
        ({"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "_"}}, 4),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}}, None),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{**SPLIT, "behavior": "Isolated"}, LEVEL]}}, 4),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{**SPLIT, "behavior": "Removed"}, LEVEL]}}, None),
        ({"pre_tokenizer": {"type": "Whitespace"}}, None),
    ],
)
def test_characters_of_a_token(parts, characters):
    """No bound where a token may stand for any number of characters; else no text exceeds it."""
    one = Prompts(tokenizer(**parts), 10, 4)
    assert one.characters == characters
    for text in ("a" * 90, " " * 90, "</s>" * 30, "e\u0301" * 50, "\U0001f600" * 40):
        tokens = one.encode(text, special=False)
        assert tokens == one.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert characters is None or len(text) <= characters * len(tokens)


def test_texts_that_a_token_may_swallow_are_not_refused():
    swallowing = tiny.tokenizer().backend_tokenizer.to_str()
    read = json.loads(swallowing)
    read["added_tokens"][0]["lstrip"] = True
    one = Prompts(tokenizer(added_tokens=read["added_tokens"]), 4, 4)
    one.check(" " * 1000 + "</s>", "prompt")
    assert one.encode(" " * 1000 + "</s>", special=False) == [256]
    with pytest.raises(Refused, match="at most 16"):
        one.check(" " * 1000, "prompt")


class Client:
    """A request whose client leaves when it is told to."""

    left = False

    async def is_disconnected(self) -> bool:
        return self.left


def test_waiting_texts_are_bounded_and_dropped_when_their_client_leaves(monkeypatch):
    monkeypatch.setattr(prompts, "LOOK", 0.01)
    one, go, ran = Prompts(tiny.tokenizer(), 10, 2), threading.Event(), []

    async def main() -> None:
        first, second = Client(), Client()
        long = prompts.LONG + 1
        running = asyncio.create_task(one.run(first, long, lambda: go.wait(60)))
        waiting = asyncio.create_task(one.run(second, long, lambda: ran.append(2)))
        await asyncio.sleep(0.05)
        with pytest.raises(Full):
            await one.run(Client(), long, lambda: ran.append(3))
        assert await one.run(Client(), 1, lambda: "short") == "short"  # it waits for no long one
        second.left = True
        with pytest.raises(Refused, match="has left"):
            await waiting
        go.set()
        assert await running
        await one.run(Client(), long, lambda: ran.append(4))
        with pytest.raises(Full):
            await one.run(Client(), prompts.WAITING + 1, lambda: ran.append(5))

    asyncio.run(main())
    assert ran == [4]


def test_embeddings_keep_the_limit_of_the_queue_and_are_dropped():
    engine = Engine(tiny.model(), tokenizer=tiny.tokenizer(), plan="single", blocks=16, budget=16, most=2)
    server, go, seen = Running(engine, Options("tiny", queue=2)), threading.Event(), []
    engine.embed = lambda texts, embed=engine.embed: (seen.append(texts), go.wait(60), embed(texts))[2]
    try:
        for _ in range(2):  # the first is computed, the second waits; both clients leave
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(server.url + "/v1/embeddings", json={"input": "x"}, timeout=0.3)
        statuses: list[int] = []
        post = lambda: statuses.append(server.post("/v1/embeddings", input="y").status_code)  # noqa: E731
        answers = [threading.Thread(target=post) for _ in range(4)]
        time.sleep(0.3)
        for thread in answers:
            thread.start()
        while len(statuses) < 2:
            time.sleep(0.01)
        go.set()
        for thread in answers:
            thread.join()
        assert sorted(statuses) == [200, 200, 429, 429] and len(seen) == 3
    finally:
        go.set()
        server.stop()
