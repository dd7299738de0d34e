import torch

from tutti.models.dlrm import CRITEO_KAGGLE, DLRM, DLRMConfig

TINY = {"num_dense": 4, "tables": (40, 20, 8), "embedding_size": 8, "bottom": (16,), "top": (16,)}


def make():
    torch.manual_seed(0)
    return DLRM(DLRMConfig(**TINY))


def batch(several=None):
    draw = torch.Generator().manual_seed(0)
    shape = (8,) if several is None else (8, several)
    categories = torch.stack([torch.randint(n, shape, generator=draw) for n in TINY["tables"]], 1)
    return {"dense": torch.rand(8, 4, generator=draw), "categories": categories,
            "labels": torch.tensor([0.0, 1.0] * 4)}  # fmt: skip


def test_parameters_are_those_of_the_paper():
    """About 540 M (section 5.1 of Naumov et al.), of which 33,762,577 rows x 16 are embeddings."""
    with torch.device("meta"):
        model = DLRM(DLRMConfig())
    mlps = (13 * 512 + 512) + (512 * 256 + 256) + (256 * 64 + 64) + (64 * 16 + 16)
    mlps += ((16 + 27 * 26 // 2) * 512 + 512) + (512 * 256 + 256) + (256 + 1)
    assert sum(CRITEO_KAGGLE) == 33_762_577
    assert sum(p.numel() for p in model.parameters()) == 33_762_577 * 16 + mlps
    assert round((33_762_577 * 16 + mlps) / 1e6) == 541


def test_the_interactions_are_dot_products_of_all_pairs():
    model, inputs = make(), batch()
    seen = {}
    model.top.register_forward_hook(lambda m, x, y: seen.update(x=x[0]))
    outputs = model(**inputs)
    assert outputs.logits.shape == (8,) and seen["x"].shape == (8, 8 + 6)
    vectors = [
        model.bottom(inputs["dense"]),
        *(t.weight[inputs["categories"][:, i]] for i, t in enumerate(model.tables)),
    ]
    pairs = [(vectors[i] * vectors[j]).sum(1) for i in range(4) for j in range(i)]
    torch.testing.assert_close(seen["x"], torch.cat([vectors[0], torch.stack(pairs, 1)], 1))


def test_bags_add_up():
    model, inputs = make(), batch(3)
    vectors = model.tables[0].weight[inputs["categories"][:, 0]].sum(1)
    torch.testing.assert_close(model.tables[0](inputs["categories"][:, 0]), vectors)
    assert model(**inputs).logits.shape == (8,)


def test_plans_do_not_change_losses(trains_alike):
    trains_alike(make(), batch())
    trains_alike(make(), batch(3), plans=("tp2",))


def test_saved_models_load(comes_back):
    comes_back(make(), batch(), DLRM.from_pretrained)
