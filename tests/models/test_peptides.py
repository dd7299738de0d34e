import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tutti.models.peptides import AMBIGUOUS, RESIDUES, VOCABULARY, PeptideConfig, PeptideForCausalLM, peptide_tokenizer

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "max_position_embeddings": 16}  # fmt: skip


def make():
    torch.manual_seed(0)
    return PeptideForCausalLM(PeptideConfig(**TINY))


def test_each_residue_is_a_token(tmp_path):
    tokenizer = peptide_tokenizer()
    assert len(tokenizer) == 30 and len(RESIDUES) == 20
    text = RESIDUES + AMBIGUOUS
    ids = tokenizer(text)["input_ids"]
    assert ids == [1, *range(4, 30)] and tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer("kw\nK1")["input_ids"] == [1, *(VOCABULARY[x] for x in "KWKX")]
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == ids


def test_parameters():
    h, inner, layers = 16, 32, 2
    layer = 4 * (h * h + h) + 2 * h * inner + inner + h + 4 * h
    assert sum(p.numel() for p in make().parameters()) == (30 + 16) * h + layers * layer + 2 * h


def test_plans_do_not_change_losses(trains_alike):
    batch = peptide_tokenizer()(["KWKLFKKI", "GIGKFLHS", "ACDEFGHI", "LLLLKKKK"], return_tensors="pt")
    trains_alike(make(), {**batch, "labels": batch["input_ids"]})


def test_saved_models_load_and_generate(comes_back):
    ids = torch.tensor([[1, 4, 5]])
    model = comes_back(make(), {"input_ids": ids}, AutoModelForCausalLM.from_pretrained)
    options = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))
