"""Small calls of a decoding step are joined for a GPU, and give what they gave: shown on a CPU, by their formulas."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import transformers

from tutti.exec.kernels import joined_rows, levels
from tutti.serve import Engine, Sampling

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 128, "pad_token_id": 0,
    "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 128, "eos_token_id": None}
# model -> more options, and the joined calls of a layer
MODELS = {
    "Llama": ({}, {"linears_rows": 1, "rotary_write": 1, "add_norm_rows": 2, "gated_rows": 1}),
    "Qwen2": ({}, {"linears_rows": 1, "rotary_write": 1, "add_norm_rows": 2, "gated_rows": 1}),
    "Qwen3": ({"head_dim": 16}, {"linears_rows": 1, "rotary_write": 1, "add_norm_rows": 2, "gated_rows": 1}),
    "Gemma2": ({"head_dim": 16}, {"linears_rows": 1, "rotary_write": 1, "add_norm_rows": 2, "gated_rows": 1}),
    "Phi3": ({}, {"add_norm_rows": 2}),
    "Olmo2": ({}, {"linears_rows": 1, "rotary_write": 1, "gated_rows": 1}),
    "GPT2": (GPT2, {"add_norm_rows": 2}),
}
MEMORY = 1 << 22  # bytes of a cache
GREEDY = Sampling(max_tokens=10, temperature=0, ignore_end=True)
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], list(range(20, 50))]


@pytest.mark.parametrize("name", MODELS)
def test_joined_calls_give_the_same_tokens(name, monkeypatch):
    options, expected = MODELS[name]
    config = getattr(transformers, f"{name}Config")(**(options if name == "GPT2" else {**SIZES, **options}))
    torch.manual_seed(0)
    kind = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    model = getattr(transformers, name + kind)(config).eval()
    wanted = [x.tokens for x in Engine(model, memory=MEMORY, self_check=False).generate(PROMPTS, GREEDY)]
    calls: list[Counter[str]] = []

    def use(graph: torch.fx.Graph) -> None:
        joined_rows.use(graph)
        graph.lint()
        names = (str(node.target).split(".")[1] for node in graph.nodes if str(node.target).startswith("tutti."))
        calls.append(Counter(names))

    monkeypatch.setattr(levels.native, "use", use)
    engine = Engine(model, memory=MEMORY, self_check=False)
    assert [x.tokens for x in engine.generate(PROMPTS, GREEDY)] == wanted
    for counts in calls:
        assert {key: counts[key] / 2 for key in expected} == pytest.approx(expected, abs=0.5)  # also a norm at the end
