"""Draws docs/plan.svg: how a GPT-2 lies on four devices under tensor parallelism and ZeRO-3."""

from pathlib import Path

import torch
import transformers

import tutti
from tutti.plan.planner import Planner
from tutti.train.text.picture import plan_picture

with torch.device("meta"):
    config = transformers.GPT2Config(vocab_size=50304, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM")
    model = transformers.GPT2LMHeadModel(config).train()
    ids = torch.empty(8, 1024, dtype=torch.long)
step = tutti.capture(model, {"input_ids": ids, "labels": ids}, torch.optim.AdamW(model.parameters()))
plan = Planner(step, tutti.Cluster.parse("h100:4")).named("tp2xzero3")
shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
Path(__file__).with_name("plan.svg").write_text(plan_picture(plan, shapes) + "\n")
print(plan.explain())
