"""Which models decode on the engine's own threads, and that their activations do, too."""

import pytest
import torch
import transformers

from tutti.exec.kernels import native
from tutti.serve import Engine, Request, Sampling

SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=64)
WIDE = dict(intermediate_size=64, **SIZES)
CONFIGS = {
    "llama": transformers.LlamaConfig(**WIDE),
    "neox": transformers.GPTNeoXConfig(**WIDE),
    "phi": transformers.PhiConfig(**WIDE),
    "falcon": transformers.FalconConfig(ffn_hidden_size=64, **SIZES),
    "opt": transformers.OPTConfig(ffn_dim=64, word_embed_proj_dim=32, **SIZES),
    "gpt2": transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=64),
}
ACTIVATED = {"neox", "phi", "falcon", "opt"}  # with activations that are not those of gated units
FOREIGN = {"gpt2"}  # whose weights are not those of linear layers


@pytest.mark.parametrize("name", CONFIGS)
def test_models(name, monkeypatch):
    graphs = []
    use = native.use
    monkeypatch.setattr(native, "use", lambda graph: (graphs.append([x.target for x in graph.nodes]), use(graph)))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).to(torch.bfloat16).eval()
    engine = Engine(model, plan="single", memory=1 << 20, level="O0")
    output = engine.add(Request([1, 2, 3], Sampling(max_tokens=4, temperature=0, ignore_end=True)))
    while engine.busy:
        engine.step()
    assert len(output.tokens) == 4
    assert (engine.runner.own_threads > 0) == (name not in FOREIGN)
    targets = [target for graph in graphs for target in graph]
    assert (torch.ops.tutti.activation_rows.default in targets) == (name in ACTIVATED | FOREIGN)
    if name not in FOREIGN:
        assert not any("gelu" in str(target) or "relu" in str(target) for target in targets)
