"""Layer skipping: which layers a step leaves out, and what it computes then."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from tutti.train.boost import Boost
from tutti.train.boost.algorithm import NothingToDo, default_loss
from tutti.train.boost.layer_skip import LayerSkip


class Net(nn.Module):
    def __init__(self, layers=4):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator) / 3

    def forward(self, x, layers=None):
        for i in range(len(self.layers)) if layers is None else layers:
            x = self.layers[i](x)
        return x.square().mean()


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(8, 6, generator=generator)} for _ in range(count)]


def test_layers_are_skipped_with_their_probabilities():
    skip = LayerSkip(rate=0.4, patterns=2000)
    skip.prepare_model(Net(), batches(1)[0], default_loss)
    counts = torch.zeros(4)
    for number in range(1000):
        counts[skip.skipped(number)] += 1
    assert (counts / 1000).tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.05)


def test_few_sets_and_a_function_of_the_step():
    skip, again = LayerSkip(rate=0.6, patterns=3, seed=2), LayerSkip(rate=0.6, patterns=3, seed=2)
    for each in (skip, again):
        each.prepare_model(Net(), batches(1)[0], default_loss)
    assert len({tuple(skip.skipped(i)) for i in range(100)}) <= 3
    assert [skip.skipped(i) for i in range(20)] == [again.skipped(i) for i in reversed(range(20))][::-1]


@pytest.mark.parametrize("plan", ["dp", "zero3"])
def test_equals_plain_training_without_the_layers(plan):
    boost = Boost.parse({"layer_skip": {"rate": 0.6, "patterns": 3, "seed": 2}})
    model = boost.prepare_model(Net(), batches(1)[0])
    skip = boost.algorithms["layer_skip"]
    step = boost.make_step(model, torch.optim.AdamW(model.parameters(), lr=0.02), batches(1)[0], cluster="cpu:2",
                           plan=plan, level="O0")  # fmt: skip
    plain = Net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.02)
    for number, batch in enumerate(batches(10)):
        step(batch)
        optimizer.zero_grad()
        plain(**batch, layers=[i for i in range(4) if i not in skip.skipped(number)]).backward()
        optimizer.step()
    for name, exact in plain.state_dict().items():
        torch.testing.assert_close(step.state_dict()[name], exact, rtol=1e-5, atol=1e-6)
    assert any(skip.skipped(i) for i in range(10)) and len(step.recaptures) <= 4
    torch.testing.assert_close(step.evaluate(batches(1)[0]), plain(**batches(1)[0]).detach())


def test_a_transformer():
    config = BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=8,
                        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
    model = BertForSequenceClassification(config)
    batch = {"input_ids": torch.arange(8).reshape(2, 4), "labels": torch.tensor([0, 1])}
    names = list(model.state_dict())
    boost = Boost.parse({"layer_skip": {"rate": 0.9}})
    boost.prepare_model(model, batch)
    assert list(model.state_dict()) == names and len(boost.algorithms["layer_skip"]._layers) == 3
    model.bert.encoder.layer[1].skipped = True
    skipped = model(**batch).loss
    model.bert.encoder.layer[1].skipped = False
    del model.bert.encoder.layer[1]
    torch.testing.assert_close(skipped, model(**batch).loss)


def test_errors():
    with pytest.raises(ValueError, match="rate is 1; it must be at least 0 and less than 1"):
        LayerSkip(rate=1)
    with pytest.raises(NothingToDo, match=r"layer_skip found no nn.ModuleList in Linear"):
        Boost.parse(["layer_skip"]).prepare_model(nn.Linear(2, 2), (torch.ones(1, 2),))
