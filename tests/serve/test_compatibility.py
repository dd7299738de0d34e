"""Requests of clients of OpenAI and vLLM: which fields mean what, which are ignored, and which are refused."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
import tiny
import torch
from openai import omit
from torch.utils._python_dispatch import TorchDispatchMode

from tutti.serve import Completion, Engine, Output, Request, Sampling
from tutti.serve.engine.sampling import Row, adjusted, report
from tutti.serve.engine.text import Text
from tutti.serve.server import fields
from tutti.serve.server.answers import ChatAnswer, Sent
from tutti.serve.server.messages import shaped
from tutti.serve.server.protocol import ChatBody, Common, CompletionBody, EmbeddingBody, ResponseBody, Tool
from tutti.serve.server.responses import ResponseAnswer
from tutti.serve.server.tools import Calls, chosen, forced

USER = {"role": "user", "content": "hi"}


def number(letter: str) -> int:
    return tiny.tokenizer()(letter)["input_ids"][0]


def complete(running, **body: Any) -> dict[str, Any]:
    """The first choice of a completion."""
    answer = running.post("/v1/completions", **{"prompt": "hi", "max_tokens": 4, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def chat(running, **body: Any) -> dict[str, Any]:
    answer = running.post("/v1/chat/completions", **{"messages": [USER], "max_tokens": 4, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def events(running, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = running.post(f"/v1/{path}", stream=True, **body)
    assert answer.status_code == 200, answer.text
    lines = [x.removeprefix("data: ") for x in answer.text.split("\n\n") if x]
    assert lines.pop() == "[DONE]"
    return [json.loads(x) for x in lines]


def refusal(running, path: str, **body: Any) -> str:
    answer = running.post(f"/v1/{path}", **body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"]


# -- nulls, ignored and refused fields --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, path", [(CompletionBody, "completions"), (ChatBody, "chat/completions"),
                                        (EmbeddingBody, "embeddings"), (ResponseBody, "responses")])  # fmt: skip
def test_a_null_is_the_default(running, kind, path):
    needed = {"completions": {"prompt": "hi"}, "chat/completions": {"messages": [USER]}}.get(path, {"input": "hi"})
    names = [x for x in kind.model_fields if x not in needed and "max" not in x]
    nulls = {x: None for x in [*names, *fields.IGNORED, *kind.absent] if x not in needed}
    short = {} if path == "embeddings" else {{"responses": "max_output_tokens"}.get(path, "max_tokens"): 3}
    assert running.post(f"/v1/{path}", **needed, **short, **nulls).status_code == 200
    assert vars(kind.model_validate(needed | nulls)) == vars(kind.model_validate(needed))


def test_ignored_fields_are_logged_once_each(running, caplog, monkeypatch):
    monkeypatch.setattr(fields, "_noted", set())
    plain = complete(running)
    with caplog.at_level(logging.WARNING, "tutti.serve"):
        for _ in range(2):
            assert complete(running, **dict.fromkeys(fields.IGNORED, "x")) == plain
    assert sorted(x.args[0] for x in caplog.records) == sorted(fields.IGNORED)
    assert {"prompt_cache_key", "safety_identifier", "verbosity", "store", "metadata", "service_tier",
            "request_id"} <= fields.IGNORED  # fmt: skip


@pytest.mark.parametrize("name", sorted(fields.REFUSED))
def test_a_refused_field_names_its_remedy(running, name):
    nothing, remedy = fields.REFUSED[name]
    assert refusal(running, "completions", prompt="x", **{name: "other"}) == f"{name} is not supported: {remedy}"
    complete(running, **{name: nothing})


@pytest.mark.parametrize(
    "body, says",
    [
        ({"stream_options": {"include_usage": True}}, "stream_options needs stream"),
        ({"length_penalty": 0.5}, "needs use_beam_search"),
        ({"use_beam_search": True, "stream": True}, "cannot be streamed"),
        ({"use_beam_search": True, "stop": "a", "n": 2}, "beam search"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"logprobs": 21}, "--max-logprobs"),
        ({"prompt_logprobs": 21}, "--max-logprobs"),
        ({"stream": True, "prompt_logprobs": 1}, "echo"),
        ({"truncate_prompt_tokens": 0}, "at least 1"),
        ({"bad_words": [""]}, "no tokens"),
        ({"bad_words": ["a"] * 600}, "at most 512"),
        ({"allowed_token_ids": []}, "empty"),
        ({"allowed_token_ids": [257]}, "257"),
        ({"logprob_token_ids": [-1]}, "-1"),
        ({"top_k": -2}, "top_k"),
        ({"deadline": 0}, "deadline"),
        ({"regex": "a", "guided_json": {}}, "regex and guided_json exclude one another"),
        ({"guided_json": "{"}, "guided_json is not JSON"),
        ({"guided_choice": []}, "guided_choice is empty"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice exclude one another"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag is not supported"),
        ({"response_format": {"type": "json_schema"}}, "json_schema.schema"),
    ],
)
def test_what_contradicts_itself_is_refused(running, body, says):
    assert says in refusal(running, "completions", prompt="hi", **body)


# -- fields of vLLM ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body, texts",
    [
        ({"guided_regex": "[ab]c"}, {"ac", "bc"}),
        ({"structured_outputs": {"regex": "[ab]c"}}, {"ac", "bc"}),
        ({"guided_choice": ['a"b', "c\u00e9"]}, {'a"b', "c\u00e9"}),
        ({"structured_outputs": {"choice": ["x", "y"]}}, {"x", "y"}),
        ({"guided_grammar": 'start: "p" | "q"'}, {"p", "q"}),
        ({"structured_outputs": {"grammar": 'root ::= "p" | "q"'}}, {"p", "q"}),
        ({"guided_json": {"enum": [1, 2]}}, {"1", "2"}),
        ({"guided_json": '{"enum": [1, 2]}'}, {"1", "2"}),
        ({"structured_outputs": {"json": {"const": 3}}}, {"3"}),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 4}}}}, {"4"}),
        ({"guided_json_object": True, "logit_bias": {str(number("}")): 100}}, {"{}"}),
        ({"structured_outputs": {"json_object": True}, "logit_bias": {str(number("}")): 100}}, {"{}"}),
    ],
)
def test_constraints_of_vllm(running, body, texts):
    assert complete(running, max_tokens=20, **body)["text"] in texts


def test_allowed_and_bad_words(running):
    a, b = number("a"), number("b")
    assert complete(running, allowed_token_ids=[a])["text"] == "aaaa"
    assert complete(running, allowed_token_ids=[a, b], bad_words=["a"])["text"] == "bbbb"
    text = complete(running, allowed_token_ids=[a, b], bad_words=["ab", "bb", "ba"], max_tokens=8)["text"]
    assert not any(x in text for x in ("ab", "bb", "ba"))


def test_bad_sequences_are_left_out_of_the_output_only():
    logits = torch.zeros(1, 5)
    row = Row(Sampling(bad=[[1, 2], [3]]), prompt=[1], output=[0])
    assert adjusted(logits.clone(), [row])[0].isinf().tolist() == [False, False, False, True, False]
    row = row._replace(output=[0, 1])
    assert adjusted(logits.clone(), [row])[0].isinf().tolist() == [False, False, True, True, False]


def test_ranks_and_named_tokens_in_reports():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    (one,) = report(logits, [2], [1], [[0, 1]])
    assert one.rank == 3 and [x for x, _ in one.top] == [1, 0]
    assert one.top[1][1] == pytest.approx(float(logits.log_softmax(-1)[0, 0]))


def test_stop_texts_and_tokens_that_are_part_of_the_text(running):
    a, b = number("a"), number("b")
    body = {"allowed_token_ids": [a, b], "logit_bias": {str(a): 1}, "bad_words": ["aaa"], "max_tokens": 9}
    assert complete(running, **body, stop="ab")["text"] == "a"
    assert complete(running, **body, stop="ab", include_stop_str_in_output=True)["text"] == "aab"
    assert complete(running, **body, stop_token_ids=[b])["text"] == "aa"
    assert complete(running, **body, stop_token_ids=[b], include_stop_str_in_output=True)["text"] == "aab"
    text = Text(tiny.tokenizer(), (), ("ab", "b"), include=True)
    assert text.add([a, a, b]) and text.text == "aab"


def test_special_tokens_in_the_text(running):
    body = {"logit_bias": {"256": 100}, "ignore_eos": True, "max_tokens": 2}
    assert complete(running, **body)["text"] == ""
    assert complete(running, **body, skip_special_tokens=False)["text"] == "</s></s>"
    assert complete(running, logit_bias={"256": 100}, skip_special_tokens=False)["text"] == ""  # it ends the output


def test_token_ids(running):
    choice = complete(running, return_token_ids=True, logprobs=1, return_tokens_as_token_ids=True)
    assert choice["prompt_token_ids"] == tiny.tokenizer()("hi")["input_ids"] and len(choice["token_ids"]) == 4
    assert choice["logprobs"]["tokens"] == [f"token_id:{x}" for x in choice["token_ids"]]
    for path, body in (("completions", {"prompt": "hi"}), ("chat/completions", {"messages": [USER]})):
        pieces = events(running, path, max_tokens=9, temperature=0, return_token_ids=True, **body)
        whole = running.post(f"/v1/{path}", max_tokens=9, temperature=0, return_token_ids=True, **body).json()
        ids = [y for x in pieces for y in x["choices"][0].get("token_ids") or []]
        assert ids == whole["choices"][0]["token_ids"]
        prompts = [x.get("prompt_token_ids") or x["choices"][0].get("prompt_token_ids") for x in pieces]
        first = whole.get("prompt_token_ids") or whole["choices"][0]["prompt_token_ids"]
        assert [x for x in prompts if x] == [first]


def test_logprobs_of_prompts_and_of_named_tokens(running):
    choice = complete(running, prompt="hello", prompt_logprobs=2, logprob_token_ids=[5, 6])
    assert "prompt_logprobs" not in complete(running, echo=True, logprobs=1)
    first, *rest = choice["prompt_logprobs"]
    ids = torch.tensor([tiny.tokenizer()("hello")["input_ids"]])
    with torch.no_grad():
        rows = tiny.model()(ids).logits[0].log_softmax(-1)
    assert first is None and len(rest) == 4
    for i, logprobs in enumerate(rest):
        token = int(ids[0, i + 1])
        assert logprobs[str(token)]["logprob"] == pytest.approx(float(rows[i, token]), abs=1e-4)
        assert logprobs[str(token)]["rank"] == int((rows[i] > rows[i, token]).sum()) + 1
        assert {1, 2} <= {x["rank"] for x in logprobs.values()} and len(logprobs) in (2, 3)
    names = {tiny.tokenizer().decode([5]), tiny.tokenizer().decode([6])}
    logprobs = choice["logprobs"]
    assert all(set(x) == names | {y} for x, y in zip(logprobs["top_logprobs"], logprobs["tokens"], strict=True))
    logprobs = complete(running, logprobs=0)["logprobs"]
    pairs = zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
    assert logprobs["top_logprobs"] == [{token: logprob} for token, logprob in pairs], "the token alone"
    answer = running.post("/v1/chat/completions", messages=[USER], max_tokens=1, prompt_logprobs=0).json()
    assert answer["prompt_logprobs"][0] is None and len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


def test_truncated_prompts(running):
    def asked(prompt: str = "abcdef", **body: Any) -> list[int]:
        return complete(running, prompt=prompt, return_token_ids=True, **body)["prompt_token_ids"]

    ids = tiny.tokenizer()("abcdef")["input_ids"]
    assert asked(truncate_prompt_tokens=2) == ids[-2:] and asked(truncate_prompt_tokens=9) == ids
    assert asked(truncate_prompt_tokens=2, truncation_side="right") == ids[:2]
    assert complete(running, prompt="abcdef", truncate_prompt_tokens=2, echo=True)["text"].startswith("ef")
    assert len(asked(prompt="x" * 5000, truncate_prompt_tokens=-1, max_tokens=6)) == 250
    answer = running.post("/v1/chat/completions", messages=[USER], max_tokens=1, truncate_prompt_tokens=3)
    assert answer.json()["usage"]["prompt_tokens"] == 3
    assert (
        running.post("/v1/embeddings", input="x" * 900, truncate_prompt_tokens=7).json()["usage"]["total_tokens"] == 7
    )


def test_a_beam_search_is_that_of_the_engine(running):
    answer = running.post("/v1/completions", prompt="hi", max_tokens=5, use_beam_search=True, n=3, length_penalty=0.5)
    engine = Engine(tiny.model(), tokenizer=tiny.tokenizer(), plan="single", blocks=32, budget=16, most=4)
    sampling = Sampling(max_tokens=5, beams=3, n=3, length_penalty=0.5)
    assert [x["text"] for x in answer.json()["choices"]] == [
        x.text for x in engine.generate(["hi"], sampling)[0].completions
    ]


def test_more_continuations_than_run_at_once(running):
    """They wait, and are those of an engine that runs all of them."""
    body = {"prompt": "hi", "n": 20, "seed": 5, "max_tokens": 3, "return_token_ids": True}
    choices = running.post("/v1/completions", **body).json()["choices"]
    assert [x["index"] for x in choices] == list(range(20)) and running.engine.scheduler.most == 8
    engine = Engine(tiny.model(), tokenizer=tiny.tokenizer(), plan="single", blocks=64, budget=32, most=20)
    sampling = Sampling(n=20, seed=5, max_tokens=3, logprobs=0)
    whole = engine.generate(["hi"], sampling)[0]
    assert [x["token_ids"] for x in choices] == [x.tokens for x in whole.completions]
    small = Engine(tiny.model(), tokenizer=tiny.tokenizer(), plan="single", blocks=64, budget=16, most=3)
    best = Request("hi", Sampling(n=2, best_of=7, seed=5, max_tokens=3))
    assert [x.tokens for x in small.generate([best])[0].completions] == [
        x.tokens for x in engine.generate([Request("hi", best.sampling)])[0].completions
    ]
    assert small.pool.used == 0 and not small.jobs
    output = small.add(Request("hi", sampling))
    small.step()
    small.cancel(output.id)
    assert small.pool.used == 0 and [x.finish for x in output.completions] == ["cancelled"] * 20


def test_prompts_of_another_salt_share_no_blocks(running):
    prompt = "the same beginning of a prompt" * 2
    cached = [running.post("/v1/completions", prompt=prompt, max_tokens=1, cache_salt=x).json()["usage"]
              ["prompt_tokens_details"]["cached_tokens"] for x in ("a", "b", "b")]  # fmt: skip
    assert cached == [0, 0, 48]


def test_tokens_of_texts_and_chats(running):
    ids = tiny.tokenizer()("hi\u00e9")["input_ids"]
    answer = running.post("/tokenize", prompt="hi\u00e9", return_token_strs=True).json()
    assert answer == {"tokens": ids, "count": 4, "max_model_len": 256,
                      "token_strs": tiny.tokenizer().convert_ids_to_tokens(ids)}  # fmt: skip
    assert running.post("/detokenize", tokens=[*ids, 256]).json() == {"prompt": "hi\u00e9</s>"}
    count = running.post("/tokenize", messages=[USER]).json()["count"]
    assert count == running.post("/v1/chat/completions", messages=[USER], max_tokens=1).json()["usage"]["prompt_tokens"]
    for path, body in (("/tokenize", {}), ("/tokenize", {"prompt": "a", "messages": [USER]}),
                       ("/detokenize", {"tokens": [257]}), ("/detokenize", {"tokens": ["a"]})):  # fmt: skip
        assert running.post(path, **body).status_code == 400


# -- prompts of tokens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [[999999], [257], [-1], [], [[]], [[1], []], [""], ["x", ""], [[1], [-1]], [[[1]]],
                                    [1.5], [[1], "x"], ["x", 1], [None], 3])  # fmt: skip
@pytest.mark.parametrize("path, field", [("completions", "prompt"), ("embeddings", "input")])
def test_prompts_that_are_none(running, path, field, prompt):
    assert refusal(running, path, **{field: prompt})


def test_prompts_of_tokens(running):
    whole = [complete(running, prompt=[x])["text"] for x in ([5, 6], [7])]
    choices = running.post("/v1/completions", prompt=[[5, 6], [7]], max_tokens=4, temperature=0).json()["choices"]
    assert [x["text"] for x in choices] == whole


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_shows_special_tokens_of_a_prompt_of_tokens(running, stream):
    body = {"prompt": [256, 0, 256], "echo": True, "max_tokens": 1, "logprobs": 0, "temperature": 0}
    choices = (
        [x["choices"][0] for x in events(running, "completions", **body)] if stream else [complete(running, **body)]
    )
    assert "".join(x["text"] for x in choices).startswith("</s>!</s>")
    logprobs = choices[0]["logprobs"]
    assert logprobs["tokens"][:3] == ["</s>", "!", "</s>"] and logprobs["text_offset"][:4] == [0, 4, 5, 9]
    assert complete(running, prompt="a</s>", echo=True, max_tokens=1)["text"].startswith("a</s>")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_scored_without_output(running, stream):
    body = {"prompt": "hello", "echo": True, "max_tokens": 0, "logprobs": 1, "n": 1}
    if stream:
        (only,) = events(running, "completions", **body)
        choice = only["choices"][0]
    else:
        answer = running.post("/v1/completions", **body).json()
        choice = answer["choices"][0]
        assert answer["usage"]["completion_tokens"] == 0 and answer["usage"]["prompt_tokens"] == 5
    assert choice["text"] == "hello" and choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == 5 and choice["logprobs"]["token_logprobs"][0] is None


# -- chats ------------------------------------------------------------------------------------------------------------


def test_messages_as_templates_read_them():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    (user, first, tool, second) = shaped([
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "r", "refusal": None, "audio": None},
        {"role": "function", "name": "f", "content": "x"},
        {"role": "assistant", "function_call": {"name": "f", "arguments": ""}, "reasoning_content": "s"},
    ])  # fmt: skip
    assert user == {"role": "user", "content": "ab"}
    assert first["content"] == "" and first["reasoning"] == first["reasoning_content"] == "r" and "audio" not in first
    assert first["tool_calls"][0] == {**call, "function": {"name": "f", "arguments": {"a": 1}}}
    assert tool["role"] == "tool" and second["tool_calls"][0]["function"]["arguments"] == {}
    assert second["reasoning"] == "s" and "function_call" not in second


def test_reasoning_documents_and_generation_prompts_reach_the_template(running):
    seen, tokenizer = [], running.app.state.server.tokenizer
    original = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda *x, **more: (seen.append(more), original(*x, **more))[1]
    try:
        chat(running, reasoning_effort="low", documents=[{"title": "a"}], chat_template_kwargs={"thinking": True})
        chat(running, add_generation_prompt=False)
        ends = [USER, {"role": "assistant", "content": "So"}]
        answer = chat(running, messages=ends, continue_final_message=True, echo=True)
    finally:
        del tokenizer.apply_chat_template
    assert seen[0]["reasoning_effort"] == "low" and seen[0]["documents"] == [{"title": "a"}] and seen[0]["thinking"]
    assert [x["add_generation_prompt"] for x in seen] == [True, False, False]
    assert answer["message"]["role"] == "assistant" and answer["message"]["content"].startswith("So")
    assert "excludes" in refusal(running, "chat/completions", messages=ends, continue_final_message=True,
                                 add_generation_prompt=True)  # fmt: skip


def test_templates_of_requests_are_refused_unless_they_are_trusted(running):
    body = {"messages": [USER], "max_tokens": 1, "chat_template": "{{ messages[0].content }}!"}
    assert "--trust-request-chat-template" in refusal(running, "chat/completions", **body)
    options = running.app.state.server.options
    options.templates = True
    try:
        assert running.post("/v1/chat/completions", **body).json()["usage"]["prompt_tokens"] == 3
        assert "refuses" in refusal(running, "chat/completions", **{**body, "chat_template": "{{ x.__class__.y }}"})
    finally:
        options.templates = False


def test_usage_in_each_event(running):
    options = {"include_usage": True, "continuous_usage_stats": True}
    pieces = events(running, "completions", prompt="hi", max_tokens=9, ignore_eos=True, stream_options=options)
    counts = [x["usage"]["completion_tokens"] for x in pieces]
    assert counts == sorted(counts) and counts[-1] == 9 and all(x["usage"]["prompt_tokens"] == 2 for x in pieces)


def test_responses_take_empty_tools_and_formats(running):
    body = {"input": "hi", "max_output_tokens": 9, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True,
            "reasoning": {"effort": "low"}, "truncation": "disabled", "include": [], "store": False}  # fmt: skip
    assert running.post("/v1/responses", **body).status_code == 200
    form = {"format": {"type": "json_schema", "name": "x", "schema": {"const": 7}}}
    answer = running.post("/v1/responses", **body, text=form).json()
    assert answer["output"][0]["content"][0]["text"] == "7" and answer["model"] == "tiny"
    for more, says in (({"tools": [{"type": "function"}]}, "chat/completions"),
                       ({"previous_response_id": "x"}, "as input"),
                       ({"input": [{"type": "reasoning"}]}, "input[0].type")):  # fmt: skip
        assert says in refusal(running, "responses", **{**body, **more})


LIFE = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
ENDS = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]


@pytest.mark.parametrize("form, status", [(omit, "incomplete"), ({"type": "json_schema", "name": "x",
                                                                  "schema": {"const": 7}}, "completed")])  # fmt: skip
def test_the_official_client_follows_a_response(running, form, status):
    body: Any = {"model": "tiny", "input": "hello", "max_output_tokens": 4, "temperature": 0, "text": {"format": form}}
    if form is omit:
        del body["text"]
    client = running.client()
    with client.responses.stream(**body) as stream:
        received: list[Any] = list(stream)
    deltas = [x.delta for x in received if x.type == "response.output_text.delta"]
    kinds = [x.type for x in received]
    assert kinds == [*LIFE, *["response.output_text.delta"] * len(deltas), *ENDS, f"response.{status}"] and deltas
    assert [x.sequence_number for x in received] == list(range(len(received)))
    text = "".join(deltas)
    assert received[-4].text == received[-3].part.text == received[-2].item.content[0].text == text
    last = received[-1].response
    assert last.output_text == text and last.status == last.output[0].status == received[-2].item.status == status
    assert last.output[0].id == received[2].item.id == received[3].item_id and last.usage.output_tokens >= len(deltas)
    assert {x.response.created_at for x in received if hasattr(x, "response")} == {last.created_at}
    for x in client.responses.create(**body, stream=True):  # every field that the client declares is there
        if not hasattr(x, "response"):
            type(x).model_validate(x.to_dict())
    assert client.responses.create(**body).output_text == text


def test_a_response_that_fails_says_so_to_the_end():
    async def changes() -> Any:
        raise ValueError("the cache is gone")
        yield

    async def sent() -> list[dict[str, Any]]:
        answer = ResponseAnswer(ResponseBody.model_validate({"input": "x"}), "tiny")
        pieces = [x async for x in answer.events(Output("", [1], [Completion()]), changes())]
        return [json.loads(x.split("data: ")[1]) for x in pieces]

    error, failed = asyncio.run(sent())[-2:]
    assert (error["type"], error["message"], error["sequence_number"]) == ("error", "the cache is gone", 4)
    assert failed["type"] == "response.failed" and failed["response"]["error"]["message"] == "the cache is gone"


# -- names of fields --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path, body, says",
    [
        ("completions", {"max_token": 3}, "unknown field 'max_token'; did you mean 'max_tokens'?"),
        ("completions", {"topk": 3}, "unknown field 'topk'; did you mean 'top_k'?"),
        ("completions", {"structured_outputs": {"jsn": {}}}, "unknown field 'jsn'; did you mean 'json'?"),
        ("completions", {"stream_options": {"include_usge": True}}, "did you mean 'include_usage'?"),
        ("completions", {"colour": 3}, "unknown field 'colour'"),
        ("chat/completions", {"tools": [{"type": "function", "functoin": {}}]}, "did you mean 'function'?"),
        ("chat/completions", {"tools": [{"function": {"name": "f", "paramters": {}}}]}, "did you mean 'parameters'?"),
        ("responses", {"max_tokens": 3}, "unknown field 'max_tokens'; did you mean 'max_output_tokens'?"),
        ("responses", {"text": {"format": {"type": "json_schema", "shema": {}}}}, "did you mean 'schema'?"),
        ("embeddings", {"dimension": 3}, "unknown field 'dimension'; did you mean 'dimensions'?"),
    ],
)
def test_an_unknown_field_names_the_nearest(running, path, body, says):
    needed = {"completions": {"prompt": "hi"}, "chat/completions": {"messages": [USER]}}.get(path, {"input": "hi"})
    assert refusal(running, path, **needed, **body).endswith(says)


@pytest.mark.parametrize(
    "path, field, value, says",
    [
        ("completions", "logprobs", 50, "logprobs is 50"),
        ("completions", "logprobs", -1, "logprobs is -1"),
        ("chat/completions", "top_logprobs", 50, "top_logprobs is 50"),
        ("chat/completions", "top_logprobs", -1, "top_logprobs is -1"),
        ("completions", "max_tokens", -1, "max_tokens is -1"),
        ("chat/completions", "max_tokens", -1, "max_tokens is -1"),
        ("chat/completions", "max_completion_tokens", -1, "max_completion_tokens is -1"),
        ("responses", "max_output_tokens", -1, "max_output_tokens is -1"),
        ("completions", "allowed_token_ids", [], "allowed_token_ids is empty"),
        ("completions", "max_tokens", 255, "max_tokens is 255; the prompt has 2 tokens, and the engine holds 256 with "
         "the output: ask for at most 254, or shorten the prompt"),
        ("chat/completions", "max_tokens", 256, "max_tokens is 256"),
        ("chat/completions", "max_completion_tokens", 256, "max_completion_tokens is 256"),
        ("responses", "max_output_tokens", 256, "max_output_tokens is 256"),
    ],
)  # fmt: skip
def test_errors_name_the_field_that_was_sent(running, path, field, value, says):
    needed = {"completions": {"prompt": "hi"}, "responses": {"input": "hi"}}.get(path, {"messages": [USER]})
    more = {"logprobs": True} if field == "top_logprobs" else {}
    error = running.post(f"/v1/{path}", **needed, **more, **{field: value}).json()["error"]
    assert error["message"].startswith(says) and error["param"] == field and error["code"] == 400


def test_an_output_may_fill_the_room_that_is_left(running):
    bias = {str(number("a")): 100}
    body = {"prompt": "hi", "logit_bias": bias, "ignore_eos": True}
    assert complete(running, **body, max_tokens=254)["text"] == "a" * 254
    long = complete(running, prompt="x" * 250, logit_bias=bias, max_tokens=None)  # by default, as many as fit
    assert (long["text"], long["finish_reason"]) == ("a" * 6, "length")


def test_a_role_that_no_api_has_is_refused(running):
    says = "messages[0].role is 'robot'; expected one of system, developer, user, assistant, tool, function"
    assert refusal(running, "chat/completions", messages=[{"role": "robot", "content": "hi"}]) == says
    assert "input[0].role is 'robot'" in refusal(running, "responses", input=[{"role": "robot", "content": "hi"}])


@pytest.mark.parametrize("stream", [False, True])
def test_the_logprobs_of_a_prompt_of_one_token(running, stream):
    body = {"prompt": "h", "max_tokens": 0, "echo": True, "logprobs": 1}
    choice = events(running, "completions", **body)[0]["choices"][0] if stream else complete(running, **body)
    assert choice["text"] == "h"
    assert choice["logprobs"] == {"tokens": ["h"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}
    assert complete(running, **{**body, "logprobs": None})["logprobs"] is None


# -- tools ------------------------------------------------------------------------------------------------------------

CITY = {"$defs": {"c": {"enum": ["Rome", "Oslo"]}}, "type": "object", "properties": {"city": {"$ref": "#/$defs/c"}},
        "required": ["city"], "additionalProperties": False}  # fmt: skip


def tool(name: str, parameters: Any = CITY) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


NAMED = {"type": "function", "function": {"name": "f"}}
FORCED = [("required", ["f"]), (NAMED, ["f", "g"]), ("required", ["f", "g"]),
          ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}, ["f", "g"])]  # fmt: skip


def streamed(pieces: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]], str]:
    """Content, calls and finish reason of the events of a chat."""
    content, calls = "", []
    for x in pieces:
        delta = x["choices"][0]["delta"]
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                calls.append(call)
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return content, calls, pieces[-1]["choices"][0]["finish_reason"]


@pytest.mark.parametrize("choice, names", FORCED)
@pytest.mark.parametrize("most", [120, 33, 20, 3])
def test_forced_calls_with_definitions(running, choice, names, most):
    """Whole or in pieces, complete or cut."""
    body = {"messages": [USER], "tools": [tool(x) for x in names], "tool_choice": choice, "seed": 1, "max_tokens": most}
    answer = running.post("/v1/chat/completions", **body).json()["choices"][0]
    content, calls, reason = streamed(events(running, "chat/completions", **body))
    message = answer["message"]
    whole = message.get("tool_calls", [])
    assert [x["function"] for x in calls] == [x["function"] for x in whole] and reason == answer["finish_reason"]
    assert content == (message["content"] or "")
    if most == 120:
        assert reason == "tool_calls" and json.loads(whole[0]["function"]["arguments"])["city"] in ("Rome", "Oslo")
    elif most > 3 or choice != "required" or names == ["f"]:
        assert reason == "length" and whole[0]["function"]["name"] in names
        assert whole[0]["function"]["arguments"] == ('{"city":"' if most == 33 else "")


def test_a_tool_that_must_not_be_called(running):
    body = {"tools": [tool("f")], "tool_choice": "none"}
    assert "tool_calls" not in chat(running, **body)["message"]
    for choice, says in (({"type": "function", "function": {"name": "h"}}, "'h'"), ("all", "expected auto"),
                         ({"function": None}, "None"), ({"type": "allowed_tools"}, "needs tools")):  # fmt: skip
        assert says in refusal(running, "chat/completions", messages=[USER], tools=[tool("f")], tool_choice=choice)


@pytest.mark.parametrize("stream", [False, True])
def test_functions_are_tools_of_old(running, stream):
    body = {"messages": [USER], "functions": [tool("f")["function"]], "function_call": {"name": "f"}, "max_tokens": 80}
    if stream:
        pieces = [x["choices"][0] for x in events(running, "chat/completions", **body)]
        parts = [x["delta"]["function_call"] for x in pieces if "function_call" in x["delta"]]
        call = {"name": parts[0]["name"], "arguments": "".join(x["arguments"] for x in parts)}
        reason = pieces[-1]["finish_reason"]
    else:
        choice = running.post("/v1/chat/completions", **body).json()["choices"][0]
        call, reason = choice["message"]["function_call"], choice["finish_reason"]
    assert reason == "function_call" and call["name"] == "f" and json.loads(call["arguments"])["city"]
    assert "exclude" in refusal(running, "chat/completions", **body, tools=[tool("g")])


@pytest.mark.parametrize(
    "text, content, calls, complete",
    [
        ('{"name": "f", "arguments": {"a": "}\\"{"}}', "", [("f", '{"a": "}\\"{"}')], True),
        ('{"name": "f", "arguments": {"a": [1, {"b', "", [("f", '{"a": [1, {"b')], False),
        ('{"arguments": {"a": 1}, "name": "f"}', "", [("f", '{"a": 1}')], True),
        ('{"name": "h", "arguments": {}}', '{"name": "h", "arguments": {}}', [], True),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', "", [("f", '{"a": 1}')], True),
        ('Yes. <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "Yes.", [("f", '{"a": 1}')], True),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "g", "arguments": {"b": 2}}'
         "</tool_call>", "", [("f", "{}"), ("g", '{"b": 2}')], True),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call> <tool_call>{"name": "g", "arguments": {"b"', "",
         [("f", "{}"), ("g", '{"b"')], False),
        ('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', "", [("f", '{"a": 1}')], True),
        ("{ is a brace", "{ is a brace", [], True),
        ('<tool_call>{"name": "\\x", "arguments": {', '<tool_call>{"name": "\\x", "arguments": {', [], True),
    ],
)  # fmt: skip
def test_calls_are_found_as_they_grow(text, content, calls, complete):
    """Letter by letter, what is streamed equals what the whole answer has."""
    tools = [Tool.model_validate(tool(x)) for x in "fg"]
    answer, sent, pieces = ChatAnswer("m", tiny.tokenizer(), lambda token: b"", 1, tools=tools), Sent(), []
    for n in range(1, len(text) + 1):
        shown = Completion(text=text[:n], finish="length" if n == len(text) else "")
        for piece in answer.piece(0, Output("", [], [shown]), shown, sent):
            pieces.append(piece)
            sent.begun = True
    streamed_content, streamed_calls, reason = streamed(pieces)
    assert (streamed_content, [(x["function"]["name"], x["function"]["arguments"]) for x in streamed_calls]) == (
        content,
        calls,
    )
    assert reason == ("tool_calls" if calls and complete else "length")
    whole = answer.whole([Output("", [], [Completion(text=text, finish="length")])])["choices"][0]
    assert (whole["message"]["content"] or "") == content and whole["finish_reason"] == reason
    assert [
        (x["function"]["name"], x["function"]["arguments"]) for x in whole["message"].get("tool_calls", ())
    ] == calls


def test_one_call_where_calls_are_not_parallel():
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>'
    tools = [Tool.model_validate(tool(x)) for x in "fg"]
    one = Calls(tools, parallel=False)
    assert one.read(text, last=True) == "" and [x.name for x in one.calls] == ["f"]


def test_references_of_a_tool_stay_its_own():
    parameters = {"properties": {"$ref": {"$ref": "#/$defs/a"}, "b": {"const": {"$ref": "#/x"}}, "c": {"$ref": "#"}}}
    tools, must = chosen([Tool.model_validate(tool(x, parameters)) for x in "fg"], "required")
    second = forced(tools)["anyOf"][1]["properties"]["arguments"]["properties"]
    place = "#/anyOf/1/properties/arguments"
    assert must and second["$ref"] == {"$ref": f"{place}/$defs/a"} and second["c"] == {"$ref": place}
    assert second["b"] == {"const": {"$ref": "#/x"}}
    assert Common.model_validate({}).sampling(None, None, forced(tools[:1])).constraint


class Counting(TorchDispatchMode):
    """Counts operators, and the numbers of what they return."""

    def __init__(self):
        super().__init__()
        self.operators, self.largest = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        self.operators += 1
        self.largest = max(self.largest, output.numel() if isinstance(output, torch.Tensor) else 0)
        return output


def test_many_tokens_of_a_request_cost_few_operators():
    """All requests wait for each step."""
    sampling = Sampling(bad=[[i] for i in range(100)], allowed=[*range(90, 110)] * 5000, logit_bias={105: 2})
    row = Row(sampling, [1], [])
    adjusted(torch.zeros(1, 200), [row])
    with Counting() as counted:
        logits = adjusted(torch.zeros(1, 200), [row])[0]
    assert counted.operators < 20 and counted.largest <= 200
    assert (logits > -1).nonzero().flatten().tolist() == [*range(100, 110)] and float(logits[105]) == 2


def test_ranks_of_many_tokens_cost_few_operators():
    """Each number that is read alone waits for the device."""
    logits = torch.randn(50, 200)
    with Counting() as counted:
        reports = report(logits, [*range(50)], [0] * 50)
    assert counted.operators < 50 * 4
    order = logits.argsort(-1, descending=True).tolist()
    assert [x.rank for x in reports] == [row.index(i) + 1 for i, row in enumerate(order)]
    assert [x.logprob for x in reports] == logits.log_softmax(-1).diagonal().tolist()
