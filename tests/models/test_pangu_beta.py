import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

from tutti.models.pangu_beta import (
    PanGuBetaConfig,
    PanGuBetaForConditionalGeneration,
    PanGuBetaForMaskedLM,
    PanGuBetaForSequenceClassification,
)

TINY = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_decoder_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 16, "pad_token_id": 0, "eos_token_id": 1}  # fmt: skip


def make(kind, **options):
    torch.manual_seed(0)
    return kind(PanGuBetaConfig(**(TINY | options)))


def ids(rows=4, tokens=8, seed=0):
    return torch.randint(2, 40, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def masked(x):
    labels = torch.where(torch.arange(x.shape[1]) % 3 == 0, x, -100)
    return {"input_ids": torch.where(labels >= 0, 2, x), "labels": labels}


def test_there_is_one_embedding():
    """Vocabulary x width occurs once: readers, writers and both output layers share it."""
    model = make(PanGuBetaForConditionalGeneration)
    assert [n for n, p in model.named_parameters() if p.shape == (40, 16)] == ["model.tokens.weight"]
    h, inner, places = 16, 32, 16
    attention, mlp, norm = 4 * (h * h + h), 2 * h * inner + inner + h, 2 * h
    encoder = 2 * (attention + mlp + 2 * norm) + places * h + norm
    decoder = 1 * (2 * attention + mlp + 3 * norm) + places * h + norm
    head = h * h + h + norm + 40
    assert sum(p.numel() for p in model.parameters()) == 40 * h + encoder + decoder + head


def test_the_encoder_looks_both_ways_and_not_at_padding():
    model, x = make(PanGuBetaForMaskedLM).eval(), ids()
    other = x.clone()
    other[:, -1] = 5
    assert not torch.allclose(model(x).logits[:, 0], model(other).logits[:, 0])
    mask = torch.ones_like(x)
    mask[:, -1] = 0
    torch.testing.assert_close(model(x, mask).logits[:, :-1], model(other, mask).logits[:, :-1])
    torch.testing.assert_close(model(x, mask).logits[:, :-1], model(x[:, :-1]).logits)


def test_generation_with_and_without_a_cache():
    model, x = make(PanGuBetaForConditionalGeneration, eos_token_id=None, initializer_range=0.5).eval(), ids(3)
    mask = torch.ones_like(x)
    mask[0, 5:] = 0
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    plain = model.generate(x, use_cache=False, **options)
    assert torch.equal(model.generate(x, **options), plain) and plain.shape == (3, 7)
    assert len(plain.unique()) > 3
    alone = model.generate(x[:1, :5], max_new_tokens=6, do_sample=False)
    assert torch.equal(plain[:1], alone)


def test_the_loss_of_masked_tokens_is_added():
    model, x = make(PanGuBetaForConditionalGeneration), ids()
    corrupted = masked(x)
    written = model(corrupted["input_ids"], labels=ids(4, 5, 1)).loss
    both = model(corrupted["input_ids"], labels=ids(4, 5, 1), masked_tokens=corrupted["labels"]).loss
    logits = model.masked_head(model.get_encoder()(corrupted["input_ids"])[0], model.model.tokens.weight)
    chosen = corrupted["labels"] >= 0
    masked_loss = torch.nn.functional.cross_entropy(logits[chosen], corrupted["labels"][chosen])
    torch.testing.assert_close(both, written + masked_loss)


@pytest.mark.parametrize("kind", [PanGuBetaForMaskedLM, PanGuBetaForConditionalGeneration,
                                  PanGuBetaForSequenceClassification])  # fmt: skip
def test_plans_do_not_change_losses(kind, trains_alike):
    batches = {
        PanGuBetaForMaskedLM: masked(ids()),
        PanGuBetaForConditionalGeneration: {"input_ids": ids(), "labels": ids(4, 5, 1),
                                            "attention_mask": torch.ones(4, 8, dtype=torch.int64)},
        PanGuBetaForSequenceClassification: {"input_ids": ids(), "labels": torch.tensor([0, 1, 1, 0])},
    }  # fmt: skip
    trains_alike(make(kind), batches[kind])


def test_one_saved_model_serves_all_classes(tmp_path, comes_back):
    whole = make(PanGuBetaForConditionalGeneration)
    comes_back(whole, {"input_ids": ids(), "labels": ids(4, 5, 1)}, AutoModelForSeq2SeqLM.from_pretrained)
    whole.save_pretrained(tmp_path)
    reader = AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    encoded = whole.get_encoder()(ids())[0]
    torch.testing.assert_close(reader.model(ids())[0], encoded)
    torch.testing.assert_close(reader(ids()).logits, whole.masked_head(encoded, whole.model.tokens.weight))
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3).eval()
    torch.testing.assert_close(classifier.model(ids())[0], encoded)
    assert classifier(ids()).logits.shape == (4, 3)
    reader.save_pretrained(tmp_path / "reader")
    assert not reader.config.is_encoder_decoder and whole.config.is_encoder_decoder
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "reader").eval()
    assert again.config.is_encoder_decoder
    torch.testing.assert_close(again.get_encoder()(ids())[0], encoded)
