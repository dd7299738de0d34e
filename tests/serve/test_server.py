"""The server, driven by the `openai` package."""

from __future__ import annotations

import json
import threading
import time

import httpx
import openai
import pytest
import tiny
import torch
from web import JSON, Running

import tutti
from tutti.serve import Completion, Engine, Output, Request, Sampling
from tutti.serve.server.answers import ChatAnswer, Sent
from tutti.serve.server.app import Options
from tutti.serve.server.metrics import Metrics
from tutti.serve.server.protocol import Tool


def test_completion_equals_the_engine(running):
    completion = running.client().completions.create(model="tiny", prompt="hello", max_tokens=8, temperature=0)
    prompt = tiny.tokenizer()("hello")["input_ids"]
    expected = tiny.greedy(tiny.model(), prompt, 8)
    assert completion.choices[0].text == tiny.tokenizer().decode(expected, skip_special_tokens=True)
    assert completion.usage.prompt_tokens == 5 and completion.usage.completion_tokens == len(expected)
    assert completion.choices[0].finish_reason in ("stop", "length")


def test_streams(running):
    client = running.client()
    whole = client.completions.create(model="tiny", prompt=["ab", "cd"], max_tokens=12, seed=1, n=2)
    texts = [""] * 4
    usage = None
    for event in client.completions.create(model="tiny", prompt=["ab", "cd"], max_tokens=12, seed=1, n=2, stream=True,
                                           stream_options={"include_usage": True}):  # fmt: skip
        for choice in event.choices:
            texts[choice.index] += choice.text
        usage = event.usage or usage
    assert texts == [x.text for x in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_chat_with_logprobs(running):
    client = running.client()
    messages = [{"role": "user", "content": "hi"}]
    completion = client.chat.completions.create(model="tiny", messages=messages, max_tokens=5, logprobs=True,
                                                top_logprobs=3, temperature=0)  # fmt: skip
    logprobs = completion.choices[0].logprobs.content
    assert len(logprobs) == completion.usage.completion_tokens
    assert all(x.logprob == max(y.logprob for y in x.top_logprobs) and len(x.top_logprobs) == 3 for x in logprobs)
    pieces = list(client.chat.completions.create(model="tiny", messages=messages, max_tokens=5, temperature=0,
                                                 stream=True))  # fmt: skip
    assert "".join(x.choices[0].delta.content or "" for x in pieces) == completion.choices[0].message.content
    assert pieces[-1].choices[0].finish_reason == completion.choices[0].finish_reason
    assert pieces[0].choices[0].delta.role == "assistant"


# Four letters, and the end token.
ENDS = {"logit_bias": {"256": 100, "64": 80, "65": 80}, "extra_body": {"min_tokens": 4}, "seed": 3, "max_tokens": 8}


def test_a_streamed_chat_has_the_logprobs_of_the_whole(running):
    create, messages = running.client().chat.completions.create, [{"role": "user", "content": "hi"}]
    asked = dict(model="tiny", messages=messages, logprobs=True, top_logprobs=2, **ENDS)
    choice = create(**asked).choices[0]
    events = [x.choices[0] for x in create(**asked, stream=True)]
    assert choice.finish_reason == "stop" and "</s>" not in choice.message.content
    assert [x.token == "</s>" for x in choice.logprobs.content] == [False] * 4 + [True]
    assert [x for event in events if event.logprobs for x in event.logprobs.content] == choice.logprobs.content


@pytest.mark.parametrize("echo", [False, True])
def test_a_streamed_completion_has_the_logprobs_of_the_whole(running, echo):
    create = running.client().completions.create
    longer = {"max_tokens": 48, "extra_body": {"min_tokens": 40}}  # tokens that are ready together come in one event
    asked = dict(model="tiny", prompt="ab", logprobs=2, echo=echo, **(ENDS | longer))
    choice = create(**asked).choices[0]
    events = [x.choices[0].logprobs for x in create(**asked, stream=True) if x.choices[0].logprobs]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [x for event in events for x in getattr(event, name)] == getattr(choice.logprobs, name)
    assert len(events) > 1 and choice.logprobs.text_offset[-1] == len(choice.text)


def test_tokens_that_are_parts_of_characters(running):
    asked = {"model": "tiny", "max_tokens": 8, "extra_body": {"regex": "\u00e9\u20ac"}}  # of two and of three bytes
    messages = [{"role": "user", "content": "hi"}]
    chat = running.client().chat.completions.create(messages=messages, logprobs=True, **asked).choices[0]
    assert [x.bytes for x in chat.logprobs.content] == [[0xC3], [0xA9], [0xE2], [0x82], [0xAC]]
    completion = running.client().completions.create(prompt="a\u00e9", logprobs=20, echo=True, **asked).choices[0]
    assert completion.text == "a\u00e9\u00e9\u20ac" and completion.logprobs.text_offset == [0, 1, 1, 2, 2, 3, 3, 3]
    assert completion.logprobs.tokens[:3] == ["a", r"\xc3", r"\xa9"]
    assert all(20 <= len(x) <= 21 for x in completion.logprobs.top_logprobs[1:])  # each token has a name of its own


def test_echo_with_log_probabilities(running):
    completion = running.client().completions.create(model="tiny", prompt="hello", max_tokens=2, echo=True, logprobs=1)
    logprobs = completion.choices[0].logprobs
    assert completion.choices[0].text.startswith("hello") and "".join(logprobs.tokens[:5]) == "hello"
    assert logprobs.token_logprobs[0] is None and len(logprobs.token_logprobs) == 7 and logprobs.text_offset[4] == 4
    ids = torch.tensor([tiny.tokenizer()("hello")["input_ids"]])
    with torch.no_grad():
        rows = tiny.model()(ids).logits[0].log_softmax(-1)
    assert logprobs.token_logprobs[1:5] == pytest.approx([float(rows[i, ids[0, i + 1]]) for i in range(4)], abs=1e-4)


def test_lm_eval_runs_on_the_server(running, tmp_path, monkeypatch):
    """A task from a file on disk: the log-likelihoods are those of the model."""
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    monkeypatch.setenv("OPENAI_API_KEY", "none")
    tiny.tokenizer().save_pretrained(tmp_path)
    model = LocalCompletionsAPI(base_url=f"{running.url}/v1/completions", model="tiny", tokenizer=str(tmp_path),
                                tokenizer_backend="huggingface", max_length=200)  # fmt: skip
    pairs = [("the cat", " sat"), ("one two", " three")]
    answers = model.loglikelihood([Instance("loglikelihood", {}, x, 0) for x in pairs])
    for (context, continuation), (logprob, _) in zip(pairs, answers, strict=True):
        ids = torch.tensor([tiny.tokenizer()(context + continuation)["input_ids"]])
        with torch.no_grad():
            rows = tiny.model()(ids).logits[0].log_softmax(-1)
        first = len(tiny.tokenizer()(context)["input_ids"])
        expected = sum(float(rows[i - 1, ids[0, i]]) for i in range(first, ids.shape[1]))
        assert logprob == pytest.approx(expected, abs=1e-3)
    assert lm_eval


def test_json_schema(running):
    schema = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
              "required": ["age"], "additionalProperties": False}  # fmt: skip
    completion = running.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "age?"}], max_tokens=40, seed=0,
        response_format={"type": "json_schema", "json_schema": {"name": "age", "schema": schema}},
    )  # fmt: skip
    assert 0 <= json.loads(completion.choices[0].message.content)["age"] <= 99


