"""Which parameters Muon updates: the matrices of hidden layers only."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from tutti.optim import Muon
from tutti.optim.muon import hidden_matrices, takes_muon


def mixed():
    model = nn.Module()
    model.tokens = nn.Embedding(5, 4)  # a table, whatever its name
    model.embed_projection = nn.Linear(4, 4)  # outer by its name
    model.up = nn.Linear(4, 8)
    model.convolution = nn.Conv2d(2, 2, 3)
    model.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
    model.lm_head = nn.Linear(4, 5, bias=False)
    model.classifier = nn.Linear(4, 2)
    return model


def test_hidden_matrices_only():
    assert hidden_matrices(mixed()) == {"up.weight"}


@pytest.mark.parametrize("outer", ["embed", "wte.weight", "h.wpe.weight", "lm_head.weight", "head.weight",
                                   "score.weight", "classifier.out.weight", "model.embed_tokens.weight"])  # fmt: skip
def test_names_of_the_outside(outer):
    assert not takes_muon(outer, torch.zeros(4, 4)) and takes_muon("layers.0.attention.weight", torch.zeros(4, 4))
    assert not takes_muon("layers.0.norm.weight", torch.zeros(4)), "a vector"


def test_of_a_llama():
    config = transformers.LlamaConfig(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                                      vocab_size=16)  # fmt: skip
    names = {
        name.rpartition(".weight")[0].rpartition(".")[2]
        for name in hidden_matrices(transformers.LlamaForCausalLM(config))
    }
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_a_module_is_split_into_both_groups():
    optimizer = Muon(mixed(), lr=0.1)
    matrices, others = (next(g for g in optimizer.param_groups if g["use_muon"] is use) for use in (True, False))
    assert matrices["param_names"] == ["up.weight"]
    every = {name for name, p in mixed().named_parameters() if p.requires_grad}
    assert set(others["param_names"]) == every - {"up.weight"}
    with pytest.raises(ValueError, match="use_muon=True has a parameter of shape"):
        Muon([{"params": [nn.Parameter(torch.zeros(3))], "use_muon": True}], lr=0.1)
