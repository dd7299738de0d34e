import pytest
import torch

from tutti.models.wide_deep import WideDeep, WideDeepConfig

TINY = {"num_dense": 2, "tables": (10, 6), "crosses": ((0, 1),), "buckets": 50, "embedding_size": 4, "deep": (16, 8)}


def make(**options):
    torch.manual_seed(0)
    return WideDeep(WideDeepConfig(**(TINY | options)))


def batch():
    """Labels are the parity of two categories: no sum of functions of one category tells it."""
    draw = torch.Generator().manual_seed(0)
    categories = torch.stack([torch.randint(n, (512,), generator=draw) for n in TINY["tables"]], 1)
    return {"dense": torch.rand(512, 2, generator=draw), "categories": categories,
            "labels": (categories.sum(1) % 2).float()}  # fmt: skip


def test_parameters():
    """Wide: a weight for each category, bucket and dense feature, and a bias. Deep: embeddings and the MLP."""
    model = make()
    wide, deep = (sum(p.numel() for p in ps) for ps in (model.wide_parameters(), model.deep_parameters()))
    assert wide == 10 + 6 + 50 + 2 + 1
    assert deep == (10 + 6) * 4 + (10 * 16 + 16) + (16 * 8 + 8) + (8 + 1)
    assert wide + deep == sum(p.numel() for p in model.parameters())


def test_crosses_are_told_apart():
    model = make(buckets=10_000)
    every = torch.cartesian_prod(torch.arange(10), torch.arange(6))
    keys = model.crossed(every)
    assert keys.shape == (60, 1) and len(keys.unique()) > 57 and keys.max() < 10_000
    assert torch.equal(keys, model.crossed(every))
    with pytest.raises(ValueError, match=r"the cross \(0, 5\)"):
        make(crosses=((0, 5),))


def test_the_wide_part_learns_what_crosses_tell():
    losses = {}
    for crosses in ((), ((0, 1),)):
        model = make(crosses=crosses, buckets=10_000)
        optimizer = torch.optim.Adagrad(model.wide_parameters(), 1.0)
        for _ in range(60):
            loss = model(**batch()).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[len(crosses)] = loss.item()
    assert losses[1] < 0.1 < 0.5 < losses[0]


def test_plans_do_not_change_losses(trains_alike):
    trains_alike(make(), batch())


def test_saved_models_load(comes_back):
    comes_back(make(), batch(), WideDeep.from_pretrained)