TOOL = {"type": "function", "function": {
    "name": "weather", "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
        "additionalProperties": False}}}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_tools(running, stream):
    completion = running.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "weather?"}], tools=[TOOL], tool_choice="required",
        max_tokens=80, seed=0, stream=stream,
    )  # fmt: skip
    if stream:
        choices = [x.choices[0] for x in completion]
        calls = [x for choice in choices for x in choice.delta.tool_calls or []]
        reason, name = choices[-1].finish_reason, calls[0].function.name
        arguments = "".join(x.function.arguments for x in calls)
        assert len(calls) > 2 and all(x.index == 0 and x.function.name is None for x in calls[1:])
    else:
        (call,), reason = completion.choices[0].message.tool_calls, completion.choices[0].finish_reason
        name, arguments = call.function.name, call.function.arguments
    assert reason == "tool_calls" and name == "weather"
    assert json.loads(arguments)["city"] in ("Rome", "Oslo")


def test_a_call_after_text_is_held_back():
    tools, sent = [Tool.model_validate(TOOL)], Sent()
    answer = ChatAnswer("m", tiny.tokenizer(), lambda token: b"", 1, tools=tools)
    text = 'I look. <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    pieces = []
    for n in range(1, len(text) + 1):
        shown = Completion(text=text[:n], finish="stop" if n == len(text) else "")
        for piece in answer.piece(0, Output("", [], [shown]), shown, sent):
            pieces.append(piece["choices"][0])
            sent.begun = True
    assert "".join(x["delta"].get("content", "") for x in pieces) == "I look."
    calls = [x["delta"]["tool_calls"][0] for x in pieces if "tool_calls" in x["delta"]]
    assert calls[0]["function"]["name"] == "weather" and calls[0]["id"] and len(calls) > 5
    assert json.loads("".join(x["function"]["arguments"] for x in calls)) == {"city": "Rome"}
    assert pieces[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("end", ["", "  and wait"])
def test_a_stream_has_the_text_of_the_whole_around_a_call(end):
    """White space at the beginning is part of both."""
    call = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    text, sent, streamed = f"\n\nI look. {call}{end}", Sent(), ""
    answer = ChatAnswer("m", tiny.tokenizer(), lambda token: b"", 1, tools=[Tool.model_validate(TOOL)])
    for n in range(1, len(text) + 1):
        shown = Completion(text=text[:n], finish="stop" if n == len(text) else "")
        for piece in answer.piece(0, Output("", [], [shown]), shown, sent):
            streamed += piece["choices"][0]["delta"].get("content", "")
            sent.begun = True
    whole = answer.whole([Output("", [], [Completion(text=text, finish="stop")])])
    assert streamed == whole["choices"][0]["message"]["content"] == f"\n\nI look.{' ' + end if end else ''}"


def test_metrics_count_each_request_once():
    metrics = Metrics()
    engine = Engine(tiny.model(), plan="single", blocks=64, budget=64, most=8)
    engine.add(Request([1, 2, 3], Sampling(n=3, max_tokens=4, ignore_end=True)))
    while engine.busy:
        metrics.observe(engine, engine.step())
    text = metrics.text().decode()
    assert 'tutti_requests_total{finish="length"} 1.0' in text and "tutti_prompt_tokens_total 3.0" in text
    assert "tutti_generated_tokens_total 12.0" in text and not metrics.counted


def test_stop_text_and_bias(running):
    client, a, b = running.client(), ord("a") - 33, ord("b") - 33  # the byte-level alphabet begins with "!"
    bias = {str(a): 100, str(b): 100}
    completion = client.completions.create(model="tiny", prompt="x", max_tokens=50, logit_bias=bias, stop="ab", seed=1)
    assert set(completion.choices[0].text) <= {"a", "b"} and "ab" not in completion.choices[0].text
    assert completion.choices[0].finish_reason == "stop"


def test_embeddings_and_responses(running):
    client = running.client()
    embeddings = client.embeddings.create(model="tiny", input=["one", "two"])
    assert [len(x.embedding) for x in embeddings.data] == [32, 32]
    assert sum(x * x for x in embeddings.data[0].embedding) == pytest.approx(1, abs=1e-4)
    response = client.responses.create(model="tiny", input="hi", max_output_tokens=6, temperature=0)
    text = "".join(x.delta for x in client.responses.create(model="tiny", input="hi", max_output_tokens=6,
                                                            temperature=0, stream=True)
                   if x.type == "response.output_text.delta")  # fmt: skip
    assert response.output_text == text and response.usage.output_tokens <= 6


@pytest.mark.parametrize(
    "path, body, status, says",
    [
        ("completions", {"prompt": "x", "max_tokens": -1}, 400, "max_tokens"),
        ("completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
        ("completions", {"prompt": "x", "top_p": 1.5}, 400, "top_p"),
        ("completions", {"prompt": "x", "n": 0}, 400, "n"),
        ("completions", {"prompt": "x", "colour": 1}, 400, "colour"),
        ("completions", {"prompt": ""}, 400, "empty"),
        ("completions", {"prompt": []}, 400, "empty"),
        ("completions", {"prompt": [1, 300]}, 400, "300"),
        ("completions", {"prompt": [1, 2**70]}, 400, "vocabulary"),
        ("completions", {"prompt": "x" * 1000}, 400, "256"),
        ("completions", {"prompt": "x" * 30_000}, 413, "larger"),
        ("completions", {"prompt": "\ud800"}, 400, ""),
        ("completions", {"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias"),
        ("completions", {"prompt": "x", "logit_bias": {"999": 1}}, 400, "999"),
        ("completions", {"prompt": "x", "regex": "("}, 400, "regex"),
        ("completions", {"prompt": "x", "grammar": "start: " + "x" * 18_000}, 400, "grammar"),
        ("completions", {"prompt": "x", "n": 129}, 400, "129"),
        ("completions", {"prompt": "x", "stop": ""}, 400, "stop"),
        ("completions", {"prompt": "x", "stop": "y" * 1000}, 400, "stop"),
        ("completions", {"prompt": "x", "top_k": 2**70}, 400, "top_k"),
        ("completions", {"prompt": "x", "logit_bias": {"1": 1e39}}, 400, "logit_bias"),
        ("completions", {"prompt": "x", "priority": -1}, 400, "priority"),
        ("completions", {"prompt": ["x"] * 7}, 400, "7 prompts"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"return_tensors": "np"}},
            400,
            "return_tensors",
        ),
        ("chat/completions", {"messages": [{"role": "user", "content": ["x"]}], "max_completion_tokens": 0}, 400, ""),
        ("embeddings", {"input": "x", "dimensions": -3}, 400, "dimensions"),
        ("completions", {}, 400, "prompt"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": "hi"}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}, 400, "tool"),
        ("chat/completions", {"messages": [{"role": "user"}], "top_logprobs": 3}, 400, "logprobs"),
        ("embeddings", {"input": []}, 400, "empty"),
    ],
)
def test_bad_requests(running, path, body, status, says):
    for stream in (False, True) if path != "embeddings" else (False,):
        more = {"stream": True} if stream else {}
        answer = running.post(f"/v1/{path}", model="tiny", **body, **more)
        assert answer.status_code == status, answer.text
        assert says in answer.json()["error"]["message"]


def test_unknown_model_path_and_malformed_json(running):
    with pytest.raises(openai.NotFoundError, match="there is tiny"):
        running.client().completions.create(model="other", prompt="x")
    assert running.post("/v1/nothing").status_code == 404
    answer = httpx.post(running.url + "/v1/completions", content=b"{", headers=JSON)
    assert answer.status_code == 400 and "JSON" in answer.json()["error"]["message"]


def test_a_client_that_leaves_is_cancelled(running):
    with httpx.stream("POST", running.url + "/v1/completions", timeout=60,
                      json={"model": "tiny", "prompt": "x", "max_tokens": 240, "stream": True, "ignore_eos": True}
                      ) as answer:  # fmt: skip
        next(answer.iter_lines())
    end = time.monotonic() + 5
    while running.engine.busy and time.monotonic() < end:
        time.sleep(0.02)
    assert not running.engine.busy and running.engine.pool.used == 0


def test_a_full_queue_answers_429(running):
    body = {"model": "tiny", "prompt": "x", "max_tokens": 100, "ignore_eos": True}
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: answers.append(running.post("/v1/completions", **body)))
               for _ in range(20)]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statuses = {x.status_code for x in answers}
    assert statuses == {200, 429}
    assert all(int(x.headers["Retry-After"]) >= 1 for x in answers if x.status_code == 429)
    assert running.engine.pool.used == 0


