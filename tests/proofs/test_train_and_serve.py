"""What was trained is served: under another plan, without a file in between or from a checkpoint, with equal logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tutti
from tutti.serve import Engine, Request, Sampling

CONFIG = dict(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, max_position_embeddings=128, eos_token_id=None, bos_token_id=None)  # fmt: skip
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SAMPLING = Sampling(max_tokens=6, temperature=0, logprobs=4)


def train(plan: str, cluster: str = "auto") -> tutti.Step:
    """A step after two updates that change the model much."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 256, (8, 16), generator=draw)
    batch = {"input_ids": ids, "labels": ids}
    step = tutti.parallelize(model, torch.optim.AdamW(model.parameters(), lr=0.05), batch, plan=plan, cluster=cluster)
    for _ in range(2):
        step(batch)
    return step


def logprobs(output: Any) -> list[float]:
    return [p for x in output.completions[0].logprobs for _, p in x.top]


def plain(step: tutti.Step) -> tuple[list[int], list[float]]:
    """What `transformers` answers with the trained weights."""
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()
    model.load_state_dict(step.state_dict())
    (output,) = Engine(model, plan="single", blocks=16).generate([Request(PROMPT, SAMPLING)])
    generated = model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=6, pad_token_id=0)
    assert output.tokens == generated[0, len(PROMPT) :].tolist()
    return output.tokens, logprobs(output)


@pytest.fixture(scope="module")
def trained() -> tutti.Step:
    """A step whose weights stay as they are."""
    return train("tp2xzero3", "cpu:4")


@pytest.fixture(scope="module")
def expected(trained) -> tuple[list[int], list[float]]:
    return plain(trained)


@pytest.mark.parametrize("plan, devices", [("tp2", 2), ("tp4", 4), ("pp2", 2), ("single", 1)])
def test_from_a_step(plan, devices, trained, expected):
    step, (tokens, numbers) = trained, expected
    engine = Engine(step, plan=plan, cluster=f"cpu:{devices}", blocks=16)
    (output,) = engine.generate([Request(PROMPT, SAMPLING)])
    assert output.tokens == tokens
    assert logprobs(output) == pytest.approx(numbers, abs=1e-4)


def test_new_weights_while_it_serves():
    step = train("tp2xzero3", "cpu:4")
    engine = Engine(step, plan="tp4", cluster="cpu:4", blocks=16)
    before = engine.generate([Request(PROMPT, SAMPLING)])[0]
    ids = torch.randint(0, 256, (8, 16))
    step({"input_ids": ids, "labels": ids})
    received = engine.update(step)
    after = engine.generate([Request(PROMPT, SAMPLING)])[0]
    assert logprobs(after) == pytest.approx(plain(step)[1], abs=1e-4) and logprobs(after) != logprobs(before)
    assert after.cached == 0 and 0 < received < 4 * sum(p.numel() * 4 for p in step.model.parameters())
    with pytest.raises(ValueError, match="shape"):
        engine.update({"lm_head.weight": torch.zeros(3)})


def _rank(folder: str) -> tuple[list[int], list[float], int]:
    engine = Engine(folder, plan="tp4", blocks=16)
    (output,) = engine.generate([Request(PROMPT, SAMPLING)])
    return output.tokens, logprobs(output), engine.bytes


def _config(folder: Path) -> None:
    LlamaConfig(**CONFIG).save_pretrained(folder)


def test_from_a_checkpoint_on_processes(pool, tmp_path, trained, expected):
    step, (tokens, numbers) = trained, expected
    checkpoints = tutti.Checkpoints(tmp_path)
    step.save(checkpoints, fill=_config)
    checkpoints.wait()
    per_rank = pool.run(_rank, str(checkpoints.latest()))
    total = sum(p.numel() * 4 for p in step.model.parameters())
    for theirs, their_numbers, count in per_rank:
        assert theirs == tokens and their_numbers == pytest.approx(numbers, abs=1e-4)
        assert count < 0.6 * total  # each process reads its parts, and what all have


def test_from_a_folder_of_transformers(tmp_path, trained, expected):
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    model.load_state_dict(trained.state_dict())
    model.save_pretrained(tmp_path)
    engine = Engine(tmp_path, plan="tp2", cluster="cpu:2", blocks=16)
    assert engine.generate([Request(PROMPT, SAMPLING)])[0].tokens == expected[0]
