import numpy as np
import pytest

from tiny_models import t5
from tutti.train.tasks import get_task
from tutti.train.tasks.draw import composition
from tutti.train.tasks.language.span_corruption import sentinels_of

TEXT = "the red cat sleeps under the big tree in the house"


def test_statistics_of_spans():
    task, counts, firsts = get_task("span-corruption"), [], []
    for sample in range(400):
        starts, lengths = task.spans(np.random.default_rng(sample), 200)
        assert sum(lengths) == 30 and len(lengths) == 10 and min(lengths) >= 1  # 15 % of 200, mean 3
        ends = np.add(starts, lengths)
        assert starts[0] >= 1 and ends[-1] <= 200 and (np.array(starts[1:]) > ends[:-1]).all()
        counts += lengths
        firsts.append(lengths[0])
    assert np.mean(counts) == 3 and abs(np.mean(firsts) - 3) < 0.5  # all places alike
    assert max(counts) > 8


def test_compositions_are_uniform():
    draws = [tuple(composition(np.random.default_rng(i), 4, 2)) for i in range(900)]
    counts = [draws.count(c) for c in ((1, 3), (2, 2), (3, 1))]
    assert sum(counts) == 900 and max(abs(n - 300) for n in counts) < 60


def test_input_and_label_together_are_the_text(tokenizer):
    task = get_task("span-corruption", density=0.5, span=2)
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    inputs, labels = task.corrupted({"input_ids": ids, "sample_index": 5}, tokenizer)
    assert inputs[-1] == labels[-1] == tokenizer.eos_token_id
    sentinels, spans, at = sentinels_of(tokenizer), {}, None
    for token in labels[:-1]:
        if token in sentinels:
            at = token
            spans[at] = []
        else:
            spans[at].append(token)
    assert list(spans) == sentinels[: len(spans)] and spans[at] == []  # in order; the last one ends the label
    restored = [i for token in inputs[:-1] for i in spans.get(token, [token])]
    assert restored == ids


def test_a_tokenizer_without_sentinels_is_an_error():
    from tutti.data.tokenizer import train_tokenizer

    with pytest.raises(ValueError, match=r"no sentinels; tokenizer\.add_tokens\(\[f'<extra_id_\{i\}>'"):
        sentinels_of(train_tokenizer([TEXT], 260))


def test_too_few_sentinels_are_an_error(tokenizer):
    with pytest.raises(ValueError, match=r"20 spans need 21 sentinels, the tokenizer has 8; lower length"):
        get_task("span-corruption", density=0.5, span=1).corrupted({"input_ids": list(range(40))}, tokenizer)


def test_a_t5_learns(tokenizer, train):
    task = get_task("span-corruption", density=0.3, buckets=(16, 24))
    losses = train(task, t5(tokenizer), [{"text": TEXT}] * 40, tokenizer, steps=40, lr=1e-2)
    assert losses[0] > 5 and sum(losses[-4:]) / 4 < 1.5
