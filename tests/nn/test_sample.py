"""Drawing tokens against the definition, and against the probabilities."""

import pytest
import torch
from torch.library import opcheck

from tutti.nn import sample as module

sample = torch.ops.tutti.sample


def options(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    numbers = [torch.full((rows,), float(x)) for x in (temperature, top_p, min_p)]
    return numbers[0], torch.full((rows,), top_k), *numbers[1:], torch.rand(rows)


CASES = {
    "plain": {}, "cold": dict(temperature=0.1), "hot": dict(temperature=3.0), "greedy": dict(temperature=0),
    "top k": dict(top_k=7), "one": dict(top_k=1), "top k of all": dict(top_k=500), "top p": dict(top_p=0.6),
    "nothing but the first": dict(top_p=0.0), "min p": dict(min_p=0.2),
    "all": dict(temperature=0.8, top_k=40, top_p=0.9, min_p=0.05),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.starts
def test_equals_the_definition(name):
    torch.manual_seed(0)
    for vocabulary in (1, 10, 333):
        logits = 3 * torch.randn(200, vocabulary)
        settings = options(200, **CASES[name])
        assert torch.equal(sample(logits, *settings), module.reference(logits, *settings))


def test_of_equal_logits_the_first_are_kept():
    logits = torch.zeros(300, 50)
    logits[:, 30] = 1
    for settings, allowed in [
        (options(300, top_k=4), {0, 1, 2, 30}),
        (options(300, top_p=0.08), {0, 1, 30}),  # e / (e + 49) = 0.0526, and 0.0193 each
        (options(300, min_p=0.5), {30}),
    ]:
        tokens = sample(logits, *settings)
        assert set(tokens.tolist()) == allowed
        assert torch.equal(tokens, module.reference(logits, *settings))
    assert sample(torch.zeros(1, 50), *options(1, temperature=0)).item() == 0


def test_frequencies_are_probabilities():
    torch.manual_seed(0)
    logits, n = torch.randn(1, 20), 50_000
    frequencies = sample(logits.expand(n, 20), *options(n, temperature=0.7)).bincount(minlength=20) / n
    torch.testing.assert_close(frequencies, (logits[0] / 0.7).softmax(0), atol=0.01, rtol=0)


@pytest.mark.parametrize("settings", [{}, dict(top_k=3), dict(top_p=0.99), dict(temperature=0)], ids=str)
def test_minus_infinity_is_never_drawn(settings):
    torch.manual_seed(0)
    logits = torch.full((500, 40), -torch.inf)
    logits[:, [5, 17]] = torch.randn(500, 2)
    assert set(sample(logits, *options(500, **settings)).tolist()) <= {5, 17}


@pytest.mark.parametrize(
    "settings", [{}, dict(top_k=3), dict(top_p=0.9), dict(min_p=0.1), dict(temperature=0)], ids=str
)
def test_rows_that_are_not_numbers(settings):
    logits = torch.randn(5, 41)
    logits[0] = -torch.inf
    logits[1, 40] = torch.nan
    logits[2] = torch.nan
    logits[3, 39] = torch.inf
    tokens = sample(logits, *options(5, **settings))
    assert tokens[:4].tolist() == [-1, -1, -1, 39] and tokens[4] >= 0
    assert torch.equal(module.reference(logits, *options(5, **settings))[:4], tokens[:4])


def test_rows_have_options_of_their_own():
    torch.manual_seed(0)
    logits = torch.randn(6, 100).bfloat16()
    settings = (torch.tensor([0, 1, 0.5, 1, 2, 1]), torch.tensor([0, 3, 0, 0, 9, 0]),
                torch.tensor([1, 1, 0.5, 1, 0.9, 1]), torch.tensor([0, 0, 0, 0.3, 0, 0]),
                torch.rand(6))  # fmt: skip
    whole = sample(logits, *settings)
    assert torch.equal(whole, module.reference(logits, *settings))
    for i in range(6):
        assert torch.equal(sample(logits[i : i + 1], *(x[i : i + 1] for x in settings)), whole[i : i + 1])
    assert torch.equal(sample(logits.t().contiguous().t(), *settings), whole)


def test_registration():
    opcheck(sample.default, (torch.randn(3, 10), *options(3)))


def test_what_does_not_fit():
    with pytest.raises(ValueError, match=r"logits \(3, 10\) with \(2,\)"):
        sample(torch.randn(3, 10), *options(2))