def test_health_models_metrics_and_page(running):
    assert httpx.get(running.url + "/health").json() == {"status": "ok"}
    assert httpx.get(running.url + "/version").json() == {"version": tutti.__version__}
    for ping in (httpx.get, httpx.post):
        assert (ping(running.url + "/ping").status_code, ping(running.url + "/ping").content) == (200, b"")
    assert [x.id for x in running.client().models.list()] == ["tiny"]
    assert running.client().models.retrieve("tiny").id == "tiny"
    running.client().completions.create(model="tiny", prompt="x", max_tokens=4)
    metrics = httpx.get(running.url + "/metrics").text
    assert "tutti_time_to_first_token_seconds_count" in metrics and "tutti_generated_tokens_total" in metrics
    assert "<title>Tutti</title>" in httpx.get(running.url + "/").text
    assert httpx.get(running.url + "/live").json()["model"] == "tiny"


def test_the_account_is_that_of_the_key_and_no_client_raises_its_priority():
    engine = Engine(tiny.model(), tokenizer=tiny.tokenizer(), plan="single", blocks=16, budget=16, most=2)
    seen, add = [], engine.add
    engine.add = lambda request: seen.append(request) or add(request)
    server = Running(engine, Options("tiny", keys=("first", "second")))
    try:
        for key, body in (("first", {"user": "key 1"}), ("second", {"priority": 2})):
            server.client(key).completions.create(model="tiny", prompt="x", max_tokens=1, extra_body=body)
        with pytest.raises(openai.BadRequestError, match="priority"):
            server.client("first").completions.create(model="tiny", prompt="x", extra_body={"priority": -1})
    finally:
        server.stop()
    assert [(x.account, x.user, x.priority) for x in seen] == [("key 0", "key 1", 0), ("key 1", "", 2)]


def test_keys_and_rates():
    engine = Engine(tiny.model(), tokenizer=tiny.tokenizer(), plan="single", blocks=16, budget=16, most=2)
    server = Running(engine, Options("tiny", keys=("secret",), rate=2))
    try:
        with pytest.raises(openai.AuthenticationError):
            server.client("wrong").completions.create(model="tiny", prompt="x", max_tokens=1)
        client = server.client("secret")
        for _ in range(2):
            client.completions.create(model="tiny", prompt="x", max_tokens=1)
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="tiny", prompt="x", max_tokens=1)
    finally:
        server.stop()
