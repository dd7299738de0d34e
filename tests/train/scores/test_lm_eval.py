import json
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers

from tutti import cli
from tutti.train.scores.harness import Answers, Scorer, harness_model, run_harness

TASK = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {test}, train: {train}}}}}
output_type: multiple_choice
test_split: test
fewshot_split: train
doc_to_text: "{{{{a}}}} + {{{{b}}}} ="
doc_to_target: "{{{{label}}}}"
doc_to_choice: ["1", "2", "3"]
target_delimiter: " "
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(scope="module")
def scorer(causal):
    return Scorer(causal, batch=3)


def plain(folder, context, continuation):
    """log P and greedy of a continuation, token by token, with transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    before, both = tokenizer(context)["input_ids"], tokenizer(context + continuation)["input_ids"]
    if not context:
        before, both = [0], [0, *both]
    with torch.no_grad():
        logprobs = model(torch.tensor([both])).logits[0].log_softmax(-1)
    places = range(len(before), len(both))
    return sum(logprobs[i - 1, both[i]].item() for i in places), all(
        logprobs[i - 1].argmax() == both[i] for i in places
    )


def requests(*args):
    return [SimpleNamespace(args=x) for x in args]


def test_loglikelihoods(scorer, causal):
    pairs = [("the big", " cat sat"), ("the", " dog"), ("", "the cat"), ("the cat sat on the ", "mat"), ("a", "b")]
    answers = Answers(scorer).loglikelihood(requests(*pairs))
    pairs[3] = ("the cat sat on the", " mat")  # spaces belong to the continuation
    for (value, greedy), pair in zip(answers, pairs, strict=True):
        assert (value, greedy) == (pytest.approx(plain(causal, *pair)[0], rel=1e-4), plain(causal, *pair)[1])
    best = Answers(scorer).generate_until(requests(("the", {"until": [], "max_gen_toks": 3})))[0]
    ids = scorer.encode("the")
    continuation = scorer.model.generate(torch.tensor([ids]), max_new_tokens=3, do_sample=False)[0, len(ids) :].tolist()
    assert best and scorer.of_tokens([(ids, continuation)])[0][1] is True


def test_two_virtual_devices_have_the_numbers_of_one(scorer, causal):
    pairs = [("the big", " cat sat"), ("the", " dog"), ("", "the cat")]
    other = Scorer(causal, batch=2, cluster="cpu:2", plan="dp2")
    torch.testing.assert_close(
        [x for x, _ in other.loglikelihoods(pairs)], [x for x, _ in scorer.loglikelihoods(pairs)]
    )


def test_rolling_predicts_each_token_once(scorer, causal):
    text = " ".join(["the cat sat on the mat"] * 12)
    short, long = Answers(scorer).loglikelihood_rolling(requests(("the cat sat",), (text,)))
    assert short == pytest.approx(plain(causal, "", "the cat sat")[0], rel=1e-4)
    ids = [0, *scorer.encode(text)]
    assert len(ids) > 2 * 32
    total = 0.0
    for begin in range(1, len(ids), 32):  # windows of 32 positions
        end = min(begin + 32, len(ids))
        start = max(0, end - 33)
        with torch.no_grad():
            logprobs = scorer.model(torch.tensor([ids[start : end - 1]])).logits[0].log_softmax(-1)
        total += sum(logprobs[i - 1 - start, ids[i]].item() for i in range(begin, end))
    assert long == pytest.approx(total, rel=1e-4)


def test_generation_ends_at_a_stop_text(scorer):
    whole = scorer.continued("the big", tokens=8)
    assert len(whole) > 2
    options = {"until": [whole[2:4], "never"], "max_gen_toks": 8}
    assert Answers(scorer).generate_until(requests(("the big", options))) == [whole[: whole.index(whole[2:4])]]
    assert scorer.continued("the big", tokens=8) == whole
    with pytest.raises(ValueError, match="longer than the model's 32"):
        scorer.of_tokens([([1], [1] * 40)])


def test_lm_eval_runs_tasks_from_disk(causal, tmp_path, monkeypatch, capsys):
    """The same accuracy as choosing the likeliest answer by hand, with examples in front."""
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    train = [{"a": 1, "b": 1, "label": 1}]
    test = [{"a": a, "b": b, "label": a + b - 1} for a in (0, 1, 2) for b in (0, 1) if 1 <= a + b <= 3]
    for name, rows in (("train", train), ("test", test)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "sums.yaml").write_text(TASK.format(test=tmp_path / "test.jsonl", train=tmp_path / "train.jsonl"))
    metrics = run_harness(causal, ["sums"], tasks, few_shot=1)["sums"]
    right = 0
    for row in test:
        context = f"1 + 1 = 2\n\n{row['a']} + {row['b']} ="
        scores = [plain(causal, context, f" {choice}")[0] for choice in (1, 2, 3)]
        right += scores.index(max(scores)) == row["label"]
    assert metrics["acc,none"] == pytest.approx(right / len(test))
    assert cli.main(["eval", str(causal), "--harness", "sums", "--tasks-from", str(tasks), "--few-shot", "1"]) == 0
    assert f"{right / len(test):.4f}" in capsys.readouterr().out


def test_without_lm_eval(scorer, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(ModuleNotFoundError, match=r"no package lm_eval; pip install 'tutti\[eval\]'"):
        harness_model(scorer)
    assert cli.main(["eval", str(scorer.tokenizer.name_or_path), "--harness", "sums"]) == 2
    assert "no package lm_eval; pip install 'tutti[eval]'" in capsys.readouterr().err
