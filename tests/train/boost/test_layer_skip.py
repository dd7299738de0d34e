"""Layer skipping: which layers a step leaves out, stage by stage, and what it computes then."""

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


def prepared(layers=4, **options):
    skip = LayerSkip(**options)
    skip.prepare_model(Net(layers), batches(1)[0], default_loss)
    return skip


def test_fewer_layers_are_left_out_stage_by_stage():
    """3/4 of 8 layers, in three stages of 20 steps, of 80: 6, 4 and 2, then none."""
    skip = prepared(8, share=0.75, stages=3, until=0.75, steps=80)
    counts = [len(skip.skipped(i)) for i in range(100)]
    assert counts == [6] * 20 + [4] * 20 + [2] * 20 + [0] * 40


def test_the_first_and_the_last_layer_stay():
    skip = prepared(8, share=0.99, patterns=50, steps=300, until=1.0)
    seen = {i for number in range(300) for i in skip.skipped(number)}
    assert seen == set(range(1, 7))


def test_few_sets_and_a_function_of_the_step():
    skip, again = (prepared(30, share=0.5, stages=3, until=0.75, patterns=3, seed=2, steps=100) for _ in range(2))
    sets = [tuple(skip.skipped(i)) for i in range(100)]
    assert [len(set(sets[a:b])) for a, b in ((0, 25), (25, 50), (50, 75), (75, 100))] == [3, 3, 3, 1]
    assert sets[:20] == [tuple(again.skipped(i)) for i in reversed(range(20))][::-1]
    one = prepared(8, stages=3, until=0.75, steps=100)
    nested = [set(one.skipped(i)) for i in (0, 30, 60, 90)]
    assert nested[0] > nested[1] > nested[2] > nested[3] == set(), "a layer that has joined stays"
    assert len({tuple(one.skipped(i)) for i in range(100)}) == 4


def test_layers_that_join_together_are_counted_together():
    """5 of 8 layers are left out at first and 3 later: two join before the other three, and three are always used."""
    skip, model = LayerSkip(steps=100), Net(8)
    skip.prepare_model(model, batches(1)[0], default_loss)
    early, late = set(skip.skipped(0)) - set(skip.skipped(30)), set(skip.skipped(30))
    classes = skip.classes(model)
    assert len(early) == 2 and len(late) == 3
    assert {classes[f"layers.{i}.weight"] for i in early} != {classes[f"layers.{i}.bias"] for i in late}
    assert len(set(classes.values())) == 2 and len(classes) == 2 * (len(early) + len(late))


@pytest.mark.parametrize("plan", ["dp", "zero3"])
def test_equals_plain_training_without_the_layers(plan):
    boost = Boost.parse({"layer_skip": {"share": 0.5, "until": 0.75, "patterns": 2}})
    model = boost.prepare_model(Net(), batches(1)[0], steps=10)
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
    assert [len(skip.skipped(i)) for i in range(10)] == [2] * 4 + [1] * 4 + [0, 0] and len(step.recaptures) <= 4
    torch.testing.assert_close(step.evaluate(batches(1)[0]), plain(**batches(1)[0]).detach())


def test_a_transformer():
    config = BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=8,
                        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
    model = BertForSequenceClassification(config)
    batch = {"input_ids": torch.arange(8).reshape(2, 4), "labels": torch.tensor([0, 1])}
    names = list(model.state_dict())
    boost = Boost.parse(["layer_skip"])
    boost.prepare_model(model, batch, steps=10)
    assert list(model.state_dict()) == names and len(boost.algorithms["layer_skip"]._layers) == 3
    model.bert.encoder.layer[1].skipped = True
    skipped = model(**batch).loss
    model.bert.encoder.layer[1].skipped = False
    del model.bert.encoder.layer[1]
    torch.testing.assert_close(skipped, model(**batch).loss)


def test_errors():
    with pytest.raises(ValueError, match="share is 1; it must be at least 0 and less than 1"):
        LayerSkip(share=1)
    with pytest.raises(ValueError, match="until is 0; it must be more than 0 and at most 1"):
        LayerSkip(until=0)
    with pytest.raises(ValueError, match="patterns=0 and stages=2 must be at least 1"):
        LayerSkip(patterns=0)
    with pytest.raises(NothingToDo, match=r"layer_skip found no nn.ModuleList in Linear"):
        Boost.parse(["layer_skip"]).prepare_model(nn.Linear(2, 2), (torch.ones(1, 2),), steps=1)
    with pytest.raises(NothingToDo, match="layer_skip keeps the first and the last layer, and Net has 2"):
        Boost.parse(["layer_skip"]).prepare_model(Net(2), batches(1)[0], steps=1)
    with pytest.raises(
        NothingToDo, match=r"needs the number of steps of the run, as in prepare_model\(..., steps=1000"
    ):
        Boost.parse(["layer_skip"]).prepare_model(Net(), batches(1)[0])
