import numpy as np
import pytest
from transformers import BertForMaskedLM

from tiny_models import bert
from tutti.data import Numbered, Stream
from tutti.train.tasks import get_task

TEXT = "the red cat sleeps under the big tree in the house"


def test_of_many_tokens_15_percent_are_chosen_80_10_10(tokenizer):
    task = get_task("masked-lm")
    special = np.zeros(200, bool)
    special[[0, -1]] = True
    chosen = masked = unchanged = other = 0
    for sample in range(300):
        before = np.random.default_rng(sample).integers(0, 300, 200)
        feature = {"input_ids": before, "special_tokens_mask": special, "sample_index": sample}
        ids, labels = task.masked(feature, tokenizer)
        at = labels != -100
        assert at.sum() == 30 and not at[[0, -1]].any()  # 15 % of 198
        assert (labels[at] == before[at]).all() and (ids[~at] == before[~at]).all()
        chosen += at.sum()
        masked += (ids[at] == tokenizer.mask_token_id).sum()
        unchanged += (ids[at] == before[at]).sum()
        other += ((ids[at] != before[at]) & (ids[at] != tokenizer.mask_token_id)).sum()
    error = 4 * np.sqrt(0.25 / chosen)
    assert abs(masked / chosen - 0.8) < error and abs(unchanged / chosen - 0.1) < error
    assert abs(other / chosen - 0.1) < error


def test_a_mask_is_a_function_of_seed_and_sample(tokenizer):
    task = get_task("masked-lm", seed=3)
    features = Numbered(task.prepare([{"text": TEXT}] * 4, tokenizer))
    first, second = task.masked(features[0], tokenizer), task.masked(features[1], tokenizer)
    assert not np.array_equal(first[1], second[1])
    collate = task.collator(tokenizer)
    together, alone = collate([features[0], features[1]]), collate([features[1]])
    assert together["input_ids"][1].tolist() == alone["input_ids"][0].tolist()
    assert not np.array_equal(task.but(seed=4).masked(features[0], tokenizer)[1], first[1])


@pytest.mark.starts
def test_masks_do_not_depend_on_parts_workers_or_interruptions(tokenizer):
    task = get_task("masked-lm", seed=1)
    features = task.prepare([{"text": f"{TEXT} {i}"} for i in range(20)], tokenizer)

    def stream(**options):
        return Stream(features, 8, collate=task.collator(tokenizer), **options)

    with stream() as whole:
        expected = [next(whole)["input_ids"] for _ in range(4)]
    with stream(workers=1) as other:
        assert all((next(other)["input_ids"] == ids).all() for ids in expected[:2])
        state = other.state_dict()
    for part in range(2):
        with stream(part=part, parts=2) as half:
            half.load_state_dict(state)
            masked_ids, rows = next(half)["input_ids"], expected[2][4 * part : 4 * part + 4]
            shared = min(masked_ids.shape[1], rows.shape[1])  # each is padded to its longest row
            assert (masked_ids[:, :shared] == rows[:, :shared]).all()


def test_whole_words_are_masked_together(tokenizer):
    task = get_task("masked-lm", whole_word=True, probability=0.4, mask=1.0, random=0.0)
    text = "supercalifragilistic the extraordinary cat"
    feature = task.prepare([{"text": text}], tokenizer)[0]
    words = np.array(feature["word_ids"])
    assert len(words) > len(set(words))
    sizes = []
    for sample in range(50):
        ids, labels = task.masked({**feature, "sample_index": sample}, tokenizer)
        for word in np.unique(words[labels != -100]):
            assert (labels[words == word] != -100).all() and (ids[words == word] == tokenizer.mask_token_id).all()
        sizes.append((labels != -100).sum())
    assert min(sizes) >= 1 and len(set(sizes)) > 1


def test_a_tokenizer_without_a_mask_is_an_error(tokenizer, monkeypatch):
    from tutti.data.tokenizer import train_tokenizer

    plain = train_tokenizer([TEXT], 260)
    with pytest.raises(ValueError, match=r"no mask token; set tokenizer\.mask_token"):
        get_task("masked-lm", length=8).check(bert(BertForMaskedLM, tokenizer), plain, [{"text": TEXT}])


def test_a_bert_learns(tokenizer, train):
    task = get_task("masked-lm", probability=0.3)
    losses = train(task, bert(BertForMaskedLM, tokenizer), [{"text": TEXT}] * 80, tokenizer, steps=40, lr=1e-2)
    assert losses[0] > 5 and sum(losses[-4:]) / 4 < 1.5
