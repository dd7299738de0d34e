"""Plans for flagship models, as `tutti plan` finds them with its defaults, and what the hand-named plans take.

Six requests, each in a process of its own: Llama-3 70B on 64 and 405B on 512 H100s, DeepSeek-V3 on 2048, T5-11B on 32
A100s, ViT-22B on 64, and a UNet of the size of SDXL's on 8. By request:

- `seconds`: from the command to the plan, capture of the model included; `cpu_seconds` of the process.
- `plan`, `microbatches`, `step_seconds`, `peak_bytes`: what was found, as predicted.
- `hand`: the same of a plan that people use for such a model (`Request.hand`), simulated.
- `times_faster`: the step of the hand plan over that of the plan that was found, where both fit.

`--quick` takes the UNet alone.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import harness
from tutti.hardware import Cluster
from tutti.plan.plan import Plan

LIMIT = 900.0  # seconds for a request
LLAMA = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", head_dim=128, max_position_embeddings=8192,
    num_key_value_heads=8, vocab_size=128256,
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama3-70b": LLAMA
    | dict(hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_hidden_layers=80),
    "llama3-405b": LLAMA
    | dict(hidden_size=16384, intermediate_size=53248, num_attention_heads=128, num_hidden_layers=126),
    "deepseek-v3": dict(
        architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", hidden_size=7168, intermediate_size=18432,
        moe_intermediate_size=2048, num_hidden_layers=61, num_attention_heads=128, num_key_value_heads=128,
        first_k_dense_replace=3, n_routed_experts=256, num_experts_per_tok=8, n_shared_experts=1, n_group=8,
        topk_group=4, q_lora_rank=1536, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
        max_position_embeddings=4096, vocab_size=129280,
    ),
    "t5-11b": dict(
        architectures=["T5ForConditionalGeneration"], model_type="t5", d_model=1024, d_kv=128, d_ff=65536,
        num_layers=24, num_decoder_layers=24, num_heads=128, vocab_size=32128, is_encoder_decoder=True,
    ),
    "vit-22b": dict(
        architectures=["ViTForImageClassification"], model_type="vit", hidden_size=6144, num_hidden_layers=48,
        num_attention_heads=48, intermediate_size=24576, image_size=224, patch_size=14,
    ),
}  # fmt: skip


class Denoiser(nn.Module):
    """The shapes of Stable Diffusion XL's UNet at 1024 x 1024 pixels, 2.6 billion parameters, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

        shapes: dict[str, Any] = dict(
            sample_size=128, in_channels=4, out_channels=4, block_out_channels=(320, 640, 1280), layers_per_block=2,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=(1, 2, 10), attention_head_dim=(5, 10, 20), cross_attention_dim=2048,
            use_linear_projection=True,
        )  # fmt: skip
        self.unet = UNet2DConditionModel(**shapes)

    def forward(self, sample: Tensor, timestep: Tensor, text: Tensor, noise: Tensor) -> Tensor:
        predicted = self.unet(sample, timestep, encoder_hidden_states=text).sample
        return nn.functional.mse_loss(predicted.float(), noise.float())


def unet() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and 64 latents with their texts, for `tutti plan --model flagship_plans:unet`."""
    model = Denoiser().to(torch.bfloat16).train()
    latents = (64, 4, 128, 128)
    return model, {
        "sample": torch.empty(latents, dtype=torch.bfloat16),
        "timestep": torch.empty(64, dtype=torch.int64),
        "text": torch.empty(64, 77, 2048, dtype=torch.bfloat16),
        "noise": torch.empty(latents, dtype=torch.bfloat16),
    }


@dataclass(frozen=True)
class Request:
    """What is asked of `tutti plan`. hand: the name of a plan that people use, with its microbatches, and whose."""

    model: str
    cluster: str
    batch: int
    seq: int
    hand: str
    microbatches: int
    source: str


REQUESTS = (
    Request("llama3-70b", "h100:8x8", 512, 8192, "pp8-interleaved5xdp2xtp4xzero1", 256,
            "by hand, after Megatron-LM's configurations"),
    Request("llama3-405b", "h100:64x8", 512, 8192, "pp8-interleaved8xdp8xtp8xzero1xrecompute", 64,
            "by hand, after Megatron-LM's configurations"),
    Request("deepseek-v3", "h100:256x8", 15360, 4096, "pp16xdp2xep64xzero1xrecompute", 120,
            "the axes of the technical report: 16-way pipeline, 64-way expert parallelism, ZeRO-1"),
    Request("t5-11b", "a100-80:4x8", 512, 512, "zero3", 8, "by hand"),
    Request("vit-22b", "a100-80:8x8", 4096, 224, "dp8xtp8xzero1xrecompute", 4,
            "by hand, after the paper's data and tensor parallelism"),
    Request("unet", "a100-80:1x8", 64, 77, "zero3", 2, "by hand"),
)  # fmt: skip


def asked(request: Request, folder: Path, *options: str) -> tuple[Plan | None, str, float, float]:
    """Run `tutti plan`: the plan, what it said if there is none, seconds, and seconds of its process."""
    if request.model in MODELS:
        (folder / request.model).mkdir(exist_ok=True)
        (folder / request.model / "config.json").write_text(json.dumps(MODELS[request.model]))
        model = str(folder / request.model)
    else:
        model = f"{Path(__file__).stem}:{request.model}"
    saved = folder / "plan.json"
    saved.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tutti.cli", "plan", "--model", model, "--cluster", request.cluster,
               "--batch", str(request.batch), "--seq", str(request.seq), "--save", str(saved), *options]  # fmt: skip
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "TUTTI_PLANS": "off"}
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
        lines = done.stderr.strip().splitlines()[-1:] or [""]
    except subprocess.TimeoutExpired:
        lines = [f"not done after {LIMIT:.0f} s"]
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return (Plan.load(saved) if saved.exists() else None), lines[0], seconds, cpu


def row(plan: Plan | None, said: str, memory: float) -> dict[str, Any]:
    if plan is None:
        return {"error": said}
    prediction = plan.predicted
    return {
        "plan": plan.name, "microbatches": plan.accumulate, "step_seconds": prediction.step_seconds,
        "peak_bytes": prediction.peak_bytes, "fits": prediction.peak_bytes <= memory,
    }  # fmt: skip


def run(quick: bool) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for request in REQUESTS[-1:] if quick else REQUESTS:
        memory = Cluster.parse(request.cluster).device.memory
        with tempfile.TemporaryDirectory() as folder:
            plan, said, seconds, cpu = asked(request, Path(folder))
            figures = {"cluster": request.cluster, "batch": request.batch, "seq": request.seq,
                       "seconds": seconds, "cpu_seconds": cpu, **row(plan, said, memory)}  # fmt: skip
            harness.say(f"{request.model}: {figures}")
            options = "--plan", request.hand, "--accumulate", str(request.microbatches)
            hand = row(*asked(request, Path(folder), *options)[:2], memory)
        if hand.get("fits") and figures.get("fits"):
            figures["times_faster"] = hand["step_seconds"] / figures["step_seconds"]
        result[request.model] = figures | {"hand": hand | {"source": request.source}}
        harness.say(f"{request.model} by hand: {hand}")
    return result


if __name__ == "__main__":
    harness.main(run, __file__, ("transformers", "diffusers"))
