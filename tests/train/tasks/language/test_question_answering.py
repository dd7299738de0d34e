import numpy as np
import pytest
from transformers import BertForQuestionAnswering, EvalPrediction

from tiny_models import bert
from tutti.train.tasks import get_task
from tutti.train.tasks.language.question_answering import exact_match, word_f1

CONTEXT = "the red cat sleeps under the big tree in the small house on the river and the blue bird sings"
ROW = {"question": "who sings", "context": CONTEXT,
       "answers": {"text": ["blue bird"], "answer_start": [CONTEXT.index("blue bird")]}}  # fmt: skip
NONE = {**ROW, "answers": {"text": [], "answer_start": []}}
TASK = get_task("question-answering", length=20, stride=6)


def test_windows_overlap_and_point_to_the_answer(tokenizer):
    features = TASK.prepare([ROW], tokenizer)
    assert len(features) > 1 and all(len(f["input_ids"]) <= 20 for f in features)
    seen = sorted({pair for f in features for pair in f["offsets"] if pair})
    assert seen[0][0] == 0 and seen[-1][1] == len(CONTEXT)
    inside = [f for f in features if f["start_positions"]]
    assert inside
    for f in inside:
        ids = f["input_ids"][f["start_positions"] : f["end_positions"] + 1]
        assert tokenizer.decode(ids).strip() == "blue bird"
    shared = set(features[0]["offsets"]) & set(features[1]["offsets"]) - {None}
    assert len(shared) == 6


def test_a_question_without_an_answer_points_to_the_first_token(tokenizer):
    assert {(f["start_positions"], f["end_positions"]) for f in TASK.prepare([NONE], tokenizer)} == {(0, 0)}


def test_answers_from_logits(tokenizer):
    features = TASK.prepare([ROW, NONE], tokenizer)
    start, end = np.zeros((2, len(features), 20))
    for w, f in enumerate(features):
        start[w, f["start_positions"]] = end[w, f["end_positions"]] = 9
    assert [a.strip() for a in TASK.answers_of([ROW, NONE], features, start, end)] == ["blue bird", ""]


def test_scores_of_windows():
    start, end = np.eye(5)[[1, 2]], np.eye(5)[[2, 4]]
    prediction = EvalPrediction(predictions=(start, end), label_ids=(np.array([1, 3]), np.array([2, 4])))
    assert TASK.metrics(prediction) == {"exact": 0.5, "f1": pytest.approx((1 + 2 * 2 / 5) / 2)}


def test_scores_of_texts():
    assert exact_match("The Cat!", ["cat"]) == 1 and exact_match("", []) == 1 and exact_match("x", []) == 0
    assert word_f1("red cat", ["the cat"]) == pytest.approx(2 / 3)


def test_an_answer_that_is_elsewhere_names_the_row(tokenizer):
    wrong = {**ROW, "answers": {"text": ["blue bird"], "answer_start": [3]}}
    with pytest.raises(ValueError, match=r"row 1: the answer 'blue bird' is not at character 3"):
        TASK.check(bert(BertForQuestionAnswering, tokenizer), tokenizer, [ROW, wrong])


def test_a_bert_learns(tokenizer, train):
    rows = [ROW, {**ROW, "question": "who sleeps", "answers": {"text": ["red cat"], "answer_start": [4]}}] * 4
    task = get_task("question-answering", length=32)
    losses = train(task, bert(BertForQuestionAnswering, tokenizer), rows, tokenizer, steps=40)
    assert losses[0] > 2 and sum(losses[-4:]) / 4 < 1.0
