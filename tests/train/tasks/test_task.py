"""What tasks have in common, by example of classification."""

import datasets
import pytest
from transformers import BertForSequenceClassification

from tiny_models import bert
from tutti.data.rows import Numbered
from tutti.train.tasks import get_task

TASK = get_task("sequence-classification", length=16)
ROWS = [{"text": "the red cat", "label": 0}, {"text": "a dog", "label": 1}]


def test_a_column_that_is_missing_names_the_nearest_and_all(tokenizer):
    rows = [{"texts": "a", "label": 0, "id": 3}]
    with pytest.raises(ValueError, match=r"no column 'text'; the nearest is 'texts'; its columns are texts, label, id"):
        TASK.prepare(rows, tokenizer)


def test_a_column_is_an_option_of_a_call(tokenizer):
    rows = [{"body": "the cat", "label": 1}]
    assert TASK.prepare(rows, tokenizer, text="body")[0]["labels"] == 1


def test_no_rows_are_an_error(tokenizer):
    with pytest.raises(ValueError, match="the dataset is empty"):
        TASK.prepare([], tokenizer)


def test_rows_without_a_length_are_an_error(tokenizer):
    with pytest.raises(ValueError, match=r"generator has no length; tutti\.data\.open_source"):
        TASK.prepare((row for row in ROWS), tokenizer)


def test_a_label_out_of_range_names_the_row(tokenizer):
    rows = [*ROWS, {"text": "bird", "label": 2}]
    with pytest.raises(ValueError, match=r"row 2: label is 2, and the model has 2 classes"):
        TASK.check(bert(BertForSequenceClassification, tokenizer), tokenizer, rows)
    with pytest.raises(ValueError, match=r"row 0: label is 'no'; labels are integers in \[0, 2\)"):
        TASK.check(bert(BertForSequenceClassification, tokenizer), tokenizer, [{"text": "a", "label": "no"}])


def test_a_text_that_is_missing_names_the_row(tokenizer):
    rows = [*ROWS, {"text": None, "label": 0}]
    with pytest.raises(ValueError, match=r"row 2: text is None, not a text; fill it in, or leave the row out"):
        TASK.check(bert(BertForSequenceClassification, tokenizer), tokenizer, rows)


def test_a_dataset_is_checked_by_its_columns(tokenizer):
    rows = datasets.Dataset.from_list([*ROWS, {"text": "bird", "label": 7}])
    with pytest.raises(ValueError, match=r"dataset, row 2: label is 7"):
        TASK.check(bert(BertForSequenceClassification, tokenizer), tokenizer, rows)


def test_another_model_is_an_error_that_names_the_right_class(tokenizer):
    from transformers import BertForMaskedLM

    with pytest.raises(ValueError, match=r"BertForMaskedLM does not fit .*use BertForSequenceClassification"):
        TASK.check(bert(BertForMaskedLM, tokenizer), tokenizer, ROWS)


def test_sequences_longer_than_the_model_are_an_error(tokenizer):
    with pytest.raises(ValueError, match=r"sequences of 40 tokens are longer than the model's 32 positions"):
        TASK.but(length=40).check(bert(BertForSequenceClassification, tokenizer), tokenizer, ROWS)


def test_a_tokenizer_with_more_tokens_than_the_model_is_an_error(tokenizer):
    small = bert(BertForSequenceClassification, tokenizer, vocab_size=100, pad_token_id=0)
    with pytest.raises(ValueError, match=r"the model's embedding 100; call model\.resize_token_embeddings"):
        TASK.check(small, tokenizer, ROWS)


def test_the_sample_index_passes_through_and_stays_out_of_the_batch(tokenizer):
    features = TASK.prepare(Numbered(ROWS), tokenizer)
    assert features[1]["sample_index"] == 1
    assert set(TASK.collator(tokenizer)([features[0], features[1]])) == {
        "input_ids", "token_type_ids", "attention_mask", "labels"
    }  # fmt: skip


def test_batches_are_padded_to_buckets(tokenizer):
    features = TASK.prepare(ROWS, tokenizer)
    batch = TASK.collator(tokenizer, buckets=(12, 16))([features[0], features[1]])
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, 12)
    assert batch["labels"].tolist() == [0, 1]
    assert (batch["input_ids"][:, -3:] == tokenizer.pad_token_id).all() and not batch["attention_mask"][:, -3:].any()
