"""A Trainer on several processes whose plan splits the model: what rank 0 does alone reads no tensor of others."""

from __future__ import annotations

import pytest
import torch
import transformers

import tutti
from cases import slow

ROWS = [{"input_ids": [(i + j) % 16 for j in range(8)], "labels": [(i + j) % 16 for j in range(8)]} for i in range(16)]


def train(folder: str, plan: str, dtype: torch.dtype) -> tuple[float, float]:
    """Train, evaluate, save, predict and resume."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(num_attention_heads=4, max_position_embeddings=16, **sizes)
    model = transformers.LlamaForCausalLM(config).to(dtype)
    args = tutti.TrainingArguments(
        folder, global_batch_size=8, max_steps=4, save_steps=2, eval_strategy="steps", eval_steps=2, logging_steps=1,
        save_total_limit=1, load_best_model_at_end=True, report_to="none", use_cpu=True, plan=plan, level="O0",
        disable_tqdm=True, fp32_master_weights=dtype is not torch.float32,
    )  # fmt: skip
    trainer = tutti.Trainer(model, args, train_dataset=ROWS, eval_dataset=ROWS[:8])
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(f"{folder}/model")
    trainer.predict(ROWS[:4])
    trainer.train(resume_from_checkpoint=True)
    return loss, float(next(model.parameters()).detach().float().sum())


@pytest.mark.parametrize(("plan", "dtype"), [
    ("pp2xdp2", torch.float32), slow("zero3", torch.float32), slow("tp4", torch.float32), slow("zero1", torch.bfloat16),
])  # fmt: skip
def test_it_trains_saves_and_resumes(pool, tmp_path, plan, dtype):
    results = pool.run(train, str(tmp_path), plan, dtype)
    assert results == [results[0]] * 4
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype)
    ids = torch.tensor([row["input_ids"] for row in ROWS[:8]])
    assert saved(ids, labels=ids).loss.item() == pytest.approx(
        results[0][0], rel=1e-5 if dtype is torch.float32 else 2e-2
    )
